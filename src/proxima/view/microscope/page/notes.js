// Notes on the current view, saved next to the run's folder.

import { h, say } from "./dom.js";
import { get, isFile, post } from "./api.js";
import { linkTo } from "./router.js";

const known = new Map(); // run → a promise of its notes, cached until one is saved or listed

function notesOf(run) {
  if (!known.has(run)) known.set(run, get(`${run}/notes`).catch(() => ({})));
  return known.get(run);
}

/** A field for the note on `name`, closed if there is no note. */
export function noteField(run, name) {
  if (isFile) return null;
  const text = h("textarea", { rows: 3, "aria-label": "Note", placeholder: "A note, saved beside the run's folder" });
  const state = h("span", { class: "muted" }), summary = h("summary", {}, "note");
  const field = h("details", { class: "note" }, summary, text, h("p", {}, h("button", { type: "button", onclick: save }, "save the note"), " ", state));
  let saved = "";
  async function save() {
    try {
      known.set(run, post(`${run}/notes`, { key: name, text: text.value }));
      await known.get(run);
      saved = text.value;
      state.textContent = "saved";
      say("note saved");
    } catch (error) {
      known.delete(run);
      state.textContent = error.message;
    }
    summary.textContent = saved ? "note ●" : "note";
  }
  text.addEventListener("input", () => { state.textContent = text.value === saved ? "" : "not saved"; });
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(); });
  field.file = async (other) => {
    if (name !== other) text.value = saved = "";
    name = other;
    const notes = await notesOf(run);
    if (name !== other || text.value !== saved) return; // typed before the notes arrived
    text.value = saved = notes[name] || "";
    state.textContent = "";
    summary.textContent = saved ? "note ●" : "note";
    field.open = field.open || Boolean(saved);
  };
  field.file(name);
  return field;
}

/** All notes of a run, each a link to its subject. */
export async function noteList(run) {
  if (isFile) return null;
  known.delete(run);
  const notes = Object.entries(await notesOf(run)).filter(([, text]) => text);
  if (!notes.length) return null;
  const link = (key) => (key === "run" ? linkTo(run) : linkTo(`${run}/${key}`));
  return h("section", { class: "notes" }, h("h2", {}, "Notes"), h("ul", {}, notes.map(([key, text]) => h("li", {}, h("a", { href: link(key) }, key.replace(/\?t=(\d+)$/, (_, at) => `, token ${+at + 1}`)), h("p", {}, text)))));
}
