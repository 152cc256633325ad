// Formats of numbers and names.

const GROUPED = new Intl.NumberFormat("en");
export const ABSENT = "–";

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function count(value) {
  return isNumber(value) ? GROUPED.format(value) : ABSENT;
}

/** Four significant digits; whole numbers in full. */
export function figure(value, digits = 4) {
  if (value === true || value === false) return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (!isNumber(value)) return value === Infinity ? "∞" : value === -Infinity ? "−∞" : ABSENT;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return GROUPED.format(value).replace("-", "−");
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 2).replace("-", "−").replace("e-", "e−");
  return String(size >= 1000 ? value.toFixed(1) : +value.toPrecision(digits)).replace("-", "−");
}

/** With its sign, for values whose zero is meaningful. */
export function signed(value, digits = 4) {
  return isNumber(value) && value > 0 ? `+${figure(value, digits)}` : figure(value, digits);
}

export function percent(share) {
  return isNumber(share) ? `${+(100 * share).toPrecision(3)} %` : ABSENT;
}

/** A token in quotes, with invisible characters made visible. */
export function quoted(text) {
  return `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍")}”`;
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

/** An answer or a metadata value: text unchanged, anything else as JSON. */
export function plain(value) {
  return value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

export function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!isNumber(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}
