// Texts of a page that do not stand out from what is below them, by WCAG AA; how many were seen.
(() => {
  const parse = (text) => {
    const m = /^rgba?\(([^)]+)\)$/.exec(text);
    if (!m) return null;
    const parts = m[1].split(/[ ,/]+/).map(Number);
    return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]);
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const filled = (shape) => {  // what a shape of a picture lays over what is below it
    const style = getComputedStyle(shape);
    const pattern = /url\("#([^"]+)"\)/.exec(style.fill);
    const from = pattern ? document.getElementById(pattern[1])?.querySelector("rect") : shape;
    if (!from || style.fill === "none") return null;
    const color = parse(getComputedStyle(from).fill);
    if (!color) return null;
    color[3] *= Number(style.fillOpacity) * Number(style.opacity);
    return color;
  };
  const ground = (element) => {  // colours from the element outwards, laid over each other
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color && color[3] > 0) layers.push(color);
      if (color && color[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const beneath = (text, box) => {
    const x = box.left + box.width / 2, y = box.top + box.height / 2;
    const svg = text.closest("svg");
    let below = ground(svg);
    const shapes = document.elementsFromPoint(x, y).filter((e) => svg.contains(e) && e !== svg && !e.closest("text"));
    for (const shape of shapes.reverse()) {
      const color = ["rect", "circle"].includes(shape.tagName) || shape.tagName === "path" ? filled(shape) : null;
      if (color) below = over(color, below);
    }
    return below;
  };
  const seen = [], poor = [];
  const judge = (words, color, below, size, weight) => {
    const ratio = contrast(over(color, below), below), large = size >= 24 || (size >= 18.66 && weight >= 700)
      || /^[●■◆▲▼]$/.test(words);  // signs are graphics
    seen.push(words);
    if (ratio < (large ? 3 : 4.5) - 0.01)
      poor.push(words.slice(0, 40) + ": " + ratio.toFixed(2) + ", " + color + " on " + below.map(Math.round));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, own = node.parentElement, words = node.textContent.trim();
    if (!words || ["SCRIPT", "STYLE", "title", "TITLE", "OPTION"].includes(own.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || !box.height || getComputedStyle(own).visibility === "hidden") continue;
    const text = own.closest("text"), style = getComputedStyle(own);
    const color = parse(text ? style.fill : style.color);
    if (!color) { poor.push(words + ": no plain colour, " + style.fill); continue; }
    for (let at = own; at; at = at.parentElement) color[3] *= Number(getComputedStyle(at).opacity);
    judge(words, color, text ? beneath(text, box) : ground(own), parseFloat(style.fontSize), Number(style.fontWeight));
  }
  for (const input of document.querySelectorAll("input[placeholder]")) {
    const style = getComputedStyle(input, "::placeholder"), color = parse(style.color);
    color[3] *= Number(style.opacity);
    judge("placeholder " + input.placeholder, color, ground(input), 13, 400);
  }
  return { seen: seen.length, poor };
})()
