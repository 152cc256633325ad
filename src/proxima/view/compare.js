"use strict";
(() => {
  const buttons = [...document.querySelectorAll(".legend button")];
  const names = buttons.map((button) => button.querySelector("span").textContent);

  // A cell's name shows and hides its curves.
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const group of document.querySelectorAll(`g[data-series="${button.dataset.cell}"]`)) group.classList.toggle("hidden", !shown);
    });
  }

  // The values under the pointer come from the paths drawn by matplotlib.
  function points(group) {
    const numbers = [...group.querySelectorAll("path")].flatMap((path) => path.getAttribute("d").match(/-?[\d.]+/g).map(Number));
    return numbers.flatMap((x, i) => (i % 2 ? [] : [[x, numbers[i + 1]]]));
  }
  function nearest(drawn, x) {
    return drawn.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), drawn[0]);
  }
  function formatted(value) {
    const size = Math.abs(value);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : size >= 0.01 || size === 0 ? String(+value.toPrecision(3)) : value.toExponential(1);
  }
  function show(svg, tip, event) {
    const box = svg.getBoundingClientRect(), d = svg.dataset;
    const x = Math.min(Math.max(((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width, +d.left), +d.right);
    const ruler = svg.querySelector(".ruler");
    ruler.setAttribute("x1", x);
    ruler.setAttribute("x2", x);
    ruler.setAttribute("visibility", "visible");
    const title = document.createElement("p");
    title.className = "muted";
    const unit = [...tip.parentElement.querySelectorAll(".x")].find((line) => line.offsetParent !== null);
    title.textContent = `${unit ? unit.textContent : ""} ${formatted(+d.from + ((x - +d.left) / (+d.right - +d.left)) * (+d.to - +d.from))}`;
    const rows = [title];
    svg.querySelectorAll("g.line").forEach((group) => {
      const drawn = points(group), index = +group.dataset.series;
      if (!drawn.length || index >= names.length || group.classList.contains("hidden")) return;
      const point = nearest(drawn, x), row = document.createElement("p"), chip = document.createElement("i"), name = document.createElement("span"), value = document.createElement("b");
      if (Math.abs(point[0] - x) > 40) return;
      chip.style.background = `var(--k${index % 8})`;
      name.textContent = names[index];
      value.textContent = formatted(+d.low + ((+d.bottom - point[1]) / (+d.bottom - +d.top)) * (+d.high - +d.low));
      row.append(chip, name, value);
      rows.push(row);
    });
    tip.replaceChildren(...rows);
    const figure = tip.parentElement.getBoundingClientRect(), left = event.clientX - figure.left;
    tip.style.top = `${box.top - figure.top + 4}px`;
    tip.style.left = left < figure.width / 2 ? `${left + 14}px` : "auto";
    tip.style.right = left < figure.width / 2 ? "auto" : `${figure.width - left + 14}px`;
    tip.hidden = rows.length < 2;
  }
  for (const figure of document.querySelectorAll(".curves figure")) {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    for (const svg of figure.querySelectorAll("svg.chart")) {
      svg.addEventListener("pointermove", (event) => show(svg, tip, event));
      svg.addEventListener("pointerleave", () => {
        tip.hidden = true;
        svg.querySelector(".ruler").setAttribute("visibility", "hidden");
      });
    }
  }
})();
