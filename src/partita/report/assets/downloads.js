"use strict";
// Files made from what a timeline of the page holds: a picture, a table, a trace, a memory snapshot.
(function () {
  const MICRO = 1e6, ADDRESS = 0x100000000;

  function xml(text) {
    // eslint-disable-next-line no-control-regex
    return String(text).replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "\ufffd")
      .replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
  }

  // What a canvas is asked to draw, written down as elements of a picture.
  class SvgPen {
    constructor(measure) {
      this.measure = measure;
      this.parts = [];
      this.globalAlpha = this.lineWidth = 1;
      this.textAlign = "center";
      this.dash = [];
    }
    clearRect() {}
    measureText(text) { this.measure.font = this.font; return this.measure.measureText(text); }
    paint(style) { return typeof style === "string" ? style : style && style.plain; }
    shade() { return this.globalAlpha < 1 ? ` opacity="${+this.globalAlpha.toFixed(3)}"` : ""; }
    fillRect(x, y, w, h) {
      const fill = this.paint(this.fillStyle);
      if (!fill) return;  // lines over a colour: the colour is there already
      const light = typeof this.fillStyle === "string" ? this.shade() : ' opacity="0.45"';
      this.parts.push(`<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${w.toFixed(2)}" height="${h.toFixed(2)}" fill="${fill}"${light}/>`);
    }
    strokeRect(x, y, w, h) {
      this.parts.push(`<rect x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${w.toFixed(2)}" height="${h.toFixed(2)}" fill="none" stroke="${this.strokeStyle}"/>`);
    }
    beginPath() { this.path = ""; }
    moveTo(x, y) { this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`; }
    lineTo(x, y) { this.path += `L${x.toFixed(2)} ${y.toFixed(2)}`; }
    closePath() { this.path += "Z"; }
    stroke() {
      const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
      this.parts.push(`<path d="${this.path}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"${dash}/>`);
    }
    fill() { this.parts.push(`<path d="${this.path}" fill="${this.paint(this.fillStyle)}"${this.shade()}/>`); }
    setLineDash(dash) { this.dash = dash; }
    fillText(text, x, y) {
      const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
      this.parts.push(`<text x="${x.toFixed(1)}" y="${(y + 4).toFixed(1)}" text-anchor="${anchor}" fill="${this.fillStyle}"${this.shade()}>${xml(text)}</text>`);
    }
  }

  function svg(view) {
    const pen = new SvgPen(document.createElement("canvas").getContext("2d"));
    view.paint(pen);
    const ground = getComputedStyle(document.body).backgroundColor;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${view.width}" height="${view.height}" viewBox="0 0 ${view.width} ${view.height}" font-family="system-ui,sans-serif" font-size="12">`
      + `<rect width="100%" height="100%" fill="${ground}"/>${pen.parts.join("\n")}</svg>\n`;
  }

  function quoted(text) {
    // A cell that begins like a formula is kept from being one.
    const plain = /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
    return /[",\r\n]/.test(plain) ? '"' + plain.replace(/"/g, '""') + '"' : plain;
  }

  function* slots(data) {
    for (let lane = 0; lane < data.lanes.length; lane++)
      for (let i = data.slot_from[lane]; i < data.slot_from[lane + 1]; i++) yield [lane, data.slot_task[i]];
  }

  function csv(view) {
    const data = view.data, lines = ["lane,task,kind,microbatch,start,end,critical"];
    for (const [lane, task] of slots(data))
      lines.push([quoted(data.lanes[lane]), quoted(data.blocks[data.block[task]]), data.kinds[data.kind[task]],
        data.microbatch[task] < 0 ? "" : data.microbatch[task], data.start[task], data.end[task],
        view.path.has(task) ? 1 : 0].join(","));
    return lines.join("\r\n") + "\r\n";
  }

  function trace(view) {
    const data = view.data, scale = data.unit === "s" ? MICRO : 1, events = [];
    data.lanes.forEach((name, lane) => {
      events.push({ ph: "M", pid: 0, tid: lane, name: "thread_name", args: { name } });
      events.push({ ph: "M", pid: 0, tid: lane, name: "thread_sort_index", args: { sort_index: lane } });
    });
    for (const [lane, task] of slots(data)) {
      const args = {};
      if (data.microbatch[task] >= 0) args.microbatch = data.microbatch[task];
      if (data.work[task] >= 0) args.about = data.works[data.work[task]];
      events.push({ ph: "X", pid: 0, tid: lane, name: data.blocks[data.block[task]], cat: data.kinds[data.kind[task]],
        ts: data.start[task] * scale, dur: (data.end[task] - data.start[task]) * scale, args });
    }
    for (const memory of data.memories)
      memory.times.forEach((time, i) => events.push({ ph: "C", pid: 0, name: memory.name, ts: time * scale,
        args: { bytes: memory.amounts[i] } }));
    return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
  }

  // A value as a Python pickle of protocol 2: text, numbers, true and false, null, lists, objects.
  function pickle(value) {
    const out = [0x80, 2], texts = new Map(), encoder = new TextEncoder();
    const int = (n) => [n & 255, (n >> 8) & 255, (n >> 16) & 255, (n >> 24) & 255];
    function put(item) {
      if (item === null) out.push(0x4e);
      else if (typeof item === "boolean") out.push(item ? 0x88 : 0x89);
      else if (typeof item === "number") number(item);
      else if (typeof item === "string") text(item);
      else if (Array.isArray(item)) { out.push(0x5d, 0x28); item.forEach(put); out.push(0x65); }
      else { out.push(0x7d, 0x28); for (const [key, inner] of Object.entries(item)) { text(key); put(inner); } out.push(0x75); }
    }
    function number(item) {
      if (Number.isInteger(item) && Math.abs(item) < 2 ** 31) out.push(0x4a, ...int(item));
      else if (Number.isInteger(item)) {  // LONG1: eight bytes, least first
        out.push(0x8a, 8);
        let left = BigInt.asUintN(64, BigInt(item));
        for (let i = 0; i < 8; i++) { out.push(Number(left & 255n)); left >>= 8n; }
      } else {
        const view = new DataView(new ArrayBuffer(8));
        view.setFloat64(0, item);
        out.push(0x47);
        for (let i = 0; i < 8; i++) out.push(view.getUint8(i));
      }
    }
    function text(item) {
      if (texts.has(item)) { out.push(0x6a, ...int(texts.get(item))); return; }
      const raw = encoder.encode(item);
      out.push(0x58, ...int(raw.length));
      for (const byte of raw) out.push(byte);
      texts.set(item, texts.size);
      out.push(0x72, ...int(texts.get(item)));
    }
    put(value);
    out.push(0x2e);
    return Uint8Array.from(out);
  }

  function unpacked(parts) {
    if (!parts) return null;
    const column = window.partitaColumn, times = column(parts.times);
    return parts.names.map((name, i) => ({ name, times, amounts: column(parts.amounts[i]) }));
  }

  // What PyTorch's memory viewer reads (torch.cuda.memory._snapshot): an alloc and a free for each part.
  function snapshot(view) {
    const scale = view.data.unit === "s" ? MICRO : 1, parts = view.data.parts;
    const traces = [], segments = [];
    view.data.memories.forEach((memory, device) => {
      const curves = unpacked(parts[device]) || [{ name: memory.name, times: memory.times, amounts: memory.amounts }];
      const events = [];
      let address = ADDRESS;
      for (const curve of curves) {
        const live = [];
        let held = 0;
        curve.times.forEach((time, i) => {
          const wanted = Math.round(curve.amounts[i]), moment = Math.round(time * scale);
          const frames = [{ filename: "plan", line: 0, name: curve.name }];
          const note = (action, addr, size) => events.push({ action, addr, size, stream: 0, time_us: moment, frames });
          while (held > wanted) {
            const [at, size] = live.pop();
            note("free_requested", at, size);
            note("free_completed", at, size);
            held -= size;
          }
          if (wanted > held) {
            note("alloc", address, wanted - held);
            live.push([address, wanted - held]);
            address += wanted - held;
            held = wanted;
          }
        });
      }
      events.sort((a, b) => a.time_us - b.time_us);
      traces.push(events);
      segments.push({ device, address: ADDRESS, total_size: 0, allocated_size: 0, active_size: 0,
        requested_size: 0, stream: 0, segment_type: "large", blocks: [], frames: [] });
    });
    return { segments, device_traces: traces, allocator_settings: {}, external_annotations: [] };
  }

  const MAKERS = {
    svg: (view) => [svg(view), "image/svg+xml", "timeline.svg"],
    csv: (view) => [csv(view), "text/csv", "tasks.csv"],
    trace: (view) => [trace(view), "application/json", "plan.trace.json"],
    memory: (view) => [pickle(snapshot(view)), "application/octet-stream", "memory.pickle"],
  };

  window.partitaFile = (view, name) => MAKERS[name](view);
  window.partitaSave = (view, name) => {
    const [content, type, file] = MAKERS[name](view), link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
})();
