// Two answers to one prompt side by side, from two runs or steps; the first differing token is marked.

import { h, terms } from "./dom.js";
import { Columns, get } from "./api.js";
import { count, figure, quoted, signed } from "./format.js";
import { linkTo, remember, stepPath } from "./router.js";
import { Band } from "./band.js";
import { firstTint } from "./completion.js";
import { tintNames, tintOf } from "./tint.js";
import { TokenText } from "./tokens.js";

class Side {
  constructor({ title, link, data, first, onselect }) {
    this.data = data;
    this.columns = new Columns(data.columns, data.columns_doc);
    this.text = new TokenText({ texts: data.tokens.text, columns: this.columns, label: `${title}, ${count(data.tokens.text.length)} tokens`, onselect });
    this.text.first = first ?? -1;
    this.band = new Band({ columns: this.columns, band: data.band, length: data.tokens.text.length, onselect });
    const facts = [["reward", figure(data.reward)], ["advantage", signed(data.advantage)], ["tokens", count(data.tokens.text.length)], ["ended", data.finish_reason]];
    this.element = h("section", { "aria-label": title }, h("h2", {}, h("a", { href: link }, title)), terms(facts, "strip"), this.text.element, this.band.element);
  }

  select(index) {
    const inside = Math.min(index, this.data.tokens.text.length - 1);
    if (inside < 0) return;
    this.text.select(inside, true);
    this.band.select(inside);
  }
}

class Compare {
  constructor(route, sides, first) {
    Object.assign(this, { route, sides, first });
    this.at = 0;
    const names = new Map(sides.flatMap((side) => tintNames(side.columns)));
    this.tints = h("select", { "aria-label": "Tint", onchange: () => this.setTint(this.tints.value) }, h("option", { value: "none" }, "no tint"), [...names].map(([name, title]) => h("option", { value: name }, title)));
    this.legends = h("div", { class: "legends" });
    this.figures = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "The token on both sides" });
    const [one, two] = sides, token = (side) => (first < side.data.tokens.text.length ? quoted(side.data.tokens.text[first]) : "the end");
    const where = first === null || first === undefined ? "The tokens are the same." : `First difference at token ${count(first + 1)}: ${token(one)} against ${token(two)}.`;
    const jump = first === null || first === undefined ? null : h("button", { type: "button", onclick: () => this.select(first) }, "go there");
    this.element = h("div", { class: "frame compare" }, h("div", { class: "bar" }, h("b", { role: "status" }, where), jump, h("label", {}, "tint ", this.tints), this.legends), h("div", { class: "pair" }, one.element, two.element), this.figures);
    this.setTint(names.has(route.query.tint) ? route.query.tint : firstTint(one.columns));
  }

  setTint(name) {
    const tints = this.sides.map((side) => tintOf(name === "none" ? "" : name, side.columns));
    this.sides.forEach((side, i) => {
      side.text.setTint(tints[i]);
      side.band.setTint(tints[i]);
    });
    this.tints.value = name;
    this.legends.replaceChildren(tints[0].legend);
    remember({ tint: name });
  }

  select(index) {
    const last = Math.max(...this.sides.map((side) => side.data.tokens.text.length)) - 1;
    this.at = Math.min(Math.max(index, 0), last);
    this.sides.forEach((side) => side.select(this.at));
    remember({ t: this.at });
    this.drawFigures();
  }

  drawFigures() {
    const names = [...new Map(this.sides.flatMap((side) => tintNames(side.columns)))].filter(([name]) => name !== "keep");
    const row = (side, title) => h("tr", {}, h("th", { scope: "row" }, title), h("td", {}, quoted(side.data.tokens.text[this.at] ?? "")), h("td", {}, { 0: "masked", 1: "kept" }[side.columns.at("keep", this.at)] || "–"), names.map(([name]) => h("td", { class: "n" }, figure(side.columns.at(name, this.at)))));
    this.figures.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, [`token ${count(this.at + 1)}`, "text", "", ...names.map(([, title]) => title)].map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, row(this.sides[0], "left"), row(this.sides[1], "right"))));
  }
}

export async function compareView(route) {
  const { step, c, run2 = route.run, step2 = step } = route.query, path = `${stepPath(route.run, step)}/completion/${c}`;
  const [mine, other, runs] = await Promise.all([get(path), get(`${path}/compare`, { run: run2, step: step2 }), get("runs")]);
  const name = (run) => (runs.find((one) => String(one.run) === String(run)) || { name: `run ${run}` }).name;
  let view = null;
  const onselect = (index) => view.select(index);
  const first = other.first_difference;
  const sides = [[route.run, step, mine], [run2, step2, other.completion]].map(([run, at, data]) =>
    new Side({ title: `${name(run)}, step ${at}`, link: linkTo(`${stepPath(run, at)}/completion/${c}`), data, first, onselect }));
  view = new Compare(route, sides, first);
  const keys = [
    { key: "ArrowRight", text: "token after", run: () => view.select(view.at + 1) },
    { key: "ArrowLeft", text: "token before", run: () => view.select(view.at - 1) },
    { key: "d", text: "first difference", run: () => { if (first !== null && first !== undefined) view.select(first); } },
    { key: "t", text: "next tint", run: () => { view.tints.selectedIndex = (view.tints.selectedIndex + 1) % view.tints.options.length; view.setTint(view.tints.value); } },
  ];
  const settle = () => view.select(route.query.t !== undefined ? +route.query.t : first ?? 0);
  return { element: view.element, keys, focus: sides[0].text.element, settle, leave: () => sides.forEach((side) => side.text.leave()), redraw: () => sides.forEach((side) => side.band.draw()) };
}
