// A run over its steps: any metric as a curve, held-out results as diamonds; a click goes to the step.

import { h, say, withVerdict } from "./dom.js";
import { get, getOrNull, isFile } from "./api.js";
import { count, extent, figure, isNumber, plain, words } from "./format.js";
import { go, linkTo, remember, stepPath } from "./router.js";
import { lineChart, timelineChart } from "./chart.js";
import { learningCurves } from "./learning.js";
import { noteField, noteList } from "./notes.js";

class Trend {
  constructor(route, trend, runs) {
    Object.assign(this, { route, trend, runs });
    this.other = null;
    this.charts = this.reads = [];
    this.at = null;
    this.find = h("input", { type: "search", placeholder: "metrics by name", "aria-label": "Metrics by name", "aria-keyshortcuts": "/", value: route.query.q || "", oninput: () => this.choose() });
    this.said = h("span", { class: "muted", role: "status" });
    this.place = h("div", {});
    this.evals = h("section", {});
    this.learning = h("section", {});
    this.facts = h("section", { class: "specs" });
    this.extra = h("section", {});
    this.where = h("p", { class: "where" });
    this.element = h("div", { class: "page" }, this.where, this.learning, this.stepBar(), h("div", { class: "bar" }, this.find, this.beside(), this.said), this.place, this.evals, this.facts, this.extra, noteField(route.run, "run"));
    this.fill();
    this.choose();
    this.further();
  }

  head() {
    const run = this.runs.find((one) => String(one.run) === this.route.run) || {};
    const { headline } = this.trend;
    const judged = (this.trend.evals || []).map((row) => row.metrics[headline]).filter(isNumber);
    const telling = judged.length ? `held-out ${words(headline)} ${[...new Set([judged[0], judged[judged.length - 1]])].map((value) => figure(value)).join(" → ")}` : "";
    this.where.replaceChildren(h("b", {}, run.algorithm || "run"), run.model ? ` on ${run.model}` : "", ` · ${run.state || `${count(this.trend.steps.length)} steps`}`, telling ? ` · ${telling}` : "", ...[run.error, run.problem].filter(Boolean).map((text) => h("span", { class: "bad" }, ` · ✕ ${text}`)));
  }

  /** A slider over the steps that have completions, and a link to the chosen one. */
  stepBar() {
    this.slider = h("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => this.moveTo(+this.slider.value) });
    this.button = h("button", { type: "button", class: "main", onclick: () => this.open() });
    return h("div", { class: "bar steps" }, this.slider, this.button);
  }

  fill() {
    const steps = this.trend.rollout_steps;
    this.head();
    this.slider.max = Math.max(0, steps.length - 1);
    this.slider.disabled = !steps.length;
    this.button.disabled = !steps.length;
    const last = steps.indexOf(+this.route.query.step);
    this.moveTo(last >= 0 ? last : steps.length - 1);
    this.drawEvals();
    this.learning.replaceChildren(learningCurves(this.trend));
    const specs = Object.entries(this.trend.specs || {}).filter(([, value]) => value !== null && plain(value) !== "");
    this.facts.replaceChildren(...(specs.length ? [h("h2", {}, "The method"), h("dl", { class: "terms" }, specs.map(([name, value]) => h("div", {}, h("dt", {}, words(name)), h("dd", {}, plain(value)))))] : []));
  }

  drawEvals() {
    const rows = this.trend.evals || [], names = [...new Set([this.trend.headline, ...rows.flatMap((row) => Object.keys(row.metrics))])].filter((name) => !/^(step|time)/.test(name) && rows.some((row) => name in row.metrics)).slice(0, 8);
    if (!rows.length) return;
    const answers = isFile ? null : h("p", {}, h("a", { href: linkTo(`${this.route.run}/held-out`) }, "Which questions got worse, and which are still wrong?"));
    this.evals.replaceChildren(h("h2", {}, "Held-out results"), answers || "", h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Held-out results" }, h("table", {},
      h("thead", {}, h("tr", {}, ["step", "", ...names].map((name) => h("th", { scope: "col" }, words(name))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, row.step), h("td", {}, row.label || ""), names.map((name) => h("td", { class: "n" }, figure(row.metrics[name])))))))));
  }

  beside() {
    const others = this.runs.filter((run) => String(run.run) !== this.route.run && !run.problem);
    if (!others.length) return null;
    const select = h("select", { "aria-label": "A second run in each chart", onchange: () => this.withRun(select.value) }, h("option", { value: "" }, "no second run"), others.map((run) => h("option", { value: run.run }, `with ${run.name}`)));
    if (this.route.query.with) {
      select.value = this.route.query.with;
      this.withRun(select.value);
    }
    return select;
  }

  async withRun(run) {
    remember({ with: run });
    this.other = run === "" ? null : await getOrNull(`${run}/trend`);
    this.choose();
  }

  /** Draw the charts whose metrics match the field, group by group; the server's order has the vital ones first. */
  choose() {
    const wanted = this.find.value.trim().toLowerCase().split(/\s+/);
    remember({ q: this.find.value.trim() });
    const { about, metrics, verdicts } = this.trend, groups = new Map();
    const names = Object.keys(about).filter((name) => wanted.every((word) => name.toLowerCase().includes(word)) && extent(metrics[name]));
    this.undrawn?.disconnect();
    [this.charts, this.reads, this.cards] = [[], [], []];
    const watch = new IntersectionObserver((seen) => seen.forEach((one) => { if (one.isIntersecting) this.chart(one.target); }), { rootMargin: "300px" });
    this.undrawn = watch;
    for (const name of names) {
      const [title, meaning] = about[name], read = h("output", {});
      const card = h("figure", { "data-name": name }, h("figcaption", {}, h("b", {}, name), read, h("p", { class: "muted" }, meaning)));
      this.reads.push({ read, values: metrics[name], verdicts: verdicts[name] });
      if (!groups.has(title)) groups.set(title, h("div", { class: "charts" }));
      groups.get(title).append(card);
      this.cards.push(card);
      watch.observe(card);
    }
    this.place.replaceChildren(...[...groups].map(([title, cards]) => h("section", {}, h("h2", {}, title), cards)));
    if (isFile) this.print(); // a file may be printed, or photographed, by what never scrolls
    this.mark();
    this.said.textContent = `${count(names.length)} of ${count(Object.keys(about).length)} metrics`;
  }

  /** Draw what nobody has scrolled to. */
  print() {
    for (const card of this.cards) this.chart(card);
  }

  chart(card) {
    this.undrawn.unobserve(card);
    if (card.querySelector("svg")) return;
    const { name } = card.dataset, { steps, metrics } = this.trend, values = metrics[name];
    const series = [{ steps, values, className: "first-run" }];
    if (this.other?.metrics[name]) series.unshift({ steps: this.other.steps, values: this.other.metrics[name], className: "second-run" });
    const dots = (this.trend.evals || []).flatMap((row) => (isNumber(row.metrics[name]) ? [[row.step, row.metrics[name]]] : []));
    const every = [...steps, ...(this.other?.steps ?? []), ...dots.map(([step]) => step)];
    const range = extent(values), last = values.filter(isNumber).at(-1);
    const chart = lineChart({ series, dots, steps: every, label: `${name} by step, ${figure(range[0])} to ${figure(range[1])}, last ${figure(last)}` });
    card.append(chart.svg);
    const nearest = (event) => this.nearest(chart.stepAt(event));
    chart.svg.addEventListener("pointermove", (event) => this.moveTo(nearest(event)));
    chart.svg.addEventListener("click", () => this.open());
    this.charts.push(chart);
    chart.at(this.step ?? null);
  }

  nearest(step) {
    const { rollout_steps: steps } = this.trend;
    return steps.reduce((best, one, i) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? i : best), 0);
  }

  get step() {
    return this.trend.rollout_steps[this.at];
  }

  moveTo(index) {
    const { rollout_steps: steps } = this.trend;
    this.at = Math.min(Math.max(index, 0), steps.length - 1);
    this.slider.value = this.at;
    this.slider.setAttribute("aria-valuetext", `step ${this.step}`);
    this.button.textContent = steps.length ? `open step ${this.step}` : "no step has completions";
    this.mark();
  }

  mark() {
    const row = this.trend.steps.indexOf(this.step);
    for (const chart of this.charts) chart.at(this.step ?? null);
    for (const { read, values, verdicts } of this.reads) read.replaceChildren(...withVerdict(figure(row >= 0 ? values[row] : null), verdicts?.[row]));
  }

  open() {
    if (this.step === undefined) return;
    remember({ step: this.step });
    go(stepPath(this.route.run, this.step));
  }

  async further() {
    const timeline = await getOrNull(`${this.route.run}/timeline`);
    const notes = await noteList(this.route.run);
    const chart = timeline && timeline.length ? [h("h2", {}, "Timeline"), h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Timeline" }, timelineChart(timeline))] : [];
    this.extra.replaceChildren(...chart, ...(notes ? [notes] : []));
  }

  /** New steps of a running training. */
  async refresh() {
    const path = `${this.route.run}/trend`, { steps } = this.trend;
    let trend = await getOrNull(path, { after: steps[steps.length - 1] ?? 0 });
    if (trend && trend.before !== steps.length) trend = await getOrNull(path);
    else if (trend) joinTo(trend, this.trend);
    if (!trend) return;
    const atEnd = this.at === this.trend.rollout_steps.length - 1, step = this.step;
    this.trend = trend;
    this.route.query.step = atEnd ? null : step;
    this.fill();
    this.choose();
    say(`step ${trend.steps[trend.steps.length - 1]}`);
  }
}

function joinTo(now, { steps, metrics, verdicts, about }) {
  const of = (from, name, list) => from[name] || list.map(() => null);
  for (const [before, after] of [[metrics, now.metrics], [verdicts, now.verdicts]])
    for (const name in { ...before, ...after }) after[name] = [...of(before, name, steps), ...of(after, name, now.steps)];
  now.steps = [...steps, ...now.steps];
  now.about = { ...about, ...now.about };
}

export async function trendView(route) {
  const [trend, runs] = await Promise.all([get(`${route.run}/trend`), get("runs")]);
  const view = new Trend(route, trend, runs);
  const keys = [
    { key: "ArrowLeft p", text: "step before", run: () => view.moveTo(view.at - 1) },
    { key: "ArrowRight n", text: "step after", run: () => view.moveTo(view.at + 1) },
    { key: "Enter", text: "open the step", run: () => view.open() },
    ...(isFile ? [] : [{ key: "w", text: "which questions got worse, which are still wrong", run: () => go(`${route.run}/held-out`) }]),
  ];
  return { element: view.element, keys, focus: view.slider, search: view.find, print: () => view.print(), leave: () => view.undrawn.disconnect(), refresh: isFile ? null : () => view.refresh() };
}
