// The filters of a step: reward, outcome, text or expression, length, version. They are kept in the address.

import { h, later } from "./dom.js";
import { get, isFile } from "./api.js";
import { isNumber, words } from "./format.js";
import { stepPath } from "./router.js";

const RANGES = { reward: ["reward"], length: ["length"], masked: ["masked"], version: ["version_min", "version_max"] };
const TYPED = 160; // ms after the last key until a text is searched

export class Filters {
  constructor({ route, rows, outcomes, onchange }) {
    Object.assign(this, { route, rows, onchange });
    this.found = null; // indices with the text; null: no text filter
    this.problem = h("span", { class: "bad", role: "alert" });
    this.fields = {};
    const searching = later(() => this.search(), TYPED);
    this.text = h("input", { type: "search", placeholder: "text of the answers", "aria-label": "Text of the answers", "aria-keyshortcuts": "/", value: route.query.q || "", oninput: searching, disabled: isFile });
    this.regex = h("input", { type: "checkbox", checked: route.query.regex === "1", onchange: () => this.search(), disabled: isFile });
    this.outcome = h("select", { "aria-label": "Outcome", onchange: () => this.change() }, h("option", { value: "" }, "any outcome"), outcomes.map((name) => h("option", { value: name }, words(name))));
    this.outcome.value = route.query.outcome || "";
    this.correct = h("select", { "aria-label": "Verdict", onchange: () => this.change() }, ["", "right", "wrong", "no score"].map((name) => h("option", { value: name }, name || "any verdict")));
    this.correct.value = route.query.verdict || "";
    this.element = h("div", { class: "filters", role: "search" }, this.text, h("label", { class: "check" }, this.regex, "regex"), this.outcome, this.correct, Object.keys(RANGES).map((name) => this.range(name)),
      h("button", { type: "button", onclick: () => this.clear() }, "clear"), this.problem);
  }

  range(name) {
    const field = (end) => {
      const input = h("input", { type: "number", step: "any", "aria-label": `${name}, ${end === "from" ? "at least" : "at most"}`, placeholder: end === "from" ? "min" : "max", value: this.route.query[`${name}_${end}`], oninput: later(() => this.change(), 80) });
      this.fields[`${name}_${end}`] = input;
      return input;
    };
    return h("span", { class: "range" }, `${name} `, field("from"), "–", field("to"));
  }

  get query() {
    const ranges = Object.fromEntries(Object.entries(this.fields).map(([name, input]) => [name, input.value]));
    return { q: this.text.value, regex: this.regex.checked ? "1" : "", outcome: this.outcome.value, verdict: this.correct.value, ...ranges };
  }

  get isEmpty() {
    return Object.values(this.query).every((value) => value === "");
  }

  change() {
    this.onchange(this.query);
  }

  setRange(name, range) {
    this.fields[`${name}_from`].value = range ? range[0] : "";
    this.fields[`${name}_to`].value = range ? range[1] : "";
    this.change();
  }

  rewardRange() {
    const [from, to] = ["reward_from", "reward_to"].map((name) => this.fields[name].value);
    return from === "" && to === "" ? null : [from === "" ? -Infinity : +from, to === "" ? Infinity : +to];
  }

  setOutcome(name) {
    this.outcome.value = this.outcome.value === name ? "" : name;
    this.change();
  }

  clear() {
    for (const input of [this.text, this.outcome, this.correct, ...Object.values(this.fields)]) input.value = "";
    this.regex.checked = false;
    this.search();
  }

  /** Ask the server which answers have the text; the last request wins. */
  async search() {
    const q = this.text.value, regex = this.regex.checked ? "1" : "0";
    this.problem.textContent = "";
    this.asked = `${regex}${q}`;
    if (!q || isFile) this.found = null;
    else {
      const answer = await get(`${stepPath(this.route.run, this.route.step)}/search`, { q, regex }).catch((error) => ({ error: error.message }));
      if (this.asked !== `${regex}${q}`) return;
      this.problem.textContent = answer.error || "";
      this.found = answer.rows ? new Set(answer.rows) : new Set();
    }
    this.change();
  }

  /** Indices of the completions that pass. */
  passing() {
    const { rows } = this, { query } = this, bound = (name) => (query[name] === "" ? null : +query[name]);
    const tests = [];
    if (this.found) tests.push((i) => this.found.has(i));
    if (query.outcome) tests.push((i) => rows.outcome[i] === query.outcome);
    if (query.verdict) tests.push((i) => verdictOf(rows, i) === query.verdict);
    for (const [name, [least, most]] of Object.entries(RANGES)) {
      const from = bound(`${name}_from`), to = bound(`${name}_to`), high = rows[most || least], low = rows[least];
      const near = (a) => 1e-6 * Math.max(1, Math.abs(a)); // a bar's end is written with fewer digits
      if (from !== null && high) tests.push((i) => isNumber(high[i]) && high[i] >= from - near(from));
      if (to !== null && low) tests.push((i) => isNumber(low[i]) && low[i] <= to + near(to));
    }
    const passing = [];
    for (let i = 0; i < rows.uid.length; i++) if (tests.every((test) => test(i))) passing.push(i);
    return passing;
  }
}

export function verdictOf(rows, i) {
  if (rows.valid && rows.valid[i] === false) return "no score";
  const correct = rows.correct ? rows.correct[i] : null;
  return correct === true ? "right" : correct === false ? "wrong" : "";
}
