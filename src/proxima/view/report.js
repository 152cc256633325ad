// The curves of report.html: the viewer's, of the run in the file. Opening a step shows its samples.

import { parsed } from "./router.js";
import { get } from "./api.js";
import { learningCurves } from "./learning.js";
import { trendView } from "./trend.js";

const view = await trendView({ run: "0", query: {} }), samples = [...document.querySelectorAll("[data-step]")];
document.getElementById("learning").replaceChildren(learningCurves(await get("0/trend")));
view.element.querySelector(".learning")?.remove();
document.getElementById("curves").replaceChildren(view.element);
view.element.querySelector("button.main").hidden = !samples.length;
addEventListener("hashchange", () => {
  const route = parsed(location.hash), away = (one) => Math.abs(one.dataset.step - route.step);
  if (!route || route.step === undefined || !samples.length) return;
  const nearest = samples.reduce((best, one) => (away(one) < away(best) ? one : best));
  nearest.open = true;
  nearest.scrollIntoView();
});
