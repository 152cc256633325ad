// The rewards of a step as bars that filter: drag over bars, click one, or choose them with the arrow keys.

import { h, s } from "./dom.js";
import { count, extent, figure, isNumber } from "./format.js";
import { scaleOf } from "./chart.js";

const BARS_WIDTH = 420, BARS_HEIGHT = 118, BARS_LEFT = 6, BARS_RIGHT = 6, BARS_TOP = 14, BARS_BOTTOM = 16, BINS = 24;

/** One bin per value if there are few, else 24 of equal width: [[low, high], …], both inclusive. */
function binsOf(values) {
  const range = extent(values);
  if (!range) return [];
  const distinct = [...new Set(values.filter(isNumber))].sort((a, b) => a - b);
  if (distinct.length <= BINS / 2) return distinct.map((value) => [value, value]);
  const width = (range[1] - range[0]) / BINS;
  return Array.from({ length: BINS }, (_, i) => [range[0] + i * width, i === BINS - 1 ? range[1] : range[0] + (i + 1) * width]);
}

function binIndex(bins, value) {
  for (let i = bins.length - 1; i >= 0; i--) if (value >= bins[i][0]) return i;
  return 0;
}

export class Histogram {
  constructor(values, onchange) {
    this.values = values;
    this.onchange = onchange;
    this.bins = binsOf(values);
    this.chosen = null;
    this.at = 0;
    this.total = this.counts(null);
    this.svg = s("svg", { class: "chart histogram", viewBox: `0 0 ${BARS_WIDTH} ${BARS_HEIGHT}`, "aria-hidden": "true" });
    this.element = h("div", { class: "bars", role: "slider", tabindex: 0, "aria-label": "Histogram of rewards; left and right choose a bar, with Shift a range, Escape all", "aria-valuemin": 0, "aria-valuemax": Math.max(0, this.bins.length - 1), "aria-valuenow": 0 }, this.svg);
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.draw(null);
  }

  /** Count the rewards in each bin, of all or of the completions in `shown`. */
  counts(shown) {
    const counts = new Array(this.bins.length).fill(0);
    const add = (value) => { if (isNumber(value)) counts[binIndex(this.bins, value)]++; };
    if (shown) for (const index of shown) add(this.values[index]);
    else this.values.forEach(add);
    return counts;
  }

  draw(shown) {
    if (!this.bins.length) {
      this.svg.replaceChildren(s("text", { x: BARS_LEFT, y: BARS_HEIGHT / 2 }, "no completion has a reward"));
      return;
    }
    const now = shown ? this.counts(shown) : this.total, most = Math.max(...this.total);
    const wide = (BARS_WIDTH - BARS_LEFT - BARS_RIGHT) / this.bins.length, y = scaleOf(0, most, BARS_HEIGHT - BARS_BOTTOM, BARS_TOP);
    const gap = Math.min(3, wide / 6), width = Math.min(wide - gap, 48);
    const few = this.bins.length <= BINS / 2, every = few ? 1 : 6;
    const parts = this.bins.map(([low, high], i) => {
      const middle = BARS_LEFT + (i + 0.5) * wide, x = middle - width / 2, inside = this.chosen && i >= this.chosen[0] && i <= this.chosen[1];
      const bar = (n, className) => s("rect", { class: className, x, width, y: y(n), height: Math.max(n ? 1.5 : 0, BARS_HEIGHT - BARS_BOTTOM - y(n)) });
      const label = few ? s("text", { x: middle, y: BARS_HEIGHT - 3, "text-anchor": "middle" }, figure(low, 3))
        : i % every === 0 ? s("text", { x, y: BARS_HEIGHT - 3 }, figure(low, 3)) : null;
      const number = few && wide > 24 && this.total[i] ? s("text", { class: "number", x: middle, y: y(this.total[i]) - 3, "text-anchor": "middle" }, now[i] === this.total[i] ? count(now[i]) : `${count(now[i])}/${count(this.total[i])}`) : null;
      const title = s("title", {}, `${count(now[i])} of ${count(this.total[i])} with reward ${low === high ? figure(low) : `${figure(low)} to ${figure(high)}`}`);
      return s("g", {}, title, s("rect", { class: "hit", x: BARS_LEFT + i * wide, y: 0, width: wide, height: BARS_HEIGHT }), bar(this.total[i], "all"), bar(now[i], inside ? "now chosen" : "now"),
        inside ? s("line", { class: "under", x1: x, x2: x + width, y1: BARS_HEIGHT - BARS_BOTTOM + 2, y2: BARS_HEIGHT - BARS_BOTTOM + 2 }) : null, label, number);
    });
    this.svg.replaceChildren(s("line", { class: "axis", x1: BARS_LEFT, x2: BARS_WIDTH - BARS_RIGHT, y1: BARS_HEIGHT - BARS_BOTTOM, y2: BARS_HEIGHT - BARS_BOTTOM }), ...parts);
    const text = this.chosen ? `${this.words()}, ${count(now.slice(this.chosen[0], this.chosen[1] + 1).reduce((a, b) => a + b, 0))} completions` : `all rewards, ${count(this.values.length)} completions`;
    this.element.setAttribute("aria-valuetext", text);
    this.element.setAttribute("aria-valuenow", this.at);
  }

  words() {
    const [low, high] = this.range();
    return low === high ? `reward ${figure(low)}` : `reward ${figure(low)} to ${figure(high)}`;
  }

  range() {
    return this.chosen ? [this.bins[this.chosen[0]][0], this.bins[this.chosen[1]][1]] : null;
  }

  /** Mark the bins that a range of rewards covers; null: none. */
  mark(range) {
    const inside = range ? this.bins.flatMap(([low, high], i) => (high >= range[0] && low <= range[1] ? [i] : [])) : [];
    this.chosen = inside.length ? [inside[0], inside[inside.length - 1]] : null;
  }

  choose(first, last) {
    this.chosen = first === null ? null : [Math.min(first, last), Math.max(first, last)];
    this.onchange(this.range());
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (event.key === "Escape" && this.chosen) this.choose(null);
    else if (move && this.bins.length) {
      const start = this.chosen && event.shiftKey ? (this.at === this.chosen[0] ? this.chosen[1] : this.chosen[0]) : null;
      this.at = this.chosen ? Math.min(Math.max(this.at + move, 0), this.bins.length - 1) : move > 0 ? 0 : this.bins.length - 1;
      this.choose(this.at, start === null ? this.at : start);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  press(event) {
    if (!this.bins.length) return;
    const box = this.svg.getBoundingClientRect();
    const binAt = (one) => Math.min(Math.max(Math.floor((((one.clientX - box.left) / box.width) * BARS_WIDTH - BARS_LEFT) / ((BARS_WIDTH - BARS_LEFT - BARS_RIGHT) / this.bins.length)), 0), this.bins.length - 1);
    const first = binAt(event), before = this.chosen;
    let last = first;
    const move = (one) => { last = binAt(one); this.at = last; this.choose(first, last); };
    const up = () => {
      removeEventListener("pointermove", move);
      this.at = last;
      const again = before && first === last && before[0] === first && before[1] === first;
      if (again) this.choose(null);
      else this.choose(first, last);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up, { once: true });
    event.preventDefault();
    this.element.focus({ preventScroll: true });
  }
}
