// The server's answers, or in an exported file its data. Answers about a written step never change.

import { ABSENT } from "./format.js";

const inlined = document.getElementById("exported");
const file = inlined ? JSON.parse(inlined.textContent) : null;
const key = new URLSearchParams(location.search).get("key");
const kept = new Map();
const KEPT = 24; // cached answers, so that going back needs no request

/** The page is a single file: no polling, search or saving. */
export const isFile = file !== null;
export const fileStart = file ? file.start : null;

function address(path, query) {
  const search = new URLSearchParams(query);
  if (key) search.set("key", key);
  const text = search.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

async function answerOf(response) {
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Error(answer && answer.error ? answer.error : `the server answered ${response.status}`);
  return answer;
}

function unreachable() {
  throw new Error(`the server does not answer; is \`proxima view\` still running?${self === top ? "" : " Or this frame forbids requests: open it in a window."}`);
}

export async function get(path, query = {}) {
  if (file) {
    if (path in file.data) return file.data[path];
    throw new Error("this is not in the file that was exported");
  }
  const where = address(path, query);
  if (kept.has(where)) {
    const answer = kept.get(where);
    kept.delete(where);
    kept.set(where, answer);
    return answer;
  }
  const answer = await answerOf(await fetch(where).catch(unreachable));
  if (/\/step\//.test(path)) kept.set(where, answer);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  return answer;
}

/** `get`, or null if there is no answer. */
export function getOrNull(path, query) {
  return get(path, query).catch(() => null);
}

export async function post(path, body) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return answerOf(await fetch(address(path, {}), options).catch(unreachable));
}

// ---- columns of tokens ------------------------------------------------------------

const KINDS = { f32: Float32Array, i32: Int32Array, u8: Uint8Array };

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** The columns of a completion, each decoded on first use; null if it is not stored. */
export class Columns {
  constructor(coded, docs) {
    this.coded = coded;
    this.docs = docs || {};
    this.decoded = new Map();
  }

  get names() {
    return Object.keys(this.coded).filter((name) => this.coded[name] !== null);
  }

  column(name) {
    if (!this.decoded.has(name)) {
      const coded = this.coded[name];
      const kind = coded ? Object.keys(KINDS).find((one) => one in coded) : null;
      this.decoded.set(name, kind ? new KINDS[kind](bytesOf(coded[kind]).buffer) : null);
    }
    return this.decoded.get(name);
  }

  /** The number at a token; null if it has none. */
  at(name, index) {
    const values = this.column(name);
    return !values || Number.isNaN(values[index]) || values[index] === undefined ? null : values[index];
  }

  /** 1 if the model wrote a token and it was masked; null if that is not stored. */
  get masked() {
    const keep = this.column("keep"), sampled = this.column("sampled");
    if (keep && !this.decoded.has("masked")) this.decoded.set("masked", keep.map((one, i) => (one || (sampled && !sampled[i]) ? 0 : 1)));
    return this.decoded.get("masked") || null;
  }

  unit(name) {
    return this.docs[name] ? this.docs[name].unit || "" : "";
  }

  doc(name) {
    return this.docs[name] ? this.docs[name].doc || "" : ABSENT;
  }
}
