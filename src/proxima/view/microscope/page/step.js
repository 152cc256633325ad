// A step: its rewards as a histogram that filters, its groups by spread, what was dropped and why, its completions.

import { h, say, terms, withVerdict } from "./dom.js";
import { get } from "./api.js";
import { count, figure, isNumber, percent, plain, signed, words } from "./format.js";
import { completionId, go, remember, stepPath } from "./router.js";
import { Filters, verdictOf } from "./filters.js";
import { Histogram } from "./histogram.js";
import { List } from "./list.js";
import { noteField } from "./notes.js";

const REASONS = {
  trained: "trained",
  skipped_zero_advantage: "advantage 0: no gradient, no forward",
  critic_only: "the critic alone was trained",
  invalid: "a reward failed: no score",
};

/** The outcomes in words. */
export function outcomeWords(name) {
  return REASONS[name] || (name.startsWith("dropped_") ? `dropped: ${words(name.slice(8))}` : words(name));
}

const SHORT = { skipped_zero_advantage: "advantage 0", critic_only: "critic alone", invalid: "no score" };
const MARKS = { right: "✓ right", wrong: "✕ wrong", "no score": "! no score" };

class Step {
  constructor(route, step, steps) {
    Object.assign(this, { route, step, steps });
    this.rows = step.completions;
    this.path = stepPath(route.run, route.step);
    this.counts = countsOf(this.rows.outcome);
    this.filters = new Filters({ route, rows: this.rows, outcomes: Object.keys(this.counts), onchange: (query) => this.filter(query) });
    this.histogram = new Histogram(this.rows.reward, (range) => this.filters.setRange("reward", range));
    this.fates = h("ul", { class: "fates" });
    this.groupList = this.makeGroups();
    this.completionList = this.makeCompletions();
    this.groupCount = h("span", { class: "muted" });
    this.completionCount = h("span", { class: "muted", role: "status" });
    this.element = h("div", { class: "frame step" }, this.strip(),
      h("div", { class: "over" }, h("section", {}, h("h2", {}, "Rewards"), this.histogram.element), h("section", {}, h("h2", {}, "What became of them"), this.fates, noteField(route.run, `step/${route.step}`))),
      this.filters.element,
      h("div", { class: "lists" }, h("section", {}, h("h2", {}, "Groups ", this.groupCount), this.groupList.element), h("section", {}, h("h2", {}, "Completions ", this.completionCount), this.completionList.element)));
    this.filter(this.filters.query);
    if (route.query.q) this.filters.search();
  }

  strip() {
    const versions = [Math.min(...this.rows.version_min.filter(isNumber)), Math.max(...this.rows.version_max.filter(isNumber))];
    const own = Number.isFinite(versions[0]) ? [["versions", versions[0] === versions[1] ? versions[0] : `${versions[0]} to ${versions[1]}`]] : [];
    return terms([["completions", count(this.rows.uid.length)], ["groups", count(this.step.groups.length)], ...Object.entries(this.step.metrics).map(([name, value]) => [name, withVerdict(figure(value), this.step.verdicts?.[name])]), ...own], "strip");
  }

  makeGroups() {
    const number = (title, value, doc, room) => ({ title, text: (group) => figure(value(group), 3), sort: value, className: "n", width: title === "spread" ? "5.4em" : "4.6em", doc, room });
    const longest = this.step.groups.reduce((most, group) => Math.max(most, plain(group.answer).length), 6);
    return new List({
      label: "Groups: completions of one prompt",
      sorted: ["spread", true],
      onopen: (group) => this.openGroup(group),
      empty: "no group passes the filters",
      columns: [
        { title: "question", text: (group) => group.question, width: "minmax(8em, 1fr)" },
        { title: "answer", text: (group) => plain(group.answer), width: `${Math.min(longest, 16)}ch`, room: "wide" },
        { title: "range", text: (group) => this.range(group), width: "60px", room: "wide" },
        number("mean", (group) => group.mean),
        number("spread", (group) => group.std, "standard deviation of the rewards"),
        number("length", (group) => group.length_mean, "mean, in tokens", "wide"),
        { title: "trained", text: (group) => `${group.outcomes.trained || 0}/${group.size}`, sort: (group) => group.outcomes.trained || 0, className: "n", width: "4.2em", doc: "completions that were trained, of how many" },
      ],
    });
  }

  /** The rewards of a group as ticks on a line from the step's lowest to its highest. */
  range(group) {
    const line = h("span", { class: "ticks", "aria-hidden": "true" }), [low, high] = this.ends;
    for (const reward of new Set(group.rewards)) {
      if (!isNumber(reward)) continue;
      const tick = h("i", {});
      tick.style.left = `${high > low ? ((reward - low) / (high - low)) * 100 : 50}%`;
      line.append(tick);
    }
    return line;
  }

  makeCompletions() {
    const { rows } = this;
    const number = (title, column, show, room) => ({ title, text: (i) => show(rows[column][i], 3), sort: (i) => rows[column][i], className: "n", width: column === "advantage" ? "5.8em" : "4.2em", room });
    return new List({
      label: "Completions",
      onopen: (i) => this.openCompletion(i),
      empty: "no completion passes the filters",
      columns: [
        { title: "uid.sample", text: (i) => `${rows.uid[i]}.${rows.sample[i]}${rows.turn[i] ? `.${rows.turn[i]}` : ""}`, width: "minmax(5.6em, 1fr)", sort: (i) => rows.uid[i] * 4096 + rows.sample[i] },
        number("reward", "reward", figure),
        number("advantage", "advantage", signed),
        number("length", "length", (value) => count(value)),
        ...(rows.masked.some(isNumber) ? [number("masked", "masked", (value) => (isNumber(value) ? count(value) : "–"), "middle")] : []),
        { title: "answer", text: (i) => rows.beginning[i], width: "minmax(4em, 3fr)", room: "middle" },
        { title: "verdict", text: (i) => MARKS[verdictOf(rows, i)] || "–", width: "5.6em", room: "wide" },
        { title: "outcome", text: (i) => SHORT[rows.outcome[i]] || words(rows.outcome[i]), sort: (i) => rows.outcome[i], width: "minmax(6.5em, 1.2fr)", room: "roomy" },
        { title: "version", text: (i) => (rows.version_min[i] === rows.version_max[i] ? figure(rows.version_min[i]) : `${rows.version_min[i]}–${rows.version_max[i]}`), sort: (i) => rows.version_min[i], className: "n", width: "4.2em", room: "roomy" },
        { title: "ended", text: (i) => rows.finish_reason[i] || "–", width: "4em", room: "roomy" },
      ],
    });
  }

  filter(query) {
    const passing = this.filters.passing(), members = new Map();
    this.ends = this.ends || [Math.min(...this.rows.reward.filter(isNumber)), Math.max(...this.rows.reward.filter(isNumber))];
    for (const i of passing) {
      const uid = this.rows.uid[i];
      if (!members.has(uid)) members.set(uid, []);
      members.get(uid).push(i);
    }
    this.rewardsOf = this.rewardsOf || rewardsByGroup(this.rows);
    const groups = this.step.groups.filter((group) => members.has(group.uid)).map((group) => ({ ...group, rewards: this.rewardsOf.get(group.uid) }));
    this.groupList.show(groups, (group) => group && group.uid);
    this.completionList.show(passing, (i) => i);
    this.histogram.mark(this.filters.rewardRange());
    this.histogram.draw(this.filters.isEmpty ? null : passing);
    this.drawFates(passing);
    this.groupCount.textContent = `${count(groups.length)} of ${count(this.step.groups.length)}`;
    this.completionCount.textContent = `${count(passing.length)} of ${count(this.rows.uid.length)}`;
    remember(query);
  }

  drawFates(passing) {
    const now = countsOf(passing.map((i) => this.rows.outcome[i])), all = this.rows.uid.length;
    this.fates.replaceChildren(...Object.entries(this.counts).sort((a, b) => b[1] - a[1]).map(([name, n]) => {
      const fill = h("i", { "aria-hidden": "true" }), shown = now[name] || 0;
      fill.style.width = `${(n / all) * 100}%`;
      const pressed = this.filters.outcome.value === name;
      return h("li", {}, h("button", { type: "button", class: name === "trained" ? "trained" : null, "aria-pressed": String(pressed), onclick: () => { this.filters.setOutcome(name); this.focusFate(name); }, "data-name": name },
        fill, h("span", {}, outcomeWords(name)), h("span", { class: "n" }, shown === n ? count(n) : `${count(shown)}/${count(n)}`, ` · ${percent(n / all)}`)));
    }));
  }

  focusFate(name) {
    const button = [...this.fates.querySelectorAll("button")].find((one) => one.dataset.name === name);
    if (button) button.focus();
  }

  openGroup(group) {
    remember({ at: group.uid });
    go(`${this.path}/group/${encodeURIComponent(group.uid)}`);
  }

  openCompletion(i) {
    remember({ at: "", row: i });
    go(`${this.path}/completion/${completionId(this.rows.uid[i], this.rows.sample[i], this.rows.turn[i])}`);
  }

  /** The row opened last, for the way back. */
  settle() {
    const { at, row } = this.route.query;
    if (at) this.groupList.find((group) => String(group.uid) === at);
    if (row) this.completionList.find((i) => String(i) === row);
  }

  beside(direction) {
    const index = this.steps.indexOf(+this.route.step) + direction;
    if (index < 0 || index >= this.steps.length) say(direction < 0 ? "this is the first step" : "this is the last step");
    else go(stepPath(this.route.run, this.steps[index]), { ...this.filters.query, at: "", row: "" });
  }
}

function countsOf(names) {
  const counts = {};
  for (const name of names) counts[name] = (counts[name] || 0) + 1;
  return counts;
}

function rewardsByGroup(rows) {
  const groups = new Map();
  rows.uid.forEach((uid, i) => {
    if (!groups.has(uid)) groups.set(uid, []);
    groups.get(uid).push(rows.reward[i]);
  });
  return groups;
}

export async function stepView(route) {
  const state = get(`${route.run}/state`).catch(() => ({ steps: [+route.step] }));
  const step = await get(stepPath(route.run, route.step));
  const view = new Step(route, step, []);
  state.then(({ steps }) => { view.steps = steps; });
  const keys = [
    { key: "n ArrowRight", text: "step after", run: () => view.beside(1) },
    { key: "p ArrowLeft", text: "step before", run: () => view.beside(-1) },
    { key: "g", text: "to the groups", run: () => view.groupList.element.focus() },
    { key: "c", text: "to the completions", run: () => view.completionList.element.focus() },
    { key: "h", text: "to the histogram", run: () => view.histogram.element.focus() },
    { key: "/", text: "search the answers" },
  ];
  const focus = route.query.row ? view.completionList.element : view.groupList.element;
  return { element: view.element, keys, focus, search: view.filters.text, settle: () => view.settle(), print: () => [view.groupList, view.completionList].forEach((list) => list.print()) };
}
