"use strict";
// The timeline of a page: zoom with the wheel or + and -, drag or arrow keys to move, hover to read.
// All data comes from the JSON element beside the canvas; nothing is fetched.
(function () {
  const ROW = 20, GAP = 4, AXIS = 24, MEMORY = 46, FONT = "12px system-ui, sans-serif";

  function bytes(text) {
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out.buffer;
  }

  function read(element) {
    const data = JSON.parse(element.textContent);
    for (const [name, type] of Object.entries({
      start: Float64Array, end: Float64Array, kind: Uint8Array, block: Int32Array,
      work: Int32Array, microbatch: Int32Array, slot_task: Int32Array, slot_from: Int32Array, critical: Int32Array,
    })) data[name] = new type(bytes(data[name]));
    for (const memory of data.memories) {
      memory.times = new Float64Array(bytes(memory.times));
      memory.amounts = new Float64Array(bytes(memory.amounts));
    }
    return data;
  }

  // The first index in [low, high) of ascending `list` whose value is above `wanted`.
  function above(list, low, high, wanted) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] > wanted) high = middle; else low = middle + 1;
    }
    return low;
  }

  function timeText(data, value) {
    if (data.unit !== "s") return +value.toFixed(3) + " steps";
    for (const [size, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]])
      if (Math.abs(value) >= size) return (value / size).toPrecision(4).replace(/\.?0+$/, "") + " " + name;
    return "0 s";
  }

  function sizeText(data, value) {
    if (data.unit !== "s") return String(+value.toFixed(3));
    for (const [size, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
      if (Math.abs(value) >= size) return (value / size).toFixed(2) + " " + name;
    return value.toFixed(0) + " B";
  }

  class View {
    constructor(root) {
      this.root = root;
      this.data = read(root.querySelector("script"));
      this.canvas = root.querySelector("canvas");
      this.tip = root.querySelector(".tip");
      this.pen = this.canvas.getContext("2d");
      this.from = 0;
      this.to = this.data.makespan || 1;
      this.hidden = new Set();
      this.path = new Set();
      this.showPath = false;
      this.hovered = -1;
      for (const task of this.data.critical) this.path.add(task);
      // A lane's starts and ends in order: tasks of a lane never overlap, so both ascend.
      this.starts = Float64Array.from(this.data.slot_task, (task) => this.data.start[task]);
      this.ends = Float64Array.from(this.data.slot_task, (task) => this.data.end[task]);
      this.pen.font = FONT;
      const names = [...this.data.lanes, ...this.data.memories.map((memory) => memory.name)];
      const widest = Math.max(...names.map((name) => this.pen.measureText(name).width), 60);
      this.labels = Math.min(widest + 16, 240);
      this.listen();
      this.resize();
    }

    get laneBottom() { return AXIS + this.data.lanes.length * (ROW + GAP); }

    resize() {
      const ratio = window.devicePixelRatio || 1;
      this.width = this.root.clientWidth;
      this.height = this.laneBottom + this.data.memories.length * (MEMORY + GAP) + 6;
      this.canvas.style.height = this.height + "px";
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.draw();
    }

    x(time) { return this.labels + (time - this.from) / (this.to - this.from) * (this.width - this.labels - 8); }
    time(x) { return this.from + (x - this.labels) / (this.width - this.labels - 8) * (this.to - this.from); }

    show(from, to) {
      const whole = this.data.makespan || 1;
      const span = Math.min(whole, Math.max(to - from, whole * 1e-7));
      this.from = Math.min(Math.max(0, from), whole - span);
      this.to = this.from + span;
      this.draw();
    }

    zoom(factor, x) {
      const at = this.time(x === undefined ? (this.labels + this.width) / 2 : x);
      this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
    }

    color(name) { return getComputedStyle(this.root).getPropertyValue(name).trim(); }

    draw() {
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => this.paint());
    }

    paint() {
      const pen = this.pen;
      this.colors = this.data.kinds.map((_, i) => this.color("--k" + i));
      this.ink = this.color("--ink");
      this.soft = this.color("--soft");
      this.line = this.color("--line");
      pen.clearRect(0, 0, this.width, this.height);
      pen.font = FONT;
      pen.textBaseline = "middle";
      this.paintAxis();
      for (let lane = 0; lane < this.data.lanes.length; lane++) this.paintLane(lane);
      this.data.memories.forEach((memory, i) => this.paintMemory(memory, i));
    }

    paintAxis() {
      const pen = this.pen, rough = (this.to - this.from) / Math.max(2, (this.width - this.labels) / 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
      pen.textAlign = "center";
      for (let k = Math.ceil(this.from / step); k * step <= this.to; k++) {
        const x = this.x(k * step);
        pen.strokeStyle = this.line;
        pen.beginPath();
        pen.moveTo(x, AXIS - 4);
        pen.lineTo(x, this.height);
        pen.stroke();
        pen.fillStyle = this.soft;
        if (x < this.width - 30) pen.fillText(timeText(this.data, k * step), x, AXIS / 2);
      }
    }

    label(text, y, color) {
      const pen = this.pen;
      pen.textAlign = "right";
      pen.fillStyle = color;
      let shown = text;
      while (shown.length > 4 && pen.measureText(shown).width > this.labels - 12)
        shown = "…" + shown.slice(shown.length > 24 ? shown.length - 22 : 2);
      pen.fillText(shown, this.labels - 8, y);
    }

    paintLane(lane) {
      const data = this.data, pen = this.pen, top = AXIS + lane * (ROW + GAP);
      pen.fillStyle = this.color("--card");
      pen.fillRect(this.labels, top, this.width - this.labels - 8, ROW);
      this.label(data.lanes[lane], top + ROW / 2, this.ink);
      const low = data.slot_from[lane], high = data.slot_from[lane + 1];
      let index = above(this.ends, low, high, this.from);
      pen.textAlign = "center";
      while (index < high && this.starts[index] < this.to) {
        const task = data.slot_task[index], kind = data.kind[task];
        const left = Math.max(this.labels, this.x(this.starts[index]));
        const right = Math.min(this.width - 8, this.x(this.ends[index]));
        if (right - left < 1) {
          index = this.paintPixel(index, high, Math.floor(left), top);
          continue;
        }
        if (!this.hidden.has(kind)) this.paintTask(task, left, right, top);
        index++;
      }
      pen.globalAlpha = 1;
    }

    // Tasks narrower than a pixel: their shares of it, stacked by kind; what stays empty is idle.
    paintPixel(index, high, pixel, top) {
      const data = this.data, pen = this.pen, width = this.time(pixel + 1) - this.time(pixel);
      const shares = new Map(), until = this.time(pixel + 1);
      let alpha = 0.25;
      do {
        const task = data.slot_task[index], kind = data.kind[task];
        shares.set(kind, (shares.get(kind) || 0) + (this.ends[index] - this.starts[index]) / width);
        alpha = Math.max(alpha, this.dim(task));
        index++;
      } while (index < high && this.starts[index] < until && this.x(this.ends[index]) - this.x(this.starts[index]) < 1);
      let y = top + ROW;
      pen.globalAlpha = alpha;
      for (const [kind, share] of shares) {
        if (this.hidden.has(kind)) continue;
        const tall = Math.min(y - top, Math.max(1, share * ROW));
        pen.fillStyle = this.colors[kind];
        pen.fillRect(pixel, y - tall, 1, tall);
        y -= tall;
      }
      return index;
    }

    dim(task) { return this.showPath && !this.path.has(task) ? 0.25 : 1; }

    paintTask(task, left, right, top) {
      const pen = this.pen, data = this.data, wide = right - left;
      pen.globalAlpha = this.dim(task);
      pen.fillStyle = this.colors[data.kind[task]];
      pen.fillRect(left, top, wide > 3 ? wide - 0.6 : wide, ROW);
      if (task === this.hovered) {
        pen.strokeStyle = this.ink;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, top + 1, Math.max(1, wide - 2), ROW - 2);
        pen.lineWidth = 1;
      }
      const label = data.microbatch[task] >= 0 ? String(data.microbatch[task]) : "";
      if (label && wide > 8 + 7 * label.length) {
        pen.fillStyle = "#fff";
        pen.fillText(label, (left + right) / 2, top + ROW / 2 + 0.5);
      }
      pen.globalAlpha = 1;
    }

    paintMemory(memory, index) {
      const pen = this.pen, top = this.laneBottom + index * (MEMORY + GAP), bottom = top + MEMORY;
      // A cap far above the curve would press it flat: then it is only said, not drawn.
      const capped = memory.capacity && memory.capacity < 4 * memory.peak;
      const most = Math.max(memory.peak, capped ? memory.capacity : 0) * 1.05 || 1;
      const y = (amount) => bottom - amount / most * MEMORY;
      const times = memory.times, amounts = memory.amounts;
      this.label(memory.name, top + MEMORY / 2, this.ink);
      pen.beginPath();
      pen.moveTo(this.labels, bottom);
      let i = Math.max(0, above(times, 0, times.length, this.from) - 1);
      for (; i < times.length && times[i] < this.to; i++) {
        const x = Math.max(this.labels, this.x(times[i]));
        pen.lineTo(x, i ? y(amounts[i - 1]) : bottom);
        pen.lineTo(x, y(amounts[i]));
      }
      if (i > 0) pen.lineTo(this.width - 8, y(amounts[i - 1]));
      pen.lineTo(this.width - 8, bottom);
      pen.closePath();
      pen.globalAlpha = 0.3;
      pen.fillStyle = this.color("--held");
      pen.fill();
      pen.globalAlpha = 1;
      pen.textAlign = "right";
      pen.fillStyle = this.soft;
      pen.fillText(sizeText(this.data, memory.peak)
        + (memory.capacity ? " of " + sizeText(this.data, memory.capacity) : ""), this.width - 14, bottom - 9);
      if (capped) {
        pen.strokeStyle = this.color("--k5");
        pen.setLineDash([4, 3]);
        pen.beginPath();
        pen.moveTo(this.labels, y(memory.capacity));
        pen.lineTo(this.width - 8, y(memory.capacity));
        pen.stroke();
        pen.setLineDash([]);
      }
    }

    taskAt(x, y) {
      const lane = Math.floor((y - AXIS) / (ROW + GAP));
      if (x < this.labels || lane < 0 || lane >= this.data.lanes.length) return -1;
      const low = this.data.slot_from[lane], high = this.data.slot_from[lane + 1], time = this.time(x);
      const reach = (this.to - this.from) / (this.width - this.labels) * 2;
      const index = above(this.ends, low, high, time);
      for (const near of [index, index - 1])
        if (near >= low && near < high && this.starts[near] - reach <= time && time <= this.ends[near] + reach)
          return this.data.slot_task[near];
      return -1;
    }

    words(x, y) {
      const data = this.data, task = this.taskAt(x, y);
      if (task >= 0) {
        const lines = [data.blocks[data.block[task]], data.kinds[data.kind[task]]];
        if (data.microbatch[task] >= 0) lines[1] += ", micro-batch " + data.microbatch[task];
        if (data.work[task] >= 0) lines.push(...data.works[data.work[task]]);
        lines.push(timeText(data, data.start[task]) + " to " + timeText(data, data.end[task])
          + " (" + timeText(data, data.end[task] - data.start[task]) + ")");
        if (this.path.has(task)) lines.push("on the critical path");
        return [task, lines];
      }
      const index = Math.floor((y - this.laneBottom) / (MEMORY + GAP));
      const memory = data.memories[index];
      if (memory && x >= this.labels) {
        const at = Math.max(0, above(memory.times, 0, memory.times.length, this.time(x)) - 1);
        const lines = [memory.name, sizeText(data, memory.amounts[at]) + " held",
          "at most " + sizeText(data, memory.peak)];
        if (memory.capacity) lines.push("of " + sizeText(data, memory.capacity));
        return [-1, lines];
      }
      return [-1, []];
    }

    hover(event) {
      const box = this.canvas.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const [task, lines] = this.words(x, y);
      if (task !== this.hovered) { this.hovered = task; this.draw(); }
      this.tip.hidden = !lines.length;
      this.tip.replaceChildren(...lines.map((text) => {
        const line = document.createElement("div");
        line.textContent = text;  // never markup: names are whatever a model or machine is called
        return line;
      }));
      const left = Math.min(x + 14, this.width - this.tip.offsetWidth - 6);
      this.tip.style.left = Math.max(0, left) + "px";
      this.tip.style.top = (this.canvas.offsetTop + y + 16) + "px";
    }

    listen() {
      const canvas = this.canvas;
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY)) {
          event.preventDefault();
          this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, event.clientX - canvas.getBoundingClientRect().left);
        }
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        this.drag = [event.clientX, this.from, this.to];
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!this.drag) return this.hover(event);
        const [x, from, to] = this.drag;
        const moved = (x - event.clientX) / (this.width - this.labels - 8) * (to - from);
        this.show(from + moved, to + moved);
      });
      canvas.addEventListener("pointerup", () => { this.drag = null; });
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.hovered = -1; this.draw(); });
      canvas.addEventListener("dblclick", () => this.show(0, this.data.makespan || 1));
      canvas.addEventListener("keydown", (event) => this.key(event));
      for (const button of this.root.querySelectorAll("[data-kind]"))
        button.addEventListener("click", () => {
          const kind = Number(button.dataset.kind), shown = this.hidden.delete(kind);
          if (!shown) this.hidden.add(kind);
          button.setAttribute("aria-pressed", String(shown));
          this.draw();
        });
      const critical = this.root.querySelector("[data-critical]");
      if (critical) critical.addEventListener("click", () => {
        this.showPath = !this.showPath;
        critical.setAttribute("aria-pressed", String(this.showPath));
        this.draw();
      });
      this.root.querySelector("[data-all]").addEventListener("click", () => this.show(0, this.data.makespan || 1));
      window.addEventListener("resize", () => this.resize());
      window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }

    key(event) {
      const span = this.to - this.from, step = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
      if (step) this.show(this.from + step * span, this.to + step * span);
      else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.4);
      else if (event.key === "-") this.zoom(1.4);
      else if (event.key === "0" || event.key === "Home") this.show(0, this.data.makespan || 1);
      else return;
      event.preventDefault();
    }
  }

  const begun = performance.now();
  window.partitaTimelines = Array.from(document.querySelectorAll(".timeline"), (root) => new View(root));
  document.documentElement.dataset.ready = String(Math.round(performance.now() - begun));
})();
