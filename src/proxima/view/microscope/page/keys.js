// The keyboard: global keys, and those of the current view; `?` lists both.

import { h } from "./dom.js";

let everywhere = [], ofView = [];

/** Keys are `{key, text, run}`; several keys of one action are written `n ArrowDown`. */
export function setKeys(keys) {
  ofView = keys;
}

/** The key writes, or chooses in a list by its letter; a slider and a checkbox take no letters. */
function isTyping({ key, target }) {
  if (target.tagName === "SELECT") return key !== "?";
  return target.isContentEditable || target.tagName === "TEXTAREA" || (target.tagName === "INPUT" && !["checkbox", "range"].includes(target.type));
}

const NAMES = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc", " ": "space" };

function table(title, keys) {
  const rows = keys.map(({ key, text }) =>
    h("tr", {}, h("th", { scope: "row" }, key.split(" ").map((one) => h("kbd", {}, NAMES[one] || one))), h("td", {}, text)));
  return [h("h3", {}, title), h("table", {}, h("tbody", {}, rows))];
}

const MOVES = [
  { key: "ArrowUp ArrowDown", text: "move in a list" },
  { key: "Enter", text: "open what is marked" },
  { key: "Tab", text: "from part to part" },
];

export function showKeys() {
  const dialog = h("dialog", { class: "keys", "aria-labelledby": "keys-title" });
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "close");
  dialog.append(h("h2", { id: "keys-title" }, "Keys"), ...(ofView.length ? table("Here", ofView) : []), ...table("Everywhere", [...MOVES, ...everywhere]), close);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function listen(keys) {
  everywhere = keys;
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (isTyping(event)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const pressed = [...ofView, ...everywhere].find(({ key, run }) => run && key.split(" ").includes(event.key));
    if (!pressed) return;
    event.preventDefault();
    pressed.run(event);
  });
}
