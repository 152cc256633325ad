// Held-out questions with their answers before and after training, side by side: what got worse, then what is still
// wrong, what got better, what is still right.

import { h } from "./dom.js";
import { get } from "./api.js";
import { count, plain } from "./format.js";
import { remember } from "./router.js";

const SHOWN = 200; // cards in the document at once
const KINDS = { worse: "got worse", wrong: "still wrong", better: "got better", right: "still right", same: "stayed the same", unknown: "have no score on a side" };
const MARKED = ["worse", "wrong", "better"]; // by the colour of their edge

function side(label, answers) {
  return h("section", {}, h("h3", {}, label), answers.map(({ mark, text }) => h("div", { class: `answer ${mark}` }, h("p", { class: { right: "good", wrong: "bad" }[mark] || "muted" }, { right: "✓ right", wrong: "✕ wrong" }[mark] || mark), h("p", { class: "text" }, text))));
}

function expected(answer) {
  return answer === null || answer === "" ? "" : `expected ${typeof answer === "string" ? answer : plain(answer)}`;
}

/** The words for a kind: what has been evaluated once is not "still" wrong. */
function wordsFor(kind, labels) {
  return labels.length < 2 ? KINDS[kind].replace("still ", "") : KINDS[kind];
}

function card(row, labels) {
  return h("article", { class: MARKED.includes(row.kind) ? row.kind : null }, h("h2", {}, plain(row.question)),
    h("p", { class: "muted" }, [row.name, row.set, expected(row.answer), wordsFor(row.kind, labels)].filter(Boolean).join(" · ")),
    h("div", { class: "sides" }, labels.map((label, i) => side(label, row.sides[i]))));
}

export async function heldOutView(route) {
  const { labels, rows, metric } = await get(`${route.run}/held-out`);
  const counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, rows.filter((row) => row.kind === kind).length]));
  const list = h("div", { class: "held-out" }), said = h("p", { class: "muted", role: "status" });
  const select = h("select", { "aria-label": "Which questions", onchange: () => show() }, h("option", { value: "" }, `all ${count(rows.length)} questions`), Object.keys(KINDS).filter((kind) => counts[kind]).map((kind) => h("option", { value: kind }, `${count(counts[kind])} ${wordsFor(kind, labels)}`)));
  const find = h("input", { type: "search", placeholder: "text of question or answers", "aria-label": "Text of question or answers", "aria-keyshortcuts": "/", oninput: () => show() });
  const textOf = (row) => [row.question, ...row.sides.flat().map(({ text }) => text)].join("\n").toLowerCase();
  function show() {
    const words = find.value.trim().toLowerCase();
    const passing = rows.filter((row) => (!select.value || row.kind === select.value) && (!words || textOf(row).includes(words)));
    list.replaceChildren(...passing.slice(0, SHOWN).map((row) => card(row, labels)));
    said.textContent = passing.length > SHOWN ? `the first ${count(SHOWN)} of ${count(passing.length)}` : `${count(passing.length)} of ${count(rows.length)}`;
    remember({ show: select.value });
  }
  select.value = Object.keys(KINDS).includes(route.query.show) ? route.query.show : "";
  show();
  const told = Object.keys(KINDS).filter((kind) => counts[kind]).map((kind) => `${count(counts[kind])} ${wordsFor(kind, labels)}`).join(", ");
  const summary = `${labels.length < 2 ? "There is one evaluation so far. " : ""}By ${metric}: ${told}.`;
  return { element: h("div", { class: "page" }, h("h1", {}, "Held-out questions"), h("p", {}, summary), h("div", { class: "bar" }, select, find, said), list), focus: select, search: find };
}
