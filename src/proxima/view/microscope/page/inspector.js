// One token: its probability under each policy, the surrogate's decision, and the reason.

import { h, later, say } from "./dom.js";
import { get } from "./api.js";
import { count, figure, isNumber, percent, quoted, signed } from "./format.js";
import { titleOf } from "./tint.js";

const POLICIES = [ // its name in the answer, its column, its title, what it is, whether it is shown when it is absent
  ["current", "log_prob", "π current", "the trainer's first forward", true],
  ["behavior", "behavior_log_prob", "μ behavior", "wrote the token", true],
  ["proximal", "proximal_log_prob", "proximal", "the ratio's denominator", true],
  ["reference", "reference_log_prob", "reference", "of the KL penalty", true],
  ["sampled", "sampled_log_prob", "engine", "under the distribution really sampled", false],
  ["next", "next_log_prob", "next", "the version after the sampling one", false],
];
const SIGNED = new Set(["advantage", "log_ratio", "loss_weight", "gradient_weight"]);
const MEASURES = ["ratio", "log_ratio", "mismatch", "divergence", "entropy", "advantage", "loss_weight"];
const WAIT = 60; // ms: a held arrow key requests only the last token

function bar(logProb) {
  const share = isNumber(logProb) ? Math.exp(logProb) : 0;
  const fill = h("i", {});
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("span", { class: "share", "aria-hidden": "true" }, fill);
}

export class Inspector {
  constructor({ path, data, columns, onmove }) {
    Object.assign(this, { path, data, columns });
    this.body = h("div", { class: "facts" });
    this.element = h("section", { class: "inspector", "aria-label": "The token" }, this.body,
      h("p", { class: "moves" }, h("button", { type: "button", onclick: () => onmove(-1) }, "← previous"), h("button", { type: "button", onclick: () => onmove(1) }, "next →")));
    this.element.hidden = !data.tokens.text.length;
    this.ask = later((index) => this.fetch(index), WAIT);
    this.index = -1;
  }

  show(index) {
    if (index < 0 || index >= this.data.tokens.text.length) {
      this.body.replaceChildren(h("p", { class: "muted" }, "Choose a token: click it, or use the arrow keys."));
      return;
    }
    this.index = index;
    this.draw(index, null);
    this.ask(index);
  }

  async fetch(index) {
    const told = await get(`${this.path}/token/${index}`).catch((error) => ({ problem: error.message }));
    if (index !== this.index) return;
    this.draw(index, told);
    say(`${quoted(this.data.tokens.text[index])}. ${told.reason || this.stored(index) || ""}`);
  }

  stored(index) {
    return this.data.reasons ? this.data.reasons[index] : null;
  }

  number(told, name) {
    for (const answer of told ? [told.band || {}, told] : []) if (name in answer) return answer[name];
    return this.columns.at(name, this.index);
  }

  draw(at, told) {
    const { tokens } = this.data, kept = told && isKnown(told.kept) ? told.kept : this.columns.at("keep", at);
    const version = told && isKnown(told.version) ? told.version : this.columns.at("policy_version", at);
    const reason = (told && told.reason) || this.stored(at) || this.data.problem;
    const given = this.columns.column("sampled") && !this.columns.column("sampled")[at];
    const state = given ? "given" : kept === null || kept === undefined ? "unknown" : kept ? "kept" : "masked";
    const name = { given: "not sampled: no loss here", unknown: "kept or masked: not stored", kept: "kept", masked: "masked" }[state];
    this.body.replaceChildren(
      h("h2", { class: "token-name" }, quoted(tokens.text[at])),
      h("p", { class: "muted" }, `token ${count(at + 1)} of ${count(tokens.text.length)} · id ${tokens.ids[at]}${isKnown(version) ? ` · version ${version}` : ""}`),
      h("p", { class: `reason ${state}` }, h("span", { "aria-hidden": "true" }, { kept: "✓ ", masked: "✕ " }[state] || "· "), reason || name),
      this.policies(at, told), this.measures(told), ...this.bandFigures(told), ...this.alternatives(at, told));
  }

  policies(at, told) {
    const answered = (told && told.log_probs) || {}, missing = (told && told.missing) || {};
    const rows = POLICIES.flatMap(([name, column, title, doc, always]) => {
      const value = name in answered ? answered[name] : this.columns.at(column, at);
      if (!isNumber(value) && !always) return [];
      if (!isNumber(value)) return [h("tr", {}, h("th", { scope: "row" }, title), h("td", { class: "missing muted", colspan: 3 }, missing[name] || "not stored"))];
      return [h("tr", { title: doc }, h("th", { scope: "row" }, title), h("td", {}, figure(value, 5)), h("td", {}, percent(Math.exp(value))), h("td", { class: "bar" }, bar(value)))];
    });
    const head = h("tr", {}, h("th", { scope: "col" }, "policy"), h("th", { scope: "col" }, "log-prob"), h("th", { scope: "col" }, "prob."), h("td", { class: "bar" }));
    return h("table", { class: "policies" }, h("thead", {}, head), h("tbody", {}, rows));
  }

  measures(told) {
    const shown = MEASURES.map((name) => {
      const value = this.number(told, name === "loss_weight" && told && "gradient_weight" in told ? "gradient_weight" : name);
      return [name === "loss_weight" ? "gradient weight" : titleOf(name), isKnown(value) ? (SIGNED.has(name) ? signed(value, 5) : figure(value, 5)) : null, this.columns.doc(name)];
    });
    const rows = shown.filter(([, value]) => value !== null).map(([name, value, doc]) => h("tr", { title: doc }, h("th", { scope: "row" }, name), h("td", {}, value)));
    const unknown = told && told.missing && told.missing.mismatch;
    if (unknown) rows.push(h("tr", {}, h("th", { scope: "row" }, titleOf("mismatch")), h("td", { class: "missing muted" }, unknown)));
    return h("table", {}, h("tbody", {}, rows));
  }

  bandFigures(told) {
    const names = this.data.band ? this.data.band.names : [];
    const rows = names.filter((name) => !MEASURES.includes(name)).map((name) => h("tr", { title: this.columns.doc(name) }, h("th", { scope: "row" }, titleOf(name)), h("td", {}, figure(this.number(told, name), 5))));
    return rows.length ? [h("h3", {}, this.data.band.title), h("table", {}, h("tbody", {}, rows))] : [];
  }

  alternatives(at, told) {
    if (!told) return [];
    if (told.problem) return [h("p", { class: "muted" }, told.problem)];
    if (!told.top_k) return [h("p", { class: "muted" }, "Alternatives were not stored.")];
    const rows = told.top_k.map(({ id, text, log_prob: logProb }) => {
      const chosen = id === this.data.tokens.ids[at];
      return h("tr", { class: chosen ? "chosen" : null }, h("th", { scope: "row" }, quoted(text || ""), chosen ? " ← written" : null), h("td", {}, figure(logProb, 4)), h("td", {}, percent(Math.exp(logProb))), h("td", { class: "bar" }, bar(logProb)));
    });
    return [h("h3", {}, `The ${told.top_k.length} most probable`), h("table", { class: "policies" }, h("tbody", {}, rows))];
  }
}

function isKnown(value) {
  return value !== null && value !== undefined;
}
