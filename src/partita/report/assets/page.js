"use strict";
// What a page answers to beside its timelines: finding modules, choosing a mark of a picture.
(function () {
  for (const input of document.querySelectorAll("input[data-filter]")) {
    const place = document.querySelector('[data-filtered="' + input.dataset.filter + '"]');
    const output = input.parentElement.querySelector("output");
    const folds = Array.from(place.querySelectorAll("details"), (fold) => [fold, fold.open]);
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      let count = 0;
      for (const line of place.querySelectorAll("[data-name]")) line.hidden = false;
      if (!wanted) {
        for (const [fold, open] of folds) fold.open = open;
        output.textContent = "";
        return;
      }
      // A line is shown if its path has the text: its own name, or that of a module around it.
      for (const line of place.querySelectorAll("p[data-name]")) {
        let path = line.dataset.name;
        for (let at = line.parentElement.closest("[data-name]"); at; at = at.parentElement.closest("[data-name]"))
          path = at.dataset.name + "." + path;
        line.hidden = !path.toLowerCase().includes(wanted);
        if (!line.hidden) count++;
      }
      for (const [fold] of folds.slice().reverse()) {
        const inside = fold.querySelector("p[data-name]:not([hidden])");
        fold.hidden = !inside;
        fold.open = Boolean(inside);
      }
      output.textContent = count.toLocaleString("en") + " lines";
    });
  }

  function pick(mark) {
    const key = mark.dataset.pick;
    for (const line of document.querySelectorAll("[data-picked]")) line.hidden = line.dataset.picked !== key;
    for (const other of document.querySelectorAll("[data-pick]"))
      other.setAttribute("aria-pressed", String(other === mark));
  }

  for (const mark of document.querySelectorAll("[data-pick]")) {
    mark.addEventListener("click", () => pick(mark));
    mark.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(mark); }
    });
  }
})();
