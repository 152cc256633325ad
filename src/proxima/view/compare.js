// The curves of compare.html: each cell's line and the area of its interval, over an axis to choose.

import { get } from "./api.js";
import { lineChart } from "./chart.js";
import { h, s } from "./dom.js";
import { figure } from "./format.js";

const { cells, axes, charts } = await get("comparison"), hidden = new Set();
let axis = axes[0].key, drawn = [];

function linesOf(chart) {
  return (chart.lines[axis] || chart.lines.only).map((line, cell) => (line && !hidden.has(cell) ? { ...line, look: cells[cell].look } : null));
}

/** The area between two edges; of a single point a whisker. */
function area({ x, low, high, look }, chart) {
  const inside = (value) => chart.y(Math.min(Math.max(value, chart.ends[0]), chart.ends[1])).toFixed(1);
  const edge = (values) => values.map((value, i) => `${chart.x(x[i]).toFixed(1)} ${inside(value)}`);
  return low.length ? s("path", { class: `${x.length > 1 ? "area" : "whisker"} ${look}`, d: `M${[...edge(low), ...edge(high).reverse()].join("L")}Z` }) : null;
}

function draw(card, chart) {
  const lines = linesOf(chart), shown = lines.filter(Boolean), { target } = chart;
  const steps = shown.flatMap(({ x }) => x), ends = [Math.min(...steps), Math.max(...steps)];
  const series = shown.map(({ x, mean, look }) => ({ steps: x, values: mean, className: look }));
  if (target !== null && shown.length) series.push({ steps: ends, values: [target, target], className: "target" });
  const made = Object.assign(lineChart({ series, steps, ends: chart.ends, label: `${chart.title} over ${nameOf(chart)}` }), { ends: chart.ends });
  made.svg.prepend(...shown.flatMap((line) => area(line, made) || []));
  if (chart.dots) made.svg.append(...shown.flatMap(({ x, mean, look }) => x.map((at, i) => s("circle", { class: look, cx: made.x(at), cy: made.y(mean[i]), r: 2.4 }))));
  const reads = lines.map((line, i) => (line ? h("output", { class: cells[i].look, title: cells[i].name }) : null));
  const at = h("span", { class: "muted" });
  made.svg.addEventListener("pointermove", (event) => mark(made.stepAt(event), chart.lines.only ? chart : null));
  made.svg.addEventListener("pointerleave", () => mark(null));
  card.replaceChildren(h("figcaption", {}, h("b", {}, chart.title), at, h("p", { class: "muted" }, chart.explanation), h("p", { class: "reads" }, reads)), made.svg, h("p", { class: "muted x" }, nameOf(chart)));
  return { chart, lines, made, reads, at };
}

function nameOf(chart) {
  return chart.over || axes.find(({ key }) => key === axis).name;
}

/** One ruler over all charts of an axis, with each cell's value there; without a place its last one. */
function mark(place, alone = null) {
  for (const { chart, lines, made, reads, at } of drawn) {
    const here = place !== null && (alone ? chart === alone : !chart.lines.only) ? place : null;
    made.at(here);
    at.textContent = here === null ? "" : figure(here, 3);
    lines.forEach((line, i) => {
      if (!line) return;
      const near = line.x.reduce((best, one, k) => (Math.abs(one - here) < Math.abs(line.x[best] - here) ? k : best), 0);
      reads[i].textContent = figure(line.mean[here === null ? line.x.length - 1 : near], 3);
    });
  }
}

const cards = charts.map(() => h("figure", {}));

function redraw() {
  drawn = cards.map((card, i) => draw(card, charts[i]));
  mark(null);
}

function button(text, pressed, onclick, look = null) {
  const made = h("button", { type: "button", class: look, "aria-pressed": String(pressed), onclick: () => { onclick(made); redraw(); } }, text);
  return made;
}

const overs = axes.map(({ key, name }) => button(name, key === axis, () => {
  axis = key;
  overs.forEach((one, i) => one.setAttribute("aria-pressed", String(axes[i].key === axis)));
}));
const names = cells.map(({ name, n, look }, i) => button([h("i", { class: "dot" }), name, h("span", { class: "muted" }, ` n=${n}`)], true, (made) => {
  if (!hidden.delete(i)) hidden.add(i);
  made.setAttribute("aria-pressed", String(!hidden.has(i)));
}, look));
redraw();
document.getElementById("curves").replaceChildren(h("div", { class: "bar" }, "over", overs), h("div", { class: "bar" }, names), h("div", { class: "charts" }, cards));
