// From the address to a view; the path at the top, the theme, and updates of a running training.

import { h, say } from "./dom.js";
import { fileStart, get, getOrNull, isFile } from "./api.js";
import { above, go, idParts, linkTo, parsed, stepPath } from "./router.js";
import { listen, setKeys, showKeys } from "./keys.js";
import { forgetInks } from "./band.js";
import { runsView } from "./runs.js";
import { trendView } from "./trend.js";
import { stepView } from "./step.js";
import { groupView } from "./group.js";
import { completionView } from "./completion.js";
import { compareView } from "./compare.js";
import { heldOutView } from "./held_out.js";

const VIEWS = { runs: runsView, trend: trendView, step: stepView, group: groupView, completion: completionView, compare: compareView, heldOut: heldOutView };
const POLLED = 2000; // ms
const main = document.getElementById("view"), busy = document.getElementById("busy");
let shown = null, route = null, asked = 0;
main.replaceChildren(); // the text for pages without a script

function failed(error) {
  return { element: h("div", { class: "page" }, h("h1", {}, "Not here"), h("p", { class: "bad", role: "alert" }, `✕ ${error.message}`), h("p", {}, h("a", { href: "#/" }, "to the runs"))) };
}

async function render() {
  const next = parsed(location.hash), number = ++asked;
  if (!next) return go("", {});
  if (shown && route && next.path === route.path && shown.update && next.view !== "compare") {
    route = next;
    return shown.update(next.query);
  }
  const waiting = setTimeout(() => { busy.hidden = false; }, 120);
  const view = await VIEWS[next.view](next).catch(failed);
  clearTimeout(waiting);
  if (number !== asked) return view.leave?.();
  busy.hidden = true;
  shown?.leave?.();
  [shown, route] = [view, next];
  main.replaceChildren(view.element);
  setKeys(view.keys || []);
  drawCrumbs(next);
  view.settle?.();
  (view.focus || main).focus({ preventScroll: true });
  performance.mark(`shown ${next.view}`);
  return poll();
}

// ---- the path ------------------------------------------------------------

async function drawCrumbs(now) {
  const runs = await getOrNull("runs") || [], run = runs.find((one) => String(one.run) === now.run);
  if (now !== route) return;
  const { step = now.query.step } = now, crumbs = [["proxima", ""]];
  if (now.run !== undefined) crumbs.push([run ? run.name : `run ${now.run}`, now.run]);
  if (step !== undefined && now.view !== "trend") crumbs.push([`step ${step}`, stepPath(now.run, step)]);
  const id = now.completion || (now.view === "compare" && now.query.c);
  const uid = now.uid || (id && idParts(id).uid);
  if (uid) crumbs.push([`prompt ${uid}`, `${stepPath(now.run, step)}/group/${encodeURIComponent(uid)}`]);
  if (id) crumbs.push([`sample ${idParts(id).sample}${idParts(id).turn ? `.${idParts(id).turn}` : ""}`, `${stepPath(now.run, step)}/completion/${id}`]);
  if (now.view === "heldOut") crumbs.push(["held-out questions", now.path]);
  if (now.view === "compare") crumbs.push(["compare", now.path]);
  const last = crumbs.length - 1;
  document.getElementById("crumbs").replaceChildren(h("ol", {}, crumbs.map(([name, path], i) => h("li", {}, h("a", { href: linkTo(path), "aria-current": i === last ? "page" : null }, name)))));
  document.title = [...crumbs.slice(1)].reverse().map(([name]) => name).concat("proxima view").join(" · ");
}

// ---- live ------------------------------------------------------------

const live = document.getElementById("live");
let timer = 0, newest = new Map();

/** Poll for updates while the run continues; a hidden page doesn't. */
async function poll() {
  clearTimeout(timer);
  if (isFile || !route || route.run === undefined) {
    live.hidden = true;
    return;
  }
  const { run } = route, state = document.hidden ? null : await getOrNull(`${run}/state`);
  if (!route || route.run !== run) return;
  if (state) {
    live.hidden = !state.running;
    const last = state.steps[state.steps.length - 1], before = newest.get(run), now = `${state.step} ${last}`;
    live.replaceChildren("● running", last === undefined ? "" : h("a", { href: linkTo(stepPath(run, last)) }, `step ${last}`));
    newest.set(run, now);
    if (before !== undefined && now !== before) {
      say(`step ${state.step} is written`);
      await shown?.refresh?.();
    }
  }
  clearTimeout(timer);
  if (!state || state.running) timer = setTimeout(poll, POLLED);
}

// ---- theme ------------------------------------------------------------

const THEMES = ["auto", "light", "dark"], themeButton = document.getElementById("theme");

function stored(value) {
  try {
    if (value) localStorage.setItem("theme", value);
    return localStorage.getItem("theme");
  } catch {
    return value || null; // a page from a file may have no storage
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  themeButton.textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[theme];
  themeButton.setAttribute("aria-label", `Theme: ${theme}`);
  forgetInks();
  shown?.redraw?.();
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  stored(next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
addEventListener("beforeprint", () => shown?.print?.());
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

// ---- keys ------------------------------------------------------------

document.getElementById("help").addEventListener("click", showKeys);
listen([
  { key: "?", text: "these keys", run: showKeys },
  { key: "Escape Backspace", text: "one view up", run: () => { if (route && route.view !== "runs") go(above(route)); } },
  { key: "/", text: "search", run: () => { shown?.search?.focus(); } },
  { key: "n p", text: "next and previous" },
  { key: "l", text: "next theme", run: () => themeButton.click() },
]);

/** What a file, or a frame of another page, lacks, and why. */
function sayMissing() {
  const missing = isFile ? ["no server: no search, notes or further steps"] : [];
  const attempt = (action, lack) => { try { action(); } catch { missing.push(lack); } };
  attempt(() => localStorage.length, "no storage: the theme is not kept");
  attempt(() => history.replaceState(null, "", location.hash || "#"), "no history: the address stays as it is");
  if (missing.length) document.getElementById("bar").append(h("p", { id: "missing", class: "muted" }, `This ${self === top ? "file" : "frame"} has ${missing.join("; ")}.`));
}

async function start() {
  sayMissing();
  setTheme(THEMES.includes(stored()) ? stored() : "auto");
  if (!parsed(location.hash) || location.hash.length < 3) {
    const runs = fileStart ? [] : await get("runs").catch(() => []);
    const first = fileStart || (runs.length === 1 ? linkTo(String(runs[0].run)) : "#/");
    try {
      history.replaceState(null, "", first);
    } catch {
      location.hash = first; // a sandboxed frame
    }
  }
  addEventListener("hashchange", render);
  await render();
}

start();
