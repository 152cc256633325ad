// The runs that the command named.

import { h } from "./dom.js";
import { get, getOrNull } from "./api.js";
import { learningCurves } from "./learning.js";
import { linkTo } from "./router.js";

/** One run after the other: a folder may have hundreds. */
async function drawCurves(runs, cards) {
  for (const [i, run] of runs.entries()) {
    const trend = await getOrNull(`${run.run}/trend`);
    if (trend) cards[i].append(learningCurves(trend));
  }
}

export async function runsView() {
  const runs = await get("runs");
  const cards = runs.map((run) => h("li", {},
    h("a", { href: linkTo(String(run.run)) }, h("b", {}, run.name), h("span", { class: "muted" }, run.folder)),
    h("p", {}, [run.algorithm, run.model, run.state].filter(Boolean).join(" · ")),
    run.error ? h("p", { class: "bad" }, `✕ ${run.error}`) : null,
    run.problem ? h("p", { class: "bad" }, `✕ ${run.problem}`) : null));
  const list = h("ul", { class: "runs" }, cards);
  drawCurves(runs, cards);
  return { element: h("div", { class: "page" }, h("h1", {}, "Runs"), list), focus: list.querySelector("a") };
}
