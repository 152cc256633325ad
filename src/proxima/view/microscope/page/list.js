// A table with only the visible rows in the document: 10,000 rows scroll like ten.

import { h } from "./dom.js";

const ROW = 27; // pixels, as in the stylesheet
const PRINTED = 1000; // rows
const SPARE = 8; // rows above and below the visible ones
let made = 0;

/**
 * Columns are `{title, text(item), sort?(item), narrow?, className?, width}`; `items` are anything.
 * `onopen(item)` on click or Enter. Columns that a phone has no room for have `room`: `middle`, `wide` or `roomy`.
 */
export class List {
  constructor({ label, columns, onopen, sorted, empty }) {
    Object.assign(this, { columns, onopen, empty: empty || "none" });
    this.number = ++made;
    this.items = [];
    this.at = 0;
    [this.sortBy, this.down] = sorted || [null, true];
    this.rows = new Map();
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.head = h("div", { class: "row head", role: "row", "aria-rowindex": 1 });
    this.grid = h("div", { class: "list", role: "grid", tabindex: 0, "aria-label": label, "aria-readonly": "true" }, h("div", { role: "rowgroup", class: "top" }, this.head), this.space);
    this.grid.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
    const tiers = { roomy: "--wide", wide: "--narrow", middle: "--least" }; // the widths of the columns that are left
    const left = new Set([undefined, ...Object.keys(tiers)]);
    for (const [room, name] of Object.entries(tiers)) {
      left.delete(room);
      this.grid.style.setProperty(name, columns.filter((column) => left.has(column.room)).map((column) => column.width).join(" "));
    }
    this.grid.addEventListener("scroll", () => this.draw());
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.space.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.draw()).observe(this.grid);
    this.drawHead();
  }

  get element() {
    return this.grid;
  }

  get current() {
    return this.items[this.at];
  }

  show(items, keep) {
    const before = keep ? keep(this.current) : undefined;
    this.items = [...items];
    this.sort();
    this.at = Math.max(0, keep && before !== undefined ? this.items.findIndex((item) => keep(item) === before) : 0);
    this.redraw();
  }

  redraw() {
    this.grid.setAttribute("aria-rowcount", this.items.length + 1);
    this.space.style.height = `${Math.max(1, this.items.length) * ROW}px`;
    this.rows.clear();
    this.space.replaceChildren();
    if (!this.items.length) this.space.append(h("div", { class: "row none", role: "row" }, h("div", { role: "gridcell" }, this.empty)));
    this.draw();
  }

  sort() {
    const column = this.columns.find((one) => one.title === this.sortBy);
    if (!column) return;
    const sign = this.down ? -1 : 1, value = column.sort || column.text;
    const missing = (one) => one === null || one === undefined || Number.isNaN(one);
    const order = (a, b) => {
      const left = value(a), right = value(b);
      if (missing(left) || missing(right)) return missing(left) - missing(right);
      return left < right ? -sign : left > right ? sign : 0;
    };
    this.items.sort(order);
  }

  drawHead() {
    this.head.replaceChildren(...this.columns.map((column) => {
      const sorted = column.title === this.sortBy;
      const cell = h("div", { role: "columnheader", class: this.classOf(column), title: column.doc, "aria-sort": sorted ? (this.down ? "descending" : "ascending") : "none" });
      if (column.sort) cell.append(h("button", { type: "button", onclick: () => this.resort(column) }, column.title, sorted ? h("span", { "aria-hidden": "true" }, this.down ? " ↓" : " ↑") : null));
      else cell.append(column.title);
      return cell;
    }));
  }

  resort(column) {
    const item = this.current;
    this.down = column.title === this.sortBy ? !this.down : true;
    this.sortBy = column.title;
    this.sort();
    this.at = Math.max(0, this.items.indexOf(item));
    this.drawHead();
    this.redraw();
    const button = [...this.head.querySelectorAll("button")].find((one) => one.textContent.startsWith(column.title));
    if (button) button.focus();
  }

  classOf(column) {
    return [column.className, column.room].filter(Boolean).join(" ") || null;
  }

  row(index) {
    const item = this.items[index];
    const cells = this.columns.map((column) => {
      const content = column.text(item);
      return h("div", { role: "gridcell", class: this.classOf(column), title: typeof content === "string" && content.length > 9 ? content : null }, content);
    });
    const row = h("div", { class: "row", role: "row", id: `row-${this.number}-${index}`, "data-index": index, "aria-rowindex": index + 2 }, cells);
    row.style.top = `${index * ROW}px`;
    return row;
  }

  /** Draw more rows than are in sight, for a print. */
  print() {
    this.draw(0, Math.min(this.items.length, PRINTED));
  }

  draw(from, to) {
    const height = this.grid.clientHeight;
    if (!this.items.length || !height) return;
    const first = from ?? Math.max(0, Math.floor(this.grid.scrollTop / ROW) - SPARE);
    const last = to ?? Math.min(this.items.length, Math.ceil((this.grid.scrollTop + height) / ROW) + SPARE);
    for (const [index, row] of this.rows) {
      if (index < first || index >= last) {
        row.remove();
        this.rows.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      if (this.rows.has(index)) continue;
      const row = this.row(index);
      this.rows.set(index, row);
      this.space.append(row);
    }
    this.mark();
  }

  mark() {
    for (const [index, row] of this.rows) {
      row.classList.toggle("at", index === this.at);
      row.setAttribute("aria-selected", String(index === this.at));
    }
    if (this.rows.has(this.at)) this.grid.setAttribute("aria-activedescendant", `row-${this.number}-${this.at}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  /** Mark a row and scroll it into view. */
  select(index) {
    this.at = Math.min(Math.max(index, 0), this.items.length - 1);
    const top = this.at * ROW, room = this.grid.clientHeight - this.head.offsetHeight - ROW;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top > this.grid.scrollTop + room) this.grid.scrollTop = top - room;
    this.draw();
  }

  find(test) {
    const index = this.items.findIndex(test);
    if (index >= 0) this.select(index);
  }

  click(event) {
    const row = event.target.closest("[data-index]");
    if (!row) return;
    this.select(+row.dataset.index);
    this.onopen(this.current);
  }

  key(event) {
    if (event.target !== this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.grid.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.select(Math.min(Math.max(this.at + moves[event.key], 0), this.items.length - 1));
    else if (event.key === "Enter" && this.items.length) this.onopen(this.current);
    else return;
    event.preventDefault();
  }
}
