// Elements. Foreign text enters the page only as text nodes: children are never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** `h("p", {class: "note"}, "text", child)`; an attribute `onclick` is a listener. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Announce a text to screen readers, keeping the focus. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** Debounce: `call` after `wait` ms without another request. */
export function later(call, wait) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), wait);
  };
}

/** The colours of the stylesheet as a canvas needs them, in the current theme. */
export function inkOf(name) {
  const probe = h("i", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** A list of terms: pairs of a name and its value; those without a value are left out. */
/** A number, and beside it healthy, watch or broken where it has an ideal range. */
export function withVerdict(text, verdict) {
  return verdict ? [text, " ", h("span", { class: `verdict ${verdict}` }, verdict)] : [text];
}

export function terms(pairs, className = "terms") {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: className }, shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
