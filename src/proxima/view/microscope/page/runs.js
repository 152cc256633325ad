// The runs that the command named.

import { h } from "./dom.js";
import { get } from "./api.js";
import { count } from "./format.js";
import { linkTo } from "./router.js";

export async function runsView() {
  const runs = await get("runs");
  const cards = runs.map((run) => h("li", {},
    h("a", { href: linkTo(String(run.run)) }, h("b", {}, run.name), h("span", { class: "muted" }, run.folder)),
    h("p", {}, [run.algorithm, run.model, `${count(run.steps)} steps`, run.finished ? "finished" : "not finished"].filter(Boolean).join(" · ")),
    run.problem ? h("p", { class: "bad" }, `✕ ${run.problem}`) : null));
  const list = h("ul", { class: "runs" }, cards);
  return { element: h("div", { class: "page" }, h("h1", {}, "Runs"), list), focus: list.querySelector("a") };
}
