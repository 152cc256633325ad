// A completion as tokens: tinted by a column, with its surrogate's band below and the explanation of one token.

import { h, say, terms } from "./dom.js";
import { Columns, get, getOrNull, isFile } from "./api.js";
import { count, figure, signed, words } from "./format.js";
import { completionId, go, idParts, remember, stepPath } from "./router.js";
import { Band } from "./band.js";
import { episodePanel, sectionsOf } from "./episode.js";
import { Inspector } from "./inspector.js";
import { noteField } from "./notes.js";
import { outcomeWords } from "./step.js";
import { tintNames, tintOf } from "./tint.js";
import { TokenText } from "./tokens.js";

/** The initial tint: masked tokens if there are any, else the advantage. */
export function firstTint(columns) {
  const names = tintNames(columns).map(([name]) => name);
  return ["log_ratio", "divergence", "mismatch", "entropy", "advantage"].find((name) => names.includes(name)) || names[0] || "";
}

class Completion {
  constructor(route, data) {
    Object.assign(this, { route, data });
    this.path = `${stepPath(route.run, route.step)}/completion/${route.completion}`;
    this.columns = new Columns(data.columns, data.columns_doc);
    this.length = data.tokens.text.length;
    this.at = -1;
    const sections = sectionsOf(data.episode), onselect = (index) => this.select(index, true);
    this.text = new TokenText({ texts: data.tokens.text, columns: this.columns, sections, onselect: (index) => this.select(index, false), label: `The answer, ${count(this.length)} tokens; arrow keys move` });
    this.band = new Band({ columns: this.columns, band: data.band, length: this.length, sections, onselect });
    this.inspector = new Inspector({ path: this.path, data, columns: this.columns, onmove: (direction) => this.select(this.at + direction, true) });
    this.find = h("input", { type: "search", placeholder: "text in this answer", "aria-label": "Text in this answer", "aria-keyshortcuts": "/", onkeydown: (event) => { if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1); }, oninput: () => this.search() });
    this.found = h("span", { class: "muted", role: "status" });
    this.legend = h("div", { class: "legend" });
    this.noted = noteField(route.run, this.noteName(-1));
    const names = tintNames(this.columns);
    this.tints = h("select", { "aria-label": "Tint", "aria-keyshortcuts": "t", onchange: () => this.setTint(this.tints.value) }, h("option", { value: "none" }, "no tint"), names.map(([name, title]) => h("option", { value: name }, title)));
    this.tinted = h("div", { class: "tinted" }, h("label", {}, "tint ", this.tints), this.legend);
    this.element = h("div", { class: "frame completion" }, this.head(),
      h("div", { class: "split" }, h("div", { class: "reading" }, h("div", { class: "bar" }, this.tinted, this.find, this.found), this.text.element, this.band.element),
        h("aside", { "aria-label": "About the token and the completion" }, this.inspector.element, this.noted, episodePanel(data.episode, route, idParts(route.completion), onselect), this.further())));
    const wanted = names.some(([name]) => name === route.query.tint) || route.query.tint === "none" ? route.query.tint : firstTint(this.columns);
    this.setTint(wanted);
  }

  head() {
    const { data } = this, flags = this.columns.masked, masked = flags ? flags.reduce((sum, one) => sum + one, 0) : null;
    const parts = Object.entries(data.parts || {});
    const facts = [["reward", figure(data.reward)], ...(parts.length > 1 ? parts.map(([name, value]) => [name, figure(value, 3)]) : []), ["advantage", signed(data.advantage)], ["tokens", count(this.length)],
      ["masked", masked === null ? null : count(masked)], ["outcome", data.outcome ? outcomeWords(data.outcome) : null], ["ended", words(data.finish_reason || "")], ["temperature", figure(data.temperature)], ["versions", data.versions && data.versions.length > 1 ? data.versions.join(", ") : null]];
    return h("header", { class: "about" }, terms(facts, "strip"), h("details", {}, h("summary", {}, `prompt, ${count(data.prompt.text.length)} tokens`), h("p", { class: "text", tabindex: 0, role: "group", "aria-label": "The prompt" }, data.prompt.text.join(""))), (data.prompt.images ?? []).map((src) => h("img", { src, alt: "image" })));
  }

  noteName(index) {
    return `step/${this.route.step}/completion/${this.route.completion}${index >= 0 ? `?t=${index}` : ""}`;
  }

  /** The choice of another run or step to compare with. */
  further() {
    const run = h("select", { "aria-label": "Run to compare with" }), step = h("input", { type: "number", min: 0, value: this.route.step, "aria-label": "Step to compare with" });
    getOrNull("runs").then((runs) => run.replaceChildren(...(runs || []).filter((one) => !one.problem).map((one) => h("option", { value: one.run, selected: String(one.run) === this.route.run }, one.name))));
    const open = () => go(`${this.route.run}/compare`, { step: this.route.step, c: this.route.completion, run2: run.value, step2: step.value, t: this.at > 0 ? this.at : "" });
    const compare = h("p", {}, run, " step ", step, " ", h("button", { type: "button", onclick: open }, "compare"));
    return isFile ? null : h("details", { class: "further", open: true }, h("summary", {}, "compare"), compare);
  }

  setTint(name) {
    const tint = tintOf(name === "none" ? "" : name, this.columns);
    this.tints.value = tint.name || "none";
    this.text.setTint(tint);
    this.band.setTint(tint);
    const next = tint.legend;
    this.legend.replaceWith(next);
    this.legend = next;
    this.legend.title = tint.name ? this.columns.doc(tint.name) : "";
    this.tint = name;
    remember({ tint: name });
  }

  nextTint() {
    const names = [...this.tints.options].map((option) => option.value), next = names[(names.indexOf(this.tints.value) + 1) % names.length];
    this.setTint(next);
    say(`tint ${this.tints.selectedOptions[0].textContent}`);
  }

  select(index, reveal) {
    if (!this.length) return;
    this.at = Math.min(Math.max(index, 0), this.length - 1);
    this.text.select(this.at, reveal);
    this.band.select(this.at);
    this.inspector.show(this.at);
    this.noted?.file(this.noteName(this.at));
    remember({ t: this.at });
  }

  search() {
    const places = this.text.find(this.find.value);
    this.places = places;
    this.found.textContent = this.find.value ? `${count(places.length)} places` : "";
  }

  nextHit(direction) {
    if (!this.places) this.search();
    const places = this.places || [];
    if (!places.length) return;
    const after = direction > 0 ? places.find((at) => at > this.at) ?? places[0] : [...places].reverse().find((at) => at < this.at) ?? places[places.length - 1];
    this.select(after, true);
  }

  /** The next token that was masked. */
  nextMasked(direction) {
    const { masked } = this.columns;
    if (!masked) return say("which tokens were masked is not stored");
    for (let i = this.at + direction; i >= 0 && i < this.length; i += direction) if (masked[i]) return this.select(i, true);
    return say("no further masked token");
  }

  async beside(direction) {
    const { uid, sample, turn } = idParts(this.route.completion);
    const { completions } = await get(`${stepPath(this.route.run, this.route.step)}/group/${encodeURIComponent(uid)}`);
    const next = completions[completions.findIndex((one) => one.sample === sample && (one.turn || 0) === turn) + direction];
    if (next) go(`${stepPath(this.route.run, this.route.step)}/completion/${completionId(uid, next.sample, next.turn)}`, { tint: this.tint });
    else say(direction > 0 ? "this is the last of the group" : "this is the first of the group");
  }

  /** The address has changed: another token, another tint. */
  update(query) {
    if (query.tint && query.tint !== this.tint) this.setTint(query.tint);
    if (query.t !== undefined && +query.t !== this.at) this.select(+query.t, true);
  }
}

export async function completionView(route) {
  const path = `${stepPath(route.run, route.step)}/completion/${route.completion}`;
  const view = new Completion(route, await get(path));
  const keys = [
    { key: "ArrowRight", text: "token after", run: () => view.select(view.at + 1, true) },
    { key: "ArrowLeft", text: "token before", run: () => view.select(Math.max(0, view.at - 1), true) },
    { key: "ArrowDown", text: "line below", run: () => view.select(view.at < 0 ? 0 : view.text.beside(1), true) },
    { key: "ArrowUp", text: "line above", run: () => view.select(view.at < 0 ? 0 : view.text.beside(-1), true) },
    { key: "Home", text: "first token", run: () => view.select(0, true) },
    { key: "End", text: "last token", run: () => view.select(view.length - 1, true) },
    { key: "m", text: "next masked token", run: () => view.nextMasked(1) },
    { key: "M", text: "masked token before", run: () => view.nextMasked(-1) },
    { key: "t", text: "next tint", run: () => view.nextTint() },
    { key: "z", text: "zoom the band", run: () => view.band.nextZoom() },
    { key: "n", text: "next completion of the group", run: () => view.beside(1) },
    { key: "p", text: "completion before", run: () => view.beside(-1) },
    { key: "/", text: "search; Enter and Shift+Enter go to the places" },
  ];
  const settle = () => view.select(route.query.t === undefined ? 0 : +route.query.t, true);
  return { element: view.element, keys, focus: view.text.element, search: view.find, settle, update: (query) => view.update(query), leave: () => view.text.leave(), print: () => view.text.print(), redraw: () => view.band.draw() };
}
