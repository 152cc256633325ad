// Along the sequence: the surrogate's value at each token and its limits, above lanes for the chosen tint, masked
// tokens, versions and roles. A canvas; each pixel column shows the range of the tokens that fall into it.

import { h, inkOf } from "./dom.js";
import { count, figure } from "./format.js";
import { scaleOf } from "./chart.js";
import { titleOf } from "./tint.js";

const LANE = 9, GAP = 4, PLOT = 96, BAND_LEFT = 46, BAND_RIGHT = 8;
const STYLES = [["ink", []], ["b", [6, 3]], ["a", [2, 2]], ["c", [9, 3, 2, 3]]];
const ZOOMS = [1, 8, 64];
let inks = null;

/** Reread the colours after a change of the theme. */
export function forgetInks() {
  inks = null;
}

function ink(name) {
  inks = inks || {};
  return (inks[name] = inks[name] || inkOf(name));
}

/** The range to draw; outliers, beyond 99 of 100 tokens, are drawn on the edge. */
function drawnRange(lists) {
  let low = Infinity, high = -Infinity;
  for (const values of lists) {
    const sorted = Float32Array.from(values).filter((value) => Number.isFinite(value)).sort();
    if (!sorted.length) continue;
    low = Math.min(low, sorted[Math.floor((sorted.length - 1) * 0.005)]);
    high = Math.max(high, sorted[Math.ceil((sorted.length - 1) * 0.995)]);
  }
  if (low > high) return null;
  if (low > 0 && low < high / 4) low = 0;
  return low === high ? [low - 1, high + 1] : [low, high + (high - low) * 0.08];
}

export class Band {
  constructor({ columns, band, length, onselect, sections = [] }) {
    Object.assign(this, { columns, band, length, onselect, sections });
    const names = band ? band.names.filter((name) => columns.column(name)) : [];
    this.lines = names.map((name, i) => ({ name, values: columns.column(name), style: STYLES[i % STYLES.length] }));
    this.masked = columns.masked;
    this.versions = columns.column("policy_version");
    if (this.versions && this.versions.every((value) => value === this.versions[0])) this.versions = null;
    this.range = drawnRange(this.lines.map((line) => line.values));
    this.zoom = 0;
    this.at = 0;
    this.tint = null;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.read = h("output", {});
    this.zoomed = h("button", { type: "button", "aria-keyshortcuts": "z", onclick: () => this.nextZoom() }, "zoom 1×");
    this.slider = h("div", { class: "plot", role: "slider", tabindex: 0, "aria-label": "Place in the answer", "aria-valuemin": 1, "aria-valuemax": Math.max(1, length), "aria-valuenow": 1 }, this.canvas);
    this.element = h("figure", { class: "band" }, this.caption(), this.slider);
    this.canvas.addEventListener("pointermove", (event) => this.show(this.indexAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.show(this.at));
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.slider);
  }

  caption() {
    const keys = this.lines.map((line) => h("li", { title: this.columns.doc(line.name) }, h("i", { class: `line ${line.style[0]}` }), titleOf(line.name), " ", (line.output = h("output", {}))));
    const note = this.band ? this.band.note : "";
    return h("figcaption", {}, h("h2", { title: note }, this.band ? this.band.title : "Along the answer"), h("ul", {}, keys), this.read, this.zoomed);
  }

  nextZoom() {
    this.zoom = (this.zoom + 1) % ZOOMS.length;
    this.zoomed.textContent = `zoom ${ZOOMS[this.zoom]}×`;
    this.draw();
  }

  /** First and last token drawn. */
  get window() {
    const wide = Math.max(Math.min(this.length, 24), Math.ceil(this.length / ZOOMS[this.zoom]));
    const first = Math.min(Math.max(0, this.at - (wide >> 1)), this.length - wide);
    return [this.zoom ? first : 0, this.zoom ? first + wide - 1 : this.length - 1];
  }

  indexAt(event) {
    const box = this.canvas.getBoundingClientRect(), [first, last] = this.window;
    const share = (event.clientX - box.left - BAND_LEFT) / (box.width - BAND_LEFT - BAND_RIGHT);
    return Math.min(Math.max(first + Math.floor(share * (last - first + 1)), first), last);
  }

  press(event) {
    if (!this.length) return;
    const move = (one) => this.onselect(this.indexAt(one));
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", () => this.canvas.removeEventListener("pointermove", move), { once: true });
    move(event);
  }

  /** Write the lines' values at a token. */
  show(index) {
    for (const { name, output } of this.lines) output.textContent = figure(this.columns.at(name, index));
    const state = this.masked && this.length ? (this.masked[index] ? "masked" : "kept") : "";
    this.read.textContent = [`token ${count(index + 1)}`, state].filter(Boolean).join(" · ");
  }

  select(index) {
    this.at = index;
    this.show(index);
    this.slider.setAttribute("aria-valuenow", index + 1);
    this.slider.setAttribute("aria-valuetext", [this.read.textContent, ...this.lines.map(({ name, output }) => `${titleOf(name)} ${output.textContent}`)].join(", "));
    this.draw();
  }

  setTint(tint) {
    this.tint = tint;
    this.tinted = tint.name && !["keep", "policy_version"].includes(tint.name) && Array.from({ length: this.length }, (_, i) => i).some((i) => tint.level(i));
    this.element.hidden = !this.range && !this.lanes.length;
    this.draw();
  }

  get lanes() {
    const lanes = [];
    if (this.tinted) lanes.push(["tint", this.tintLane]);
    if (this.masked) lanes.push(["masked", this.maskLane]);
    if (this.versions) lanes.push(["version", this.versionLane]);
    if (this.sections.length) lanes.push(["role", this.roleLane]);
    return lanes;
  }

  /** Paint before the next frame, once for all changes. */
  draw() {
    this.frame = this.frame || requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  paint() {
    const width = this.slider.clientWidth, ratio = devicePixelRatio || 1;
    const lanes = this.lanes, plot = this.range ? PLOT : 0, height = plot + lanes.length * (LANE + GAP) + 14;
    if (!width || !this.length) return;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "10.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const [first, last] = this.window, x = scaleOf(first, last + 1, BAND_LEFT, width - BAND_RIGHT);
    const view = { pen, x, first, last, width };
    if (plot) this.drawLines(view);
    lanes.forEach(([name, draw], row) => {
      const top = plot + GAP + row * (LANE + GAP);
      pen.fillStyle = ink("muted");
      pen.textAlign = "right";
      pen.fillText(name, BAND_LEFT - 6, top + LANE / 2);
      pen.textAlign = "left";
      draw.call(this, view, top);
    });
    this.drawAxis(view, height);
  }

  drawAxis({ pen, x, first, last, width }, height) {
    pen.fillStyle = ink("muted");
    pen.textAlign = "left";
    pen.fillText(count(first + 1), BAND_LEFT, height - 5);
    pen.textAlign = "right";
    pen.fillText(count(last + 1), width - BAND_RIGHT, height - 5);
    pen.strokeStyle = ink("mark");
    pen.lineWidth = Math.max(1, Math.min(x(1) - x(0), 6));
    pen.globalAlpha = pen.lineWidth > 2 ? 0.35 : 0.9;
    pen.beginPath();
    pen.moveTo(x(this.at + 0.5), 0);
    pen.lineTo(x(this.at + 0.5), height - 12);
    pen.stroke();
    pen.globalAlpha = 1;
  }

  drawLines(view) {
    const { pen, width } = view, [low, high] = this.range, y = scaleOf(low, high, PLOT - 4, 4);
    pen.strokeStyle = ink("grid");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const share of [0, 0.5, 0.92]) {
      const value = low + share * (high - low);
      pen.beginPath();
      pen.moveTo(BAND_LEFT, y(value));
      pen.lineTo(width - BAND_RIGHT, y(value));
      pen.stroke();
      pen.fillStyle = ink("muted");
      pen.fillText(figure(+value.toPrecision(2), 2), BAND_LEFT - 6, y(value));
    }
    [...this.lines].reverse().forEach((line) => this.drawLine(view, line, (value) => y(Math.min(Math.max(value, low), high))));
  }

  /** One line; if several tokens share a pixel, the range of their values. */
  drawLine({ pen, x, first, last }, { values, style: [name, dash] }, y) {
    const dots = [], dense = x(first + 1) - x(first) < 1;
    pen.strokeStyle = ink(name);
    pen.lineWidth = dash.length ? 1.3 : 1;
    pen.setLineDash(dense ? [] : dash);
    pen.beginPath();
    let column = -1, low = 0, high = 0, open = false;
    const flush = () => {
      if (column < 0) return;
      if (open) pen.lineTo(column + 0.5, y(low));
      else pen.moveTo(column + 0.5, y(low));
      if (high > low) pen.lineTo(column + 0.5, y(high));
      open = true;
    };
    for (let i = first; i <= last; i++) {
      const value = values[i];
      if (Number.isNaN(value)) {
        flush();
        column = -1;
        open = false;
        continue;
      }
      if (this.masked && this.masked[i] && name === "ink") dots.push([x(i + 0.5), y(value)]);
      if (!dense) {
        if (open) pen.lineTo(x(i + 0.5), y(value));
        else pen.moveTo(x(i + 0.5), y(value));
        open = true;
      } else if (Math.floor(x(i)) !== column) {
        flush();
        column = Math.floor(x(i));
        low = high = value;
      } else {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (dense) flush();
    pen.stroke();
    pen.setLineDash([]);
    this.drawCrosses(pen, dots);
  }

  drawCrosses(pen, dots) {
    pen.strokeStyle = ink("bad");
    pen.lineWidth = 1.2;
    pen.beginPath();
    let before = -9;
    for (const [x, y] of dots) {
      if (x - before < 0.8) continue;
      before = x;
      pen.moveTo(x - 2.5, y - 2.5);
      pen.lineTo(x + 2.5, y + 2.5);
      pen.moveTo(x - 2.5, y + 2.5);
      pen.lineTo(x + 2.5, y - 2.5);
    }
    pen.stroke();
  }

  /** The strongest tint in each pixel column: colour, and its height. */
  tintLane({ pen, x, first, last }, top) {
    let column = -1, strongest = 0;
    const flush = () => {
      if (column < 0 || !strongest) return;
      const height = Math.max(1.5, Math.abs(strongest) * LANE), wide = Math.max(1, x(1) - x(0));
      pen.fillStyle = ink(strongest > 0 ? "b" : "a");
      pen.globalAlpha = 0.35 + 0.65 * Math.abs(strongest);
      pen.fillRect(column, top + LANE - height, wide, height);
    };
    for (let i = first; i <= last; i++) {
      const level = this.tint.level(i), here = x(i + 1) - x(i) < 1 ? Math.floor(x(i)) : x(i);
      if (here !== column) {
        flush();
        column = here;
        strongest = level;
      } else if (Math.abs(level) > Math.abs(strongest)) strongest = level;
    }
    flush();
    pen.globalAlpha = 1;
  }

  maskLane({ pen, x, first, last, width }, top) {
    pen.fillStyle = ink("grid");
    pen.fillRect(BAND_LEFT, top + LANE / 2, width - BAND_LEFT - BAND_RIGHT, 1);
    pen.fillStyle = ink("bad");
    for (let i = first; i <= last; i++) if (this.masked[i]) pen.fillRect(x(i), top, Math.max(1, x(1) - x(0) - 0.5), LANE);
  }

  versionLane(view, top) {
    this.runs(view, top, (i) => this.versions[i], (value) => `v${value}`);
  }

  roleLane(view, top) {
    const role = (i) => this.sections.reduce((found, section, k) => (section.start <= i ? k : found), 0);
    this.runs(view, top, role, (k) => this.sections[k].title.split(" ")[0]);
  }

  /** Runs of tokens with one value: alternating shades, each with its name if there is room. */
  runs({ pen, x, first, last }, top, valueAt, nameOf) {
    let start = first, shade = 0;
    for (let i = first; i <= last; i++) {
      if (i < last && valueAt(i + 1) === valueAt(start)) continue;
      const wide = x(i + 1) - x(start), text = nameOf(valueAt(start));
      pen.fillStyle = ink(shade % 2 ? "shade2" : "shade1");
      pen.fillRect(x(start), top, wide, LANE);
      if (wide > pen.measureText(text).width + 6) {
        pen.fillStyle = ink("ink");
        pen.fillText(text, x(start) + 3, top + LANE / 2 + 0.5);
      }
      start = i + 1;
      shade++;
    }
  }
}
