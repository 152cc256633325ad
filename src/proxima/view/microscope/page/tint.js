// How a column of numbers tints tokens. Colour is never the only cue: values above zero have a bar above the token,
// values below zero one below it, thicker if larger; a version is written where it begins; masked tokens are struck out.

import { h } from "./dom.js";
import { figure, percent, signed, words } from "./format.js";

const STEPS = 4; // shades on each side of zero, and STEPS * 2 - 1 if there is one side
const KNOWN = {
  advantage: ["advantage", "two"],
  log_ratio: ["log-ratio current / behavior", "two"],
  mismatch: ["mismatch of trainer and engine", "auto"],
  entropy: ["entropy", "one"],
  divergence: ["|π − μ|", "one"],
  policy_version: ["version", "kinds"],
  keep: ["kept or masked", "flag"],
  loss_weight: ["loss weight", "two"],
};
const NOT_TINTS = new Set(["sampled"]);

/** Columns that may tint, main ones first: [[name, title], …]. */
export function tintNames(columns) {
  const there = columns.names.filter((name) => !NOT_TINTS.has(name));
  const first = Object.keys(KNOWN).filter((name) => there.includes(name));
  const rest = there.filter((name) => !(name in KNOWN));
  return [...first, ...rest].map((name) => [name, titleOf(name)]);
}

export function titleOf(name) {
  return name in KNOWN ? KNOWN[name][0] : words(name).replace("log prob", "log-prob");
}

/** The size that all but one in a hundred stay below, so that an outlier doesn't fade the rest. */
function commonSize(values) {
  const sizes = Float32Array.from(values, Math.abs).filter((value) => Number.isFinite(value)).sort();
  const value = sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.99))] || sizes[sizes.length - 1] || 0;
  if (!value) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * power).find((n) => n >= value * 0.9999) || value;
}

/** {classAt(i), legend} of a column; classAt gives the class of a token, "" for a token without a number. */
export function tintOf(name, columns) {
  const values = name ? columns.column(name) : null;
  if (!values) return { name: "", classAt: () => "", level: () => 0, legend: h("div", { class: "legend" }) };
  const known = name in KNOWN && KNOWN[name][1] !== "auto";
  const kind = known ? KNOWN[name][1] : values instanceof Uint8Array ? "flag" : values.some((value) => value < 0) && values.some((value) => value > 0) ? "two" : "one";
  const unit = columns.unit(name);
  const made = { flag: flagTint, kinds: kindTint, two: twoSided, one: oneSided }[kind](values, unit);
  return { name, ...made };
}

function legend(entries, note) {
  const cells = entries.map(([className, text]) => h("li", {}, h("i", { class: `tok ${className}`, "aria-hidden": "true" }, "ab"), text));
  return h("div", { class: "legend" }, h("ul", {}, cells), note ? h("span", { class: "muted" }, note) : null);
}

function constantOf(values) {
  const first = values.find((value) => !Number.isNaN(value));
  return first !== undefined && values.every((value) => Number.isNaN(value) || value === first) ? first : null;
}

function twoSided(values, unit) {
  const same = constantOf(values), most = commonSize(values);
  const levelOf = (value) => (Number.isNaN(value) ? null : same !== null ? Math.sign(value) * 2 : most ? Math.round(Math.max(-1, Math.min(1, value / most)) * STEPS) : 0);
  const named = (level) => (level === 0 ? "z" : level > 0 ? `p${level}` : `m${-level}`);
  const classAt = (i) => { const level = levelOf(values[i]); return level === null ? "" : named(level); };
  const shown = same !== null ? [[named(levelOf(same)), `${signed(same)} at every token`]]
    : Array.from({ length: 2 * STEPS + 1 }, (_, i) => i - STEPS).filter((level) => level % 2 === 0).map((level) => [named(level), (level === -STEPS ? "≤ " : level === STEPS ? "≥ " : "") + signed((level * most) / STEPS, 3)]);
  return { classAt, level: (i) => (levelOf(values[i]) || 0) / STEPS, legend: legend(shown, unit) };
}

function oneSided(values, unit) {
  const same = constantOf(values), sign = values.some((value) => value < 0) ? -1 : 1, most = commonSize(values), top = 2 * STEPS - 1;
  const levelOf = (value) => (Number.isNaN(value) ? null : same !== null ? 3 : most ? Math.round(Math.max(0, Math.min(1, (sign * value) / most)) * top) : 0);
  const classAt = (i) => { const level = levelOf(values[i]); return level === null ? "" : `q${level}`; };
  const limit = sign > 0 ? "≥ " : "≤ ";
  const shown = same !== null ? [["q3", `${figure(same)} at every token`]] : [0, 2, 4, 6, 7].map((level) => [`q${level}`, (level === top ? limit : "") + figure((sign * level * most) / top, 3)]);
  return { classAt, level: (i) => (levelOf(values[i]) || 0) / top, legend: legend(shown, unit) };
}

function kindTint(values) {
  const kinds = [...new Set(values)].sort((a, b) => a - b), place = new Map(kinds.map((kind, i) => [kind, i]));
  const classAt = (i) => `v${place.get(values[i]) % 6}${i === 0 || values[i] !== values[i - 1] ? " starts" : ""}`;
  const shown = kinds.slice(0, 12).map((kind, i) => [`v${i % 6}`, `version ${kind}`]);
  return { classAt, value: (i) => values[i], level: (i) => (kinds.length > 1 ? place.get(values[i]) / (kinds.length - 1) : 0), legend: legend(shown, kinds.length > 12 ? `and ${kinds.length - 12} more` : "") };
}

function flagTint(values) {
  const no = values.reduce((sum, value) => sum + (value ? 0 : 1), 0);
  const classAt = (i) => (values[i] ? "yes" : "no");
  return { classAt, level: (i) => (values[i] ? 0 : -1), legend: legend([["yes", `yes, ${percent(1 - no / values.length)}`], ["no", `no, ${percent(no / values.length)}`]]) };
}
