// The live page of partita: forms become questions, answers become cards, bars and a timeline.
// Everything that comes from outside of this file is set as text, never as markup.
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const WAIT_MS = 1500; // after so long a question is given up for a newer one
  // Parts of memory have one colour and pattern each on all tabs, those of pages; the table under the bars has numbers.
  const SHADES = { parameters: 0, "optimizer states": 1, workspace: 2, gradients: 3, buffers: 4, activations: 5, logits: 6, peak: 0 };
  const shade = (part) => `var(--b${SHADES[part] || 0})`;
  let options = null, current = "whatif";
  const state = { whatif: {}, plan: {}, schedule: {} };

  // --- forms -------------------------------------------------------------------------------------

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function valueOf(input) {
    if (input.type === "checkbox") return input.checked;
    if (input.type !== "range") return input.value;
    const number = Number(input.value);
    return input.dataset.power ? Number(input.dataset.power) ** number : number;
  }

  function shown(input) {
    const value = valueOf(input);
    if (value === 0 && input.dataset.zero) return input.dataset.zero;
    return value.toLocaleString("en") + (input.dataset.unit ? " " + input.dataset.unit : "");
  }

  function fill(select, rows) {
    select.replaceChildren(...rows.map(([value, text, group]) => {
      const option = element("option", text || value, { value });
      option.dataset.group = group || "";
      return option;
    }));
  }

  // Model and machine are asked for on two tabs by the same controls.
  function place() {
    for (const spot of all("[data-asked]")) {
      const controls = $("#asked").content.cloneNode(true), { models, perNode, mostNodes } = spot.dataset;
      $("[name=model]", controls).dataset.models = models;
      $("[name=nodes]", controls).max = mostNodes;
      $("[name=per_node]", controls).setAttribute("value", perNode);
      spot.replaceWith(controls);
    }
  }

  function prepare() {
    for (const select of all("[data-models]")) {
      const wanted = select.dataset.models;
      const rows = options.models.filter((model) => wanted === "all" || model[wanted]);
      fill(select, rows.map((model) => [model.name]));
      select.value = "gpt2";
    }
    for (const select of all("[data-machines]")) {
      const kinds = options.kinds.map((kind) => [kind.name]);
      fill(select, [...kinds, ...options.machines.map((name) => ["=" + name, name + " (whole machine)"])]);
      const usual = options.kinds.find((kind) => kind.name.startsWith("A100-80"));
      if (usual) select.value = usual.name;
    }
    for (const select of all("[data-list]")) {
      const rows = options[select.dataset.list].map((name) => [name]);
      fill(select, select.dataset.empty ? [["", select.dataset.empty], ...rows] : rows);
    }
    fill($("[data-placements]"), [
      ...options.shapes.map((shape) => [shape.name, shape.name + ": searched"]),
      ...options.orders.map((order) => [order.name, order.about + ": published"])]);
    for (const form of all("form")) refresh(form);
  }

  function refresh(form) {
    for (const input of all("input[type=range]", form)) {
      const output = $("output", input.parentElement);
      output.textContent = shown(input);
      input.setAttribute("aria-valuetext", output.textContent);
    }
    const fields = form.elements, model = fields.model && modelNamed(fields.model.value);
    const show = {
      counted: () => !fields.kind.value.startsWith("="),
      size: () => model && model.size === "seq",
      strategy: () => fields.how.value === "strategy",
      chunked: () => chunked(fields.placement.value),
      wide: () => fields.how.value === "simulate" && valueOf(fields.per_node) * valueOf(fields.nodes) > 256,
    };
    if (form.id === "whatif" && model) {
      fields.how.options[0].disabled = !model.by_ops;
      fields.how.options[1].disabled = !model.by_name;
      if (fields.how.selectedOptions[0].disabled) fields.how.value = model.by_ops ? "simulate" : "strategy";
    }
    for (const part of all("[data-if]", form)) part.hidden = !show[part.dataset.if]();
  }

  const modelNamed = (name) => options.models.find((model) => model.name === name);
  const chunked = (name) => [...options.shapes, ...options.orders].some((one) => one.name === name && one.chunked);
  const above = (input) => valueOf(input) || null;

  function machine(fields) {
    const kind = fields.kind.value, asked = {};
    if (kind.startsWith("=")) asked.cluster = kind.slice(1);
    else {
      const nodes = valueOf(fields.nodes), each = valueOf(fields.per_node);
      asked.cluster = nodes > 1 ? `${nodes}x${each}x${kind}` : `${each}x${kind}`;
    }
    if (valueOf(fields.memory_gib)) asked.memory_gib = valueOf(fields.memory_gib);
    if (valueOf(fields.links) !== 1) asked.links = valueOf(fields.links);
    return asked;
  }

  function named(fields) {
    const model = fields.model.value, seq = fields.seq.value;
    return seq && modelNamed(model).size === "seq" ? `${model}@${seq}` : model;
  }

  const QUESTIONS = {
    whatif(fields) {
      const ask = { model: named(fields), ...machine(fields), batch: valueOf(fields.batch) };
      if (fields.how.value === "simulate") return ["simulate", ask];
      for (const name of ["micro_batch", "tp", "pp", "vpp", "cp", "ep"]) ask[name] = valueOf(fields[name]);
      Object.assign(ask, { zero: Number(fields.zero.value), recompute: fields.recompute.value, sp: fields.sp.checked });
      if (fields.schedule.value) ask.schedule = fields.schedule.value;
      return ["strategy", ask];
    },
    plan(fields) {
      return ["plan", { model: named(fields), ...machine(fields), batch: valueOf(fields.batch),
        training: !fields.infer.checked, pp: above(fields.pp), micro_batches: above(fields.micro_batches),
        time_limit: Number(fields.time_limit.value) || 20 }];
    },
    schedule(fields) {
      const ask = { placement: fields.placement.value, devices: valueOf(fields.devices),
        microbatches: above(fields.microbatches), memory: above(fields.memory),
        forward_span: valueOf(fields.forward_span), backward_span: above(fields.backward_span),
        weight_span: above(fields.weight_span), delay: valueOf(fields.delay),
        time_limit: Number(fields.time_limit.value) || 10 };
      if (chunked(ask.placement)) ask.chunks = valueOf(fields.chunks);
      return ["schedule", ask];
    },
  };

  // --- asking ------------------------------------------------------------------------------------

  function say(text, bad = false) {
    const status = $("#status");
    status.textContent = text;
    status.classList.toggle("bad", bad);
  }

  async function post(path, body, signal) {
    return fetch(path, { method: "POST", body: JSON.stringify(body), signal, headers: { "Content-Type": "application/json" } });
  }

  // One what-if is under way at a time; what was moved meanwhile is asked next, the latest only.
  async function whatIf() {
    const mine = state.whatif;
    mine.waiting = true;
    if (mine.asking) {
      if (performance.now() - mine.since > WAIT_MS) mine.asking.abort();
      return;
    }
    while (mine.waiting) {
      mine.waiting = false;
      mine.asking = new AbortController();
      mine.since = performance.now();
      document.body.classList.add("busy");
      const [kind, ask] = QUESTIONS.whatif($("#whatif").elements);
      try {
        const response = await post("ask", { kind, ask }, mine.asking.signal);
        keep("whatif", await response.json(), performance.now() - mine.since);
      } catch (error) {
        if (error.name !== "AbortError") say("The server does not answer; is partita serve still running?", true);
      }
      mine.asking = null;
    }
    document.body.classList.remove("busy");
  }

  async function search(tab) {
    const mine = state[tab], form = document.getElementById(tab);
    if (mine.asking) mine.asking.abort();
    const asking = mine.asking = new AbortController();
    const [kind, ask] = QUESTIONS[tab](form.elements);
    mine.history = [];
    mine.since = performance.now();
    const stop = $("[data-stop]", form);
    try {
      const response = await post("search", { kind, ask }, asking.signal);
      if (!response.ok) return keep(tab, await response.json());
      if (tab === current) say("Searching …");
      tick();
      for await (const [event, data] of events(response.body)) {
        if (mine.asking !== asking) return;
        if (event === "started") {
          mine.id = data.id;
          stop.disabled = false;
          if (tab === current) $("#command").textContent = data.command;
        } else if (event === "better") better(tab, data);
        else keep(tab, data);
      }
    } catch (error) {
      if (error.name !== "AbortError") say("The server does not answer; is partita serve still running?", true);
    } finally {
      if (mine.asking === asking) {
        mine.asking = null;
        stop.disabled = true;
      }
    }
  }

  async function* events(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const part = (name) => lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length)).join("\n");
        yield [part("event: "), JSON.parse(part("data: "))];
      }
    }
  }

  // A value of a search in words: a step in ms, or steps of a schedule.
  const objective = (tab) => (tab === "plan" ? (s) => (s * 1e3).toPrecision(4) + " ms" : (s) => String(Number(s.toPrecision(6))));

  function better(tab, step) {
    state[tab].history.push(step);
    if (tab !== current) return;
    const time = objective(tab), parts = [step.objective === null ? "no answer yet" : `best ${time(step.objective)}`];
    if (step.bound !== null) parts.push(`bound ${time(step.bound)}`);
    if (step.gap !== null) parts.push(`at most ${(100 * step.gap).toFixed(1)} % from optimal`);
    say("Searching: " + parts.join(", "));
    tick();
  }

  // How long a search has been running, apart from what is read out.
  function tick() {
    const mine = state[current], box = $("#progress");
    box.hidden = current === "whatif" || !mine.asking;
    if (box.hidden) return;
    const seconds = ((performance.now() - mine.since) / 1e3).toFixed(0);
    const limit = $(`#${current}`).elements.time_limit.value;
    $("#elapsed").textContent = `searching for ${seconds} s of at most ${limit} s`;
    chart(mine.history, objective(current));
  }

  // Best and bound over the time of the search, as two stairs.
  function chart(history, words) {
    const canvas = $("#progress canvas");
    canvas.hidden = history.length < 2;
    if (canvas.hidden) return;
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = 90;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const draw = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    draw.scale(scale, scale);
    const values = history.flatMap((step) => [step.objective, step.bound]).filter((value) => value !== null);
    const least = Math.min(...values), most = Math.max(...values), last = history[history.length - 1].seconds || 1;
    const room = 150; // right of the lines: what they are
    const x = (step) => 4 + step.seconds / last * (width - room - 8);
    const y = (value) => height - 12 - (value - least) / (most - least || 1) * (height - 24);
    draw.font = getComputedStyle(canvas).font;
    draw.textBaseline = "middle";
    for (const [name, shade, dash] of [["objective", "--p0", []], ["bound", "--p1", [5, 4]]]) {
      draw.beginPath();
      draw.setLineDash(dash);
      draw.lineWidth = 2;
      draw.strokeStyle = style.getPropertyValue(shade);
      let before = null;
      for (const step of history) {
        if (step[name] === null) continue;
        if (before === null) draw.moveTo(x(step), y(step[name]));
        else {
          draw.lineTo(x(step), y(before));
          draw.lineTo(x(step), y(step[name]));
        }
        before = step[name];
      }
      draw.stroke();
      if (before === null) continue;
      draw.fillStyle = style.getPropertyValue("--ink");
      draw.fillText(`${name === "bound" ? "bound" : "best"} ${words(before)}`, width - room, y(before));
    }
  }

  // --- answers -----------------------------------------------------------------------------------

  function keep(tab, answer, took) {
    state[tab].answer = answer;
    state[tab].took = took;
    if (tab === current) show(tab);
  }

  function show(tab) {
    const { answer, took } = state[tab];
    $("#progress").hidden = true;
    if (!answer) {
      for (const part of ["#memory", "#view", "#words"]) $(part).hidden = true;
      $("#cards").replaceChildren();
      $("#command").textContent = "";
      return;
    }
    if (answer.command) $("#command").textContent = answer.command;
    if (answer.refused) return say(answer.refused, true);
    const verdict = answer.fits ? "" : " Nothing that fits: see below what is missing.";
    say((took === undefined ? "Done." : `Answered in ${(took / 1e3).toFixed(2)} s.`) + verdict, !answer.fits);
    const isTold = tab === "plan" && Boolean(answer.view);  // the page of a plan has its own cards and memory
    $("#cards").replaceChildren(...(isTold ? [] : answer.cards).map(([name, value, note]) => {
      const card = element("div", undefined, { class: "card" });
      card.append(element("span", name), element("b", value), element("span", note));
      return card;
    }));
    bars(isTold ? null : answer.memory);
    $("#view h2").textContent = tab === "plan" ? "The plan" : "Timeline";
    frame(answer.view, answer.files.includes("plan.json"));
    $("#words").hidden = !answer.text;
    $("#words pre").textContent = answer.text || "";
    document.documentElement.dataset.answered = String(Number(document.documentElement.dataset.answered || 0) + 1);
  }

  const size = (value, unit) => unit === "" ? String(Number(value.toPrecision(6))) : (value / 2 ** 30).toPrecision(3) + " GiB";

  function bars(memory) {
    const section = $("#memory");
    section.hidden = !memory || !memory.bars.length;
    if (section.hidden) return;
    const most = Math.max(...memory.bars.map((bar) => Math.max(total(bar), bar.capacity || 0)), 1e-9);
    const rows = memory.bars.map((bar) => {
      const row = element("div", undefined, { class: "bar" }), track = element("div");
      memory.parts.forEach((part) => {
        const piece = element("i", undefined, { title: `${part} ${size(bar.parts[part], memory.unit)}` });
        piece.style.width = `${100 * bar.parts[part] / most}%`;
        piece.style.background = shade(part);
        track.append(piece);
      });
      if (bar.capacity) {
        const cap = element("span", undefined, { class: "cap", title: "what there is" });
        cap.style.left = `calc(${100 * bar.capacity / most}% - 2px)`;
        track.append(cap);
      }
      const of = bar.capacity ? ` of ${size(bar.capacity, memory.unit)}` : "";
      const over = bar.capacity && total(bar) > bar.capacity ? ", too much" : "";
      row.append(element("span", bar.name), track, element("span", size(total(bar), memory.unit) + of + over));
      return row;
    });
    const legend = element("ul", undefined, { class: "legend" });
    if (memory.parts.length > 1) memory.parts.forEach((part) => {
      const item = element("li"), patch = element("i");
      patch.style.background = shade(part);
      item.append(patch, part);
      legend.append(item);
    });
    $("#bars").replaceChildren(...rows, legend, ...(memory.parts.length > 1 ? [inNumbers(memory)] : []));
  }

  function inNumbers(memory) {
    const box = element("details"), scroll = element("div", undefined, { class: "scroll" }), table = element("table");
    const line = (tag, cells) => {
      const row = element("tr");
      row.append(...cells.map((cell) => element(tag, cell)));
      return row;
    };
    table.append(line("th", ["", ...memory.parts]));
    for (const bar of memory.bars) table.append(line("td", [bar.name, ...memory.parts.map((part) => size(bar.parts[part], memory.unit))]));
    scroll.append(table);
    box.append(element("summary", "In numbers"), scroll);
    return box;
  }

  const total = (bar) => Object.values(bar.parts).reduce((sum, part) => sum + part, 0);

  // The next view loads behind the one that is seen, and takes its place when it is there.
  function frame(view, hasPlan) {
    $("#view").hidden = !view;
    $("#keep").hidden = !hasPlan;
    if (!view) return;
    const address = `views/${view}`, next = element("iframe", undefined, { title: "timeline", class: "next", src: address });
    $("#whole").href = address;
    if (hasPlan) $("#keep").href = `${address}/plan.json`;
    for (const late of all("iframe.next")) late.remove();
    next.addEventListener("load", () => {
      if (!next.isConnected) return;
      const inside = next.contentDocument.documentElement;
      const fit = () => { next.style.height = `${Math.min(Math.ceil(inside.getBoundingClientRect().height) + 2, 20000)}px`; };
      for (const old of all("#frames iframe")) if (old !== next) old.remove();
      next.classList.remove("next");
      fit();
      new ResizeObserver(fit).observe(next.contentDocument.body);
      document.documentElement.dataset.viewed = view;
    });
    $("#frames").append(next);
  }

  // --- the page ----------------------------------------------------------------------------------

  function open(tab) {
    current = tab;
    for (const button of all("[role=tab]")) {
      const chosen = button.id === `tab-${tab}`;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
      document.getElementById(button.getAttribute("aria-controls")).hidden = !chosen;
    }
    history.replaceState(null, "", `#${tab}`);
    say("");
    show(tab);
    if (!state[tab].answer && tab !== "plan") ask(tab);
    else if (tab === "plan" && !state.plan.answer && !state.plan.asking) say("Choose, then search.");
  }

  const ask = (tab) => (tab === "whatif" ? whatIf() : search(tab));

  function listen() {
    const tabs = all("[role=tab]");
    tabs.forEach((button, place) => {
      button.addEventListener("click", () => open(button.getAttribute("aria-controls")));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const other = tabs[(place + step + tabs.length) % tabs.length];
        other.focus();
        other.click();
      });
    });
    for (const form of all("form")) {
      form.addEventListener("submit", (event) => { event.preventDefault(); ask(form.id); });
      form.addEventListener("input", () => {
        refresh(form);
        if (form.id !== "plan" || form.elements.again.checked) soon(form.id);
      });
      const stop = $("[data-stop]", form);
      if (stop) stop.addEventListener("click", () => post("stop", { id: state[form.id].id }));
    }
    $("#copy").addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText($("#command").textContent);
        $("#copy").textContent = "Copied";
      } catch {
        getSelection().selectAllChildren($("#command"));
      }
      setTimeout(() => { $("#copy").textContent = "Copy"; }, 1500);
    });
  }

  let timer = 0;
  function soon(tab) {
    clearTimeout(timer);
    timer = setTimeout(() => ask(tab), 60);
  }

  async function begin() {
    place();
    options = await (await fetch("options")).json();
    prepare();
    listen();
    setInterval(tick, 500);
    const wanted = location.hash.slice(1);
    open(wanted in state ? wanted : "whatif");
  }

  begin().catch(() => say("The server does not answer; is partita serve still running?", true));
})();
