// What a run has learnt, at a glance: the held-out figure and the training reward (or the loss) over its steps.

import { h } from "./dom.js";
import { figure, isNumber, words } from "./format.js";
import { lineChart } from "./chart.js";

const TRAINED = ["reward/mean", "loss"]; // the first that the run has recorded

function curve(title, steps, values, dots) {
  const known = values.filter(isNumber);
  if (!known.length) return null;
  const text = known.length > 1 ? `${figure(known[0], 3)} → ${figure(known.at(-1), 3)}` : figure(known[0], 3);
  const { svg } = lineChart({ series: [{ steps, values, className: "first-run" }], dots, steps, label: `${title} by step, ${text}` });
  return h("figure", {}, h("figcaption", {}, h("b", {}, title), h("output", {}, text)), svg);
}

export function learningCurves({ steps, metrics, evals = [], headline }) {
  const judged = evals.filter((row) => isNumber(row.metrics[headline]));
  const measured = judged.map((row) => [row.step, row.metrics[headline]]);
  const trained = TRAINED.find((name) => (metrics[name] || []).some(isNumber));
  const curves = [curve(`held-out ${words(headline || "")}`, measured.map(([step]) => step), measured.map(([, value]) => value), measured), trained ? curve(trained, steps, metrics[trained], []) : null];
  return h("div", { class: "learning" }, curves);
}
