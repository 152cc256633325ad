// Curves over the steps of a run, and the timeline; SVG, with one ruler over all charts of a page.

import { s } from "./dom.js";
import { extent, figure } from "./format.js";

const WIDTH = 320, HEIGHT = 110, LEFT = 4, TOP = 8, BOTTOM = 20, DIGIT = 6.6;

/** Maps values to pixels on a line. */
export function scaleOf(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function linePath(steps, values, x, y) {
  let path = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null || value === undefined || !Number.isFinite(value)) pen = "M";
    else {
      path += `${pen}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return path;
}

/** Points without a neighbour have no line: they are drawn as dots. */
function lonely(values) {
  const there = (i) => values[i] !== null && values[i] !== undefined;
  return values.flatMap((_, i) => (there(i) && !there(i - 1) && !there(i + 1) ? [i] : []));
}

/**
 * A chart of `series` ({steps, values, className}) and `dots` ([step, value], held-out results).
 * `at(step)` moves the ruler; `stepAt(event)` is the step at the pointer.
 */
export function lineChart({ series, dots = [], label, steps, ends }) {
  const [from, to] = extent(steps) || [0, 1];
  const range = ends || extent([...series.flatMap((one) => [...one.values]), ...dots.map(([, value]) => value)]);
  if (!range) return null;
  const pad = range[0] === range[1] ? Math.abs(range[0]) / 10 || 1 : 0;
  const right = WIDTH - 8 - DIGIT * Math.max(...range.map((value) => figure(value, 3).length));
  const x = scaleOf(from, to, LEFT, right), y = scaleOf(range[0] - pad, range[1] + pad, HEIGHT - BOTTOM, TOP);
  const ruler = s("line", { class: "ruler", y1: TOP - 4, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    range.slice(pad ? 1 : 0).map((value) => [s("line", { class: "axis", x1: LEFT, x2: right, y1: y(value), y2: y(value) }), s("text", { x: right + 5, y: y(value) + 4 }, figure(value, 3))]),
    s("text", { x: LEFT, y: HEIGHT - 3 }, figure(from, 3)),
    s("text", { x: right, y: HEIGHT - 3, "text-anchor": "end" }, figure(to, 3)),
    series.map(({ steps: own, values, className }) => [
      s("path", { class: className, d: linePath(own, values, x, y) }),
      lonely(values).map((i) => s("circle", { class: className, cx: x(own[i]), cy: y(values[i]), r: 1.6 })),
    ]),
    dots.map(([step, value]) => s("path", { class: "held-out", d: `M${x(step)} ${y(value) - 3.4}l3.4 3.4l-3.4 3.4l-3.4 -3.4z` })),
    ruler);
  const at = (step) => {
    ruler.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step === null) return;
    ruler.setAttribute("x1", x(step));
    ruler.setAttribute("x2", x(step));
  };
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect(), where = ((event.clientX - box.left) / box.width) * WIDTH;
    return from + ((where - LEFT) / (right - LEFT)) * (to - from);
  };
  return { svg, at, stepAt, x, y };
}

/** What works and what waits: spans {name, process, thread, start, end, facts} in seconds, a lane per thread. */
export function timelineChart(every) {
  const steps = every.filter((span) => span.name === "step"), threads = new Map();
  for (const span of every) {
    if (span.name === "step") continue;
    const name = [span.process, span.thread].filter(Boolean).join(" ");
    if (!threads.has(name)) threads.set(name, []);
    threads.get(name).push(span);
  }
  const lanes = [...threads].map(([name, spans]) => ({ name, spans }));
  const begin = Math.min(...every.map((span) => span.start)), end = Math.max(...every.map((span) => span.end));
  const wide = 1080, left = 150, lane = 15, height = 22 + lanes.length * lane;
  const x = scaleOf(begin, end, left, wide - 6), kinds = [...new Set(lanes.flatMap((one) => one.spans.map((span) => span.name)))];
  const bars = lanes.map(({ name, spans }, row) => [
    s("text", { x: left - 6, y: 14 + row * lane + 10, "text-anchor": "end" }, String(name).slice(0, 26)),
    spans.map((span) => {
      const width = Math.max(0.6, x(span.end) - x(span.start)), where = { x: x(span.start), y: 15 + row * lane, width, height: lane - 3 };
      return s("g", {}, s("rect", { class: `kind k${kinds.indexOf(span.name) % 8}`, ...where }, s("title", {}, `${span.name}, ${figure(span.start)} to ${figure(span.end)} s`)),
        width > 6.5 * span.name.length ? s("text", { class: "inside", x: where.x + 3, y: where.y + 9.5 }, span.name) : null);
    }),
  ]);
  const ends = steps.map(({ facts, end: at }) => [
    s("line", { class: "axis", x1: x(at), x2: x(at), y1: 12, y2: height - 6 }),
    s("text", { x: x(at), y: 9, "text-anchor": "end" }, `step ${facts.step ?? ""}`),
  ]);
  const label = `Timeline of ${lanes.length} lanes from ${figure(begin)} to ${figure(end)} seconds`;
  return s("svg", { class: "chart timeline", viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": label }, ends, bars);
}
