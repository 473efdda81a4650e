"use strict";
// The timeline of a page: zoom with the wheel or + and -, drag or arrow keys to move, hover or keys to read.
// All data comes from the JSON element beside the canvas; nothing is fetched.
(function () {
  const AXIS = 24, MEMORY = 46, FONT = "12px system-ui, sans-serif";
  const LINES = "rgba(255,255,255,0.42)", TILE = 8, MARKED = 0.2;

  const TYPES = { f8: Float64Array, f4: Float32Array, u1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array };

  // A column: its type, a colon, its bytes in base64.
  function column(text) {
    const raw = atob(text.slice(3)), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return new TYPES[text.slice(0, 2)](out.buffer);
  }
  window.partitaColumn = column;

  function read(element) {
    const data = JSON.parse(element.textContent);
    for (const name of ["start", "end", "kind", "block", "work", "microbatch", "slot_task", "slot_from", "critical",
      "messages", "idle_from", "idle_begin", "idle_end", "idle_cause", "shares"]) data[name] = column(data[name]);
    for (const memory of data.memories) {
      memory.times = column(memory.times);
      memory.amounts = column(memory.amounts);
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
    for (const [size, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]])
      if (Math.abs(value) >= size) return (value / size).toPrecision(4).replace(/\.?0+$/, "") + " " + name;
    return "0 s";
  }

  function sizeText(data, value) {
    if (data.unit !== "s") return String(+value.toFixed(3));
    for (const [size, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
      if (Math.abs(value) >= size) {  // three digits, as everywhere on the page
        const scaled = value / size;
        return scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0) + " " + name;
      }
    return value.toFixed(0) + " B";
  }

  // A tile of a pattern by its number: 1 to 4 lines, 5 crossed lines, 6 dots; 0 is plain.
  function tile(number, ink, ground) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = TILE;
    const pen = canvas.getContext("2d");
    if (ground) { pen.fillStyle = ground; pen.fillRect(0, 0, TILE, TILE); }
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    if (number === 1 || number === 5)
      for (const shift of [-TILE, 0, TILE]) { pen.moveTo(shift, TILE); pen.lineTo(shift + TILE, 0); }
    if (number === 2 || number === 5)
      for (const shift of [-TILE, 0, TILE]) { pen.moveTo(shift, 0); pen.lineTo(shift + TILE, TILE); }
    if (number === 3) { pen.moveTo(TILE / 2, 0); pen.lineTo(TILE / 2, TILE); }
    if (number === 4) { pen.moveTo(0, TILE / 2); pen.lineTo(TILE, TILE / 2); }
    pen.stroke();
    if (number === 6) pen.fillRect(TILE / 2 - 1, TILE / 2 - 1, 2, 2);
    return canvas;
  }

  class View {
    constructor(root, number) {
      this.root = root;
      this.number = number;
      this.data = read(root.querySelector("script"));
      this.canvas = root.querySelector("canvas");
      this.tip = root.querySelector(".tip");
      this.pen = this.screen = this.canvas.getContext("2d");
      this.known = new Map();  // colours as pixels have them
      this.oneLength = false;  // measured lanes drawn as long as what was predicted
      this.from = 0;
      this.to = this.whole;
      this.hidden = new Set();
      this.path = new Set(this.data.critical);
      this.showPath = false;
      this.showIdle = true;
      this.find = "";
      this.hovered = -1;
      this.row = -1;  // the lane that keys move in
      // The messages of each task: of a send its own, of what is sent or waited for all of them.
      this.sent = new Map();
      for (let i = 0; i + 2 < this.data.messages.length; i += 3)
        for (const task of new Set(this.data.messages.slice(i, i + 3)))
          this.sent.set(task, [...(this.sent.get(task) || []), i]);
      this.place();
      this.laneOf = new Int32Array(this.data.start.length).fill(-1);
      for (let lane = 0; lane < this.data.lanes.length; lane++)
        for (let i = this.data.slot_from[lane]; i < this.data.slot_from[lane + 1]; i++)
          if (this.laneOf[this.data.slot_task[i]] < 0) this.laneOf[this.data.slot_task[i]] = lane;
      // Many lanes are a map: thin rows, some of them named.
      const count = this.data.lanes.length, many = count > 48;
      this.tall = count > 128 ? 3 : many ? 6 : 20;
      this.gap = count > 128 ? 0 : many ? 1 : 4;
      this.named = many ? Math.ceil(14 / (this.tall + this.gap)) : 1;
      this.pen.font = FONT;
      const names = [...this.data.lanes, ...this.data.memories.map((memory) => memory.name + " mem")];
      this.widest = Math.max(...names.map((name) => this.pen.measureText(name).width), 60) + 16;
      this.listen();
      this.resize();
    }

    // All the time there is to show.
    get whole() { return (this.oneLength ? this.data.predicted : this.data.makespan) || 1; }

    // A lane's starts and ends in order: tasks of a lane never overlap, so both ascend.
    place() {
      const data = this.data, scale = this.oneLength ? data.predicted / data.makespan : 1;
      this.starts = Float64Array.from(data.slot_task, (task) => data.start[task]);
      this.ends = Float64Array.from(data.slot_task, (task) => data.end[task]);
      for (let lane = 0; lane < data.lanes.length; lane++)
        for (let i = data.slot_from[lane]; data.measured[lane] && i < data.slot_from[lane + 1]; i++) {
          this.starts[i] *= scale;
          this.ends[i] *= scale;
        }
    }

    get laneBottom() { return AXIS + this.data.lanes.length * (this.tall + this.gap); }

    resize() {
      const ratio = window.devicePixelRatio || 1;
      this.width = this.root.clientWidth || 720;
      this.labels = Math.round(Math.min(this.widest, 240, Math.max(84, this.width * 0.28)));
      this.shortened = new Map();
      // What is narrower than a pixel is written into the pixels of a row, which is drawn at once.
      this.strip = document.createElement("canvas");
      this.strip.width = Math.max(1, Math.ceil(this.width - this.labels - 8));
      this.strip.height = this.tall;
      this.stripPen = this.strip.getContext("2d");
      this.image = this.stripPen.createImageData(this.strip.width, this.tall);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.written = false;
      this.height = this.laneBottom + this.data.memories.length * (MEMORY + 4) + 6;
      this.canvas.style.height = this.height + "px";
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.draw();
    }

    x(time) { return this.labels + (time - this.from) / (this.to - this.from) * (this.width - this.labels - 8); }
    time(x) { return this.from + (x - this.labels) / (this.width - this.labels - 8) * (this.to - this.from); }
    top(lane) { return AXIS + lane * (this.tall + this.gap); }

    show(from, to) {
      const whole = this.whole;
      const span = Math.min(whole, Math.max(to - from, whole * 1e-7));
      this.from = Math.min(Math.max(0, from), whole - span);
      this.to = this.from + span;
      this.changed();
    }

    zoom(factor, x) {
      const at = this.time(x === undefined ? (this.labels + this.width) / 2 : x);
      this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
    }

    // What is shown stands in the address, so that a link leads to it.
    changed() {
      this.draw();
      clearTimeout(this.noted);
      this.noted = setTimeout(() => {
        const state = new URLSearchParams();
        state.set("view", String(this.number));
        if (this.from > 0 || this.to < this.whole) state.set("t", this.from + "," + this.to);
        if (this.hidden.size) state.set("hide", [...this.hidden].sort((a, b) => a - b).join(","));
        if (this.oneLength) state.set("length", "1");
        if (this.showPath) state.set("path", "1");
        if (!this.showIdle) state.set("idle", "0");
        if (this.find) state.set("find", this.find);
        try { history.replaceState(null, "", "#" + state); } catch { /* a frame without an address of its own */ }
      }, 120);
    }

    restore(state) {
      if (state.get("length") === "1") this.press("length");
      const [from, to] = (state.get("t") || "").split(",").map(Number);
      if (to > from && from >= 0) {
        const whole = this.whole;
        this.from = Math.min(from, whole * (1 - 1e-7));
        this.to = Math.min(to, whole);
      }
      for (const kind of (state.get("hide") || "").split(",")) if (kind !== "") this.press("kind", kind);
      if (state.get("path") === "1") this.press("critical");
      if (state.get("idle") === "0") this.press("idle");
      const find = this.root.querySelector("[data-find]");
      if (find && state.get("find")) { find.value = state.get("find"); this.look(find.value); }
      this.root.scrollIntoView();
      this.draw();
    }

    press(name, value) {
      const button = this.root.querySelector("[data-" + name + (value === undefined ? "" : '="' + CSS.escape(value) + '"') + "]");
      if (button) button.click();
    }

    color(name) { return getComputedStyle(this.root).getPropertyValue(name).trim(); }

    draw() {
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => this.paint());
    }

    theme() {
      const styles = getComputedStyle(this.root), get = (name) => styles.getPropertyValue(name).trim();
      const key = ["--ink", "--card", "--k0"].map(get).join();
      if (key === this.themed) return;
      this.themed = key;
      this.colors = this.data.kinds.map((_, i) => get("--k" + i));
      this.ink = get("--ink"); this.soft = get("--soft"); this.line = get("--line");
      this.card = get("--card"); this.held = get("--held"); this.cap = get("--k5");
      this.overlays = [...Array(7).keys()].map((n) => n ? this.pen.createPattern(tile(n, LINES), "repeat") : null);
      this.causeColors = this.data.causes.map((_, i) => get("--i" + i));
      this.causeFills = this.data.causes.map((_, i) => {
        const fill = this.pen.createPattern(tile(this.data.cause_patterns[i], this.causeColors[i], this.card), "repeat");
        fill.plain = this.causeColors[i];
        return fill;
      });
    }

    // On the canvas; or on a pen that writes a picture, for the download.
    paint(pen) {
      if (pen) this.pen = pen; else pen = this.screen;
      this.theme();
      pen.clearRect(0, 0, this.width, this.height);
      pen.font = FONT;
      pen.textBaseline = "middle";
      this.paintAxis();
      for (let lane = 0; lane < this.data.lanes.length; lane++)
        if (this.data.columns) this.paintColumns(lane); else this.paintLane(lane);
      if (this.showPath) this.paintArrows();
      for (const i of this.sent.get(this.hovered) || []) this.paintMessage(i);
      this.data.memories.forEach((memory, i) => this.paintMemory(memory, i));
      this.pen = this.screen;
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
      let shown = this.shortened.get(text);
      if (shown === undefined) {
        shown = text;
        while (shown.length > 4 && pen.measureText(shown).width > this.labels - 12)
          shown = "…" + shown.slice(shown.length > 24 ? shown.length - 22 : 2);
        this.shortened.set(text, shown);
      }
      pen.fillText(shown, this.labels - 8, y);
    }

    paintGround(lane) {
      const pen = this.pen, top = this.top(lane);
      pen.fillStyle = this.card;
      pen.fillRect(this.labels, top, this.width - this.labels - 8, this.tall);
      if (lane % this.named === 0) this.label(this.data.lanes[lane], top + this.tall / 2, this.ink);
      if (lane === this.row && document.activeElement === this.canvas) {
        pen.strokeStyle = this.ink;
        pen.strokeRect(this.labels, top - 1, this.width - this.labels - 8, this.tall + 2);
      }
    }

    // A rectangle of whole pixels in the row at `top`: from a share of its height to another.
    dot(x, wide, top, low, high, color, alpha) {
      if (this.pen !== this.screen) {
        this.pen.globalAlpha = alpha;
        this.pen.fillStyle = color;
        this.pen.fillRect(x, top + low, wide, high - low);
        this.pen.globalAlpha = 1;
        return;
      }
      const across = this.strip.width, first = Math.max(0, Math.floor(x - this.labels));
      const last = Math.min(across, Math.max(first + 1, Math.floor(x + wide - this.labels)));
      const shade = (Math.round(alpha * 255) << 24) | this.rgb(color);
      for (let y = Math.round(low); y < Math.round(high); y++)
        this.pixels.fill(shade, y * across + first, y * across + last);
      this.written = true;
    }

    rgb(color) {
      let value = this.known.get(color);
      if (value === undefined) {
        const n = parseInt(color.slice(1), 16);
        value = ((n & 255) << 16) | (n & 0xff00) | (n >> 16);
        this.known.set(color, value);
      }
      return value;
    }

    // Show what was written into the pixels of a row.
    flush(top) {
      if (!this.written) return;
      this.stripPen.putImageData(this.image, 0, 0);
      this.pen.drawImage(this.strip, this.labels, top);
      this.pixels.fill(0);
      this.written = false;
    }

    paintLane(lane) {
      const data = this.data, pen = this.pen, top = this.top(lane);
      this.paintGround(lane);
      if (this.showIdle) this.paintIdle(lane, top);
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
        if (!this.hidden.has(kind)) this.paintTask(task, left, right, top, data.measured[lane]);
        index++;
      }
      this.flush(top);
      pen.globalAlpha = 1;
    }

    // Why nothing runs: lines in the colour of the cause; of a dependency a part may be imbalance.
    paintIdle(lane, top) {
      const data = this.data, pen = this.pen, high = data.idle_from[lane + 1];
      const uneven = data.uneven[lane] || 0, dependency = 0, imbalance = data.causes.indexOf("imbalance");
      let index = above(data.idle_end, data.idle_from[lane], high, this.from);
      for (; index < high && data.idle_begin[index] < this.to; index++) {
        const left = Math.max(this.labels, this.x(data.idle_begin[index]));
        const right = Math.min(this.width - 8, this.x(data.idle_end[index]));
        if (right - left < 0.5) continue;
        const cause = data.idle_cause[index];
        const part = cause === dependency ? uneven : 0;
        if (right - left < 4) {
          this.dot(left, right - left, top, 0, this.tall, this.causeColors[part > 0.5 ? imbalance : cause], 0.35);
          continue;
        }
        pen.fillStyle = this.causeFills[cause];
        pen.fillRect(left, top, right - left, this.tall * (1 - part));
        if (part > 0) {
          pen.fillStyle = this.causeFills[imbalance];
          pen.fillRect(left, top + this.tall * (1 - part), right - left, this.tall * part);
        }
      }
    }

    // Tasks narrower than a pixel: their shares of it, stacked by kind; what stays empty is idle.
    paintPixel(index, high, pixel, top) {
      const data = this.data, width = this.time(pixel + 1) - this.time(pixel);
      const shares = new Map(), until = this.time(pixel + 1);
      let alpha = 0.25;
      do {
        const task = data.slot_task[index], kind = data.kind[task];
        shares.set(kind, (shares.get(kind) || 0) + (this.ends[index] - this.starts[index]) / width);
        alpha = Math.max(alpha, this.dim(task));
        index++;
      } while (index < high && this.starts[index] < until && this.x(this.ends[index]) - this.x(this.starts[index]) < 1);
      let y = this.tall;
      for (const [kind, share] of shares) {
        if (this.hidden.has(kind)) continue;
        const tall = Math.min(y, Math.max(1, share * this.tall));
        this.dot(pixel, 1, top, y - tall, y, this.colors[kind], alpha);
        y -= tall;
      }
      return index;
    }

    // Too many tasks for a file: how much of each column of time a lane spends on what.
    paintColumns(lane) {
      const data = this.data, top = this.top(lane), count = data.columns;
      this.paintGround(lane);
      const width = data.makespan / count, first = Math.max(0, Math.floor(this.from / width));
      const last = Math.min(count, Math.ceil(this.to / width));
      const step = Math.max(1, Math.floor((last - first) / Math.max(1, this.width - this.labels)));
      for (let column = first; column < last; column += step) {
        const left = Math.max(this.labels, this.x(column * width));
        const right = Math.min(this.width - 8, this.x((column + step) * width));
        let y = this.tall;
        for (let place = 0; place < data.present.length; place++) {
          const kind = data.present[place];
          if (this.hidden.has(kind)) continue;
          let share = 0;
          for (let i = column; i < Math.min(column + step, count); i++)
            share += data.shares[(lane * count + i) * data.present.length + place];
          const tall = Math.min(y, share / step / 255 * this.tall);
          if (!(tall > 0)) continue;
          this.dot(left, right - left, top, y - tall, y, this.colors[kind], 1);
          y -= tall;
        }
      }
      this.flush(top);
    }

    isFound(task) {
      return !this.find || this.found.has(this.data.block[task]) || this.foundKinds.has(this.data.kind[task]);
    }

    dim(task) {
      if (this.find && !this.isFound(task)) return MARKED;
      return this.showPath && !this.path.has(task) ? 0.25 : 1;
    }

    paintTask(task, left, right, top, measured) {
      const pen = this.pen, data = this.data, wide = right - left, kind = data.kind[task];
      const inset = measured && this.tall > 12 ? 3 : 0;
      pen.globalAlpha = this.dim(task);
      pen.fillStyle = this.colors[kind];
      pen.fillRect(left, top + inset, wide > 3 ? wide - 0.6 : wide, this.tall - 2 * inset);
      if (wide > 6 && this.overlays[data.patterns[kind]]) {
        pen.fillStyle = this.overlays[data.patterns[kind]];
        pen.fillRect(left, top + inset, wide - 0.6, this.tall - 2 * inset);
      }
      if (task === this.hovered) {
        pen.strokeStyle = this.ink;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, top + 1, Math.max(1, wide - 2), this.tall - 2);
        pen.lineWidth = 1;
      }
      const number = data.microbatch[task] >= 0 ? String(data.microbatch[task]) : "";
      const label = wide > 16 + 7 * number.length ? data.letters[kind] + number : number;
      if (label && this.tall > 12 && wide > 6 + 7 * label.length) {
        pen.fillStyle = this.colors[kind];
        if (this.overlays[data.patterns[kind]])
          pen.fillRect((left + right) / 2 - 4 * label.length, top + inset + 1, 8 * label.length, this.tall - 2 * inset - 2);
        pen.fillStyle = "#fff";
        pen.fillText(label, (left + right) / 2, top + this.tall / 2 + 0.5);
      }
      pen.globalAlpha = 1;
    }

    // The critical path from lane to lane: whose end lets whom begin.
    paintArrows() {
      const path = this.data.critical;
      for (let i = 0; i + 1 < path.length; i++) {
        const a = this.laneOf[path[i]], b = this.laneOf[path[i + 1]];
        if (a !== b && a >= 0 && b >= 0 && this.data.end[path[i]] >= this.from && this.data.start[path[i + 1]] <= this.to)
          this.arrow(this.data.end[path[i]], a, this.data.start[path[i + 1]], b);
      }
    }

    // From the end of what is sent to the begin of what waits for it.
    paintMessage(i) {
      const [, from, to] = this.data.messages.slice(i, i + 3);
      if (this.laneOf[from] >= 0 && this.laneOf[to] >= 0)
        this.arrow(this.data.end[from], this.laneOf[from], this.data.start[to], this.laneOf[to]);
    }

    arrow(fromTime, fromLane, toTime, toLane) {
      const pen = this.pen, clip = (x) => Math.min(this.width - 8, Math.max(this.labels, x));
      const down = toLane >= fromLane ? 1 : -1;
      const x1 = clip(this.x(fromTime)), x2 = clip(this.x(toTime));
      const y1 = this.top(fromLane) + this.tall / 2, y2 = this.top(toLane) + (down > 0 ? 1 : this.tall - 1);
      pen.strokeStyle = pen.fillStyle = this.ink;
      pen.lineWidth = 1.4;
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x2, y2);
      pen.lineTo(x2 - 3.5, y2 - 6 * down);
      pen.lineTo(x2 + 3.5, y2 - 6 * down);
      pen.closePath();
      pen.fill();
      pen.lineWidth = 1;
    }

    paintMemory(memory, index) {
      const pen = this.pen, top = this.laneBottom + index * (MEMORY + 4), bottom = top + MEMORY;
      // A cap far above the curve would press it flat: then it is only said, not drawn.
      const capped = memory.capacity && memory.capacity < 4 * memory.peak;
      const most = Math.max(memory.peak, capped ? memory.capacity : 0) * 1.05 || 1;
      const y = (amount) => bottom - amount / most * MEMORY;
      const times = memory.times, amounts = memory.amounts;
      const told = memory.name + " mem", whole = pen.measureText(told).width <= this.labels - 12;
      this.label(whole ? told : memory.name, top + MEMORY / 2, this.ink);  // a name says more than "mem"
      pen.beginPath();
      pen.moveTo(this.labels, bottom);
      let i = Math.max(0, above(times, 0, times.length, this.from) - 1);
      let before = i ? amounts[i - 1] : 0;
      while (i < times.length && times[i] < this.to) {
        const x = Math.max(this.labels, this.x(times[i]));
        let most = amounts[i], last = amounts[i++];
        while (i < times.length && times[i] < this.to && this.x(times[i]) < x + 0.7) {
          most = Math.max(most, amounts[i]);  // of what a pixel shows, the most
          last = amounts[i++];
        }
        pen.lineTo(x, y(before));
        pen.lineTo(x, y(most));
        if (most !== last) pen.lineTo(x, y(last));
        before = last;
      }
      pen.lineTo(this.width - 8, y(before));
      pen.lineTo(this.width - 8, bottom);
      pen.closePath();
      pen.globalAlpha = 0.3;
      pen.fillStyle = this.held;
      pen.fill();
      pen.globalAlpha = 1;
      pen.textAlign = "right";
      pen.fillStyle = this.ink;
      pen.fillText(sizeText(this.data, memory.peak)
        + (memory.capacity ? " of " + sizeText(this.data, memory.capacity) : ""), this.width - 14, bottom - 9);
      if (capped) {
        pen.strokeStyle = this.cap;
        pen.setLineDash([4, 3]);
        pen.beginPath();
        pen.moveTo(this.labels, y(memory.capacity));
        pen.lineTo(this.width - 8, y(memory.capacity));
        pen.stroke();
        pen.setLineDash([]);
      }
    }

    laneAt(x, y) {
      const lane = Math.floor((y - AXIS) / (this.tall + this.gap));
      return x < this.labels || lane < 0 || lane >= this.data.lanes.length ? -1 : lane;
    }

    taskAt(x, y) {
      const lane = this.laneAt(x, y);
      if (lane < 0) return -1;
      const low = this.data.slot_from[lane], high = this.data.slot_from[lane + 1], time = this.time(x);
      const reach = (this.to - this.from) / (this.width - this.labels) * 2;
      const index = above(this.ends, low, high, time);
      for (const near of [index, index - 1])
        if (near >= low && near < high && this.starts[near] - reach <= time && time <= this.ends[near] + reach)
          return this.data.slot_task[near];
      return -1;
    }

    about(task) {
      const data = this.data;
      const lines = [data.blocks[data.block[task]], data.kinds[data.kind[task]]];
      if (data.microbatch[task] >= 0) lines[1] += ", micro-batch " + data.microbatch[task];
      if (this.laneOf[task] >= 0 && data.measured[this.laneOf[task]]) lines[1] += ", measured";
      if (data.work[task] >= 0) lines.push(...data.works[data.work[task]]);
      lines.push(timeText(data, data.start[task]) + " to " + timeText(data, data.end[task])
        + " (" + timeText(data, data.end[task] - data.start[task]) + ")");
      if (this.path.has(task)) lines.push("on the critical path");
      return lines;
    }

    aboutColumn(lane, x) {
      const data = this.data, column = Math.floor(this.time(x) / data.makespan * data.columns);
      if (column < 0 || column >= data.columns) return [];
      const lines = [data.lanes[lane]];
      let idle = 1;
      data.present.forEach((kind, place) => {
        const share = data.shares[(lane * data.columns + column) * data.present.length + place] / 255;
        idle -= share;
        if (share > 0) lines.push(data.kinds[kind] + " " + (100 * share).toFixed(0) + " %");
      });
      lines.push("idle " + (100 * Math.max(0, idle)).toFixed(0) + " %");
      lines.push(timeText(data, column * data.makespan / data.columns) + " to "
        + timeText(data, (column + 1) * data.makespan / data.columns));
      return lines;
    }

    aboutIdle(lane, x) {
      const data = this.data, high = data.idle_from[lane + 1], time = this.time(x);
      const index = above(data.idle_end, data.idle_from[lane], high, time);
      if (index >= high || data.idle_begin[index] > time) return [];
      const cause = data.idle_cause[index], uneven = cause === 0 ? data.uneven[lane] : 0;
      const lines = ["idle: " + data.causes[cause]];
      if (uneven > 0) lines.push((100 * uneven).toFixed(0) + " % of such waits here: imbalance");
      lines.push(timeText(data, data.idle_begin[index]) + " to " + timeText(data, data.idle_end[index])
        + " (" + timeText(data, data.idle_end[index] - data.idle_begin[index]) + ")");
      return lines;
    }

    words(x, y) {
      const data = this.data, lane = this.laneAt(x, y);
      if (lane >= 0 && data.columns) return [-1, this.aboutColumn(lane, x)];
      const task = this.taskAt(x, y);
      if (task >= 0) return [task, this.about(task)];
      if (lane >= 0) return [-1, this.showIdle ? this.aboutIdle(lane, x) : []];
      const index = Math.floor((y - this.laneBottom) / (MEMORY + 4));
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

    tell(lines, x, y) {
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

    hover(event) {
      const box = this.canvas.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const [task, lines] = this.words(x, y);
      if (task !== this.hovered) { this.hovered = task; this.draw(); }
      this.tell(lines, x, y);
    }

    look(text) {
      const data = this.data, wanted = text.trim().toLowerCase(), output = this.root.querySelector("[data-count]");
      this.find = wanted;
      this.found = new Set();
      this.foundKinds = new Set();
      let count = 0;
      if (wanted) {
        data.blocks.forEach((name, i) => { if (name.toLowerCase().includes(wanted)) this.found.add(i); });
        data.kinds.forEach((name, i) => { if (name.toLowerCase().includes(wanted)) this.foundKinds.add(i); });
        for (let task = 0; task < data.start.length; task++) if (this.laneOf[task] >= 0 && this.isFound(task)) count++;
      }
      if (output) output.textContent = wanted ? count.toLocaleString("en") + " tasks" : "";
      this.changed();
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
      canvas.addEventListener("pointercancel", () => { this.drag = null; });
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.hovered = -1; this.draw(); });
      canvas.addEventListener("dblclick", () => this.show(0, this.whole));
      canvas.addEventListener("keydown", (event) => this.key(event));
      canvas.addEventListener("blur", () => { this.tip.hidden = true; this.hovered = -1; this.draw(); });
      for (const button of this.root.querySelectorAll("[data-kind]"))
        button.addEventListener("click", () => {
          const kind = Number(button.dataset.kind), shown = this.hidden.delete(kind);
          if (!shown) this.hidden.add(kind);
          button.setAttribute("aria-pressed", String(shown));
          this.changed();
        });
      this.toggle("[data-critical]", "showPath");
      this.toggle("[data-idle]", "showIdle");
      this.toggle("[data-length]", "oneLength", () => {
        this.place();
        this.show(0, this.whole);
      });
      this.root.querySelector("[data-all]").addEventListener("click", () => this.show(0, this.whole));
      const find = this.root.querySelector("[data-find]");
      if (find) find.addEventListener("input", () => this.look(find.value));
      for (const button of this.root.querySelectorAll("[data-save]"))
        button.addEventListener("click", () => window.partitaSave(this, button.dataset.save));
      window.addEventListener("resize", () => this.resize());
      // A folded view has no width until it is opened.
      for (let fold = this.root.closest("details"); fold; fold = fold.parentElement.closest("details"))
        fold.addEventListener("toggle", () => this.resize());
      window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }

    toggle(selector, name, follow) {
      const button = this.root.querySelector(selector);
      if (button) button.addEventListener("click", () => {
        this[name] = !this[name];
        button.setAttribute("aria-pressed", String(this[name]));
        if (follow) follow();
        this.changed();
      });
    }

    key(event) {
      const span = this.to - this.from, step = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
      const row = { ArrowUp: -1, ArrowDown: 1 }[event.key], task = { ",": -1, ".": 1, p: -1, n: 1 }[event.key];
      if (step) this.show(this.from + step * span, this.to + step * span);
      else if (row) this.walk(row, 0);
      else if (task) this.walk(0, task);
      else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.4);
      else if (event.key === "-") this.zoom(1.4);
      else if (event.key === "0" || event.key === "Home") this.show(0, this.whole);
      else if (event.key === "Escape") { this.tip.hidden = true; this.hovered = -1; this.draw(); }
      else return;
      event.preventDefault();
    }

    // By keys: up and down choose a lane, n and p go from task to task and tell what it is.
    walk(rows, tasks) {
      const data = this.data, last = data.lanes.length - 1;
      this.row = Math.min(last, Math.max(0, this.row + rows + (this.row < 0 && !rows ? 1 : 0)));
      const low = data.slot_from[this.row], high = data.slot_from[this.row + 1];
      if (data.columns || low === high) return this.draw();
      let index = above(this.ends, low, high, this.from);
      for (let i = low; i < high; i++) if (data.slot_task[i] === this.hovered) index = i + tasks;
      index = Math.min(high - 1, Math.max(low, index));
      const task = this.hovered = data.slot_task[index], span = this.to - this.from;
      if (data.end[task] <= this.from || data.start[task] >= this.to) {
        const middle = (data.start[task] + data.end[task]) / 2;
        this.show(middle - span / 2, middle + span / 2);
      }
      this.draw();
      this.tell(this.about(task), Math.max(this.labels, this.x(data.start[task])), this.top(this.row));
    }
  }

  const begun = performance.now();
  const views = window.partitaTimelines = Array.from(
    document.querySelectorAll(".timeline"), (root, number) => new View(root, number));
  // A canvas is printed as it was painted: before that it takes the colours of paper.
  const paper = (wanted) => () => {
    document.documentElement.classList.toggle("paper", wanted);
    for (const view of views) view.paint();
  };
  window.addEventListener("beforeprint", paper(true));
  window.addEventListener("afterprint", paper(false));
  const state = new URLSearchParams(location.hash.slice(1));
  if (views[state.get("view")]) views[state.get("view")].restore(state);
  document.documentElement.dataset.ready = String(Math.round(performance.now() - begun));
})();
