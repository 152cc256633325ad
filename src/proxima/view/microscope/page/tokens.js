// An answer as tokens, in pieces of some hundred. Only visible pieces have an element per token; the others are
// plain text of the same size, so that 32,000 tokens scroll, and can be read aloud, like any text.

import { h } from "./dom.js";

const PIECE = 96, LONGEST = 768; // tokens: a piece ends at the first line end after PIECE, and at LONGEST

function piecesOf(texts, starts) {
  const pieces = [], cuts = new Set(starts);
  let first = 0;
  for (let i = 0; i < texts.length; i++) {
    const long = i + 1 - first, ends = (long >= PIECE && texts[i].includes("\n")) || long >= LONGEST || cuts.has(i + 1) || i + 1 === texts.length;
    if (!ends) continue;
    pieces.push({ first, end: i + 1, element: null, filled: false });
    first = i + 1;
  }
  return pieces;
}

export class TokenText {
  /** `sections` are {start, title, className}: parts with a heading, as messages of an episode. */
  constructor({ texts, columns, label, onselect, sections = [] }) {
    Object.assign(this, { texts, onselect, sections });
    this.masked = columns.masked;
    this.sampled = columns.column("sampled");
    this.tint = null;
    this.at = -1;
    this.first = -1;
    this.hits = new Set();
    this.pieces = piecesOf(texts, sections.map((section) => section.start));
    this.body = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": label });
    this.body.addEventListener("click", (event) => this.click(event));
    this.watch = new IntersectionObserver((seen) => seen.forEach((one) => this.swap(one.target.piece, one.isIntersecting)), { root: this.body, rootMargin: "300px 0px" });
    this.build();
  }

  get element() {
    return this.body;
  }

  build() {
    const headings = new Map(this.sections.map((section) => [section.start, section]));
    for (const piece of this.pieces) {
      const section = headings.get(piece.first);
      if (section) this.body.append(h("h3", { class: `role ${section.className || ""}` }, section.title));
      piece.element = h("p", { class: "piece" }, this.textOf(piece));
      piece.element.piece = piece;
      this.body.append(piece.element);
      this.watch.observe(piece.element);
    }
    if (!this.texts.length) this.body.append(h("p", { class: "muted" }, "no tokens"));
  }

  /** Tint what nobody has scrolled to. */
  print() {
    for (const piece of this.pieces) this.fill(piece);
  }

  textOf(piece) {
    return this.texts.slice(piece.first, piece.end).join("");
  }

  swap(piece, inSight) {
    if (inSight) this.fill(piece);
    else if (piece.filled && !(this.at >= piece.first && this.at < piece.end)) {
      piece.filled = false;
      piece.element.textContent = this.textOf(piece);
    }
  }

  fill(piece) {
    if (piece.filled) return;
    piece.filled = true;
    const spans = [];
    for (let i = piece.first; i < piece.end; i++) {
      const span = document.createElement("span");
      span.textContent = this.texts[i];
      this.dress(span, i);
      spans.push(span);
    }
    piece.element.replaceChildren(...spans);
  }

  dress(span, i) {
    const tinted = this.tint ? this.tint.classAt(i) : "";
    let name = `tok ${tinted}`;
    if (this.masked && this.masked[i]) name += " masked";
    if (this.sampled && !this.sampled[i]) name += " given";
    if (this.texts[i].startsWith("\n")) name += " end";
    if (this.hits.has(i)) name += " hit";
    if (i === this.first) name += " first";
    if (i === this.at) name += " at";
    span.className = name;
    if (tinted.endsWith(" starts")) span.dataset.version = `v${this.tint.value(i)}`;
    else if (span.dataset.version) delete span.dataset.version;
  }

  /** Restyle the visible tokens. */
  redress() {
    for (const piece of this.pieces) {
      if (piece.filled) [...piece.element.children].forEach((span, k) => this.dress(span, piece.first + k));
    }
  }

  setTint(tint) {
    this.tint = tint;
    this.redress();
  }

  pieceOf(index) {
    return this.pieces.find((piece) => index < piece.end);
  }

  spanOf(index) {
    const piece = this.pieceOf(index);
    if (!piece) return null;
    this.fill(piece);
    return piece.element.children[index - piece.first];
  }

  /** Mark a token and, with `reveal`, scroll it into view. */
  select(index, reveal = true) {
    const before = this.at;
    this.at = Math.min(Math.max(index, 0), this.texts.length - 1);
    if (before >= 0 && before !== this.at) this.dress(this.spanOf(before), before);
    const span = this.spanOf(this.at);
    if (!span) return;
    this.dress(span, this.at);
    if (reveal) this.reveal(span);
  }

  reveal(span) {
    const box = span.getBoundingClientRect(), frame = this.body.getBoundingClientRect(), margin = Math.min(60, frame.height / 4);
    if (box.top < frame.top + margin || box.bottom > frame.bottom - margin) {
      this.body.scrollTop += box.top - frame.top - frame.height / 2.5;
    }
  }

  click(event) {
    const span = event.target.closest(".tok");
    if (!span || getSelection().toString()) return;
    const piece = span.parentElement.piece;
    this.onselect(piece.first + [...piece.element.children].indexOf(span));
  }

  /** The token a line above (-1) or below (+1) the marked one. */
  beside(direction) {
    const span = this.spanOf(this.at), box = span.getClientRects()[0] || span.getBoundingClientRect();
    this.reveal(span);
    const now = span.getClientRects()[0] || box, height = 21;
    for (let lines = 1; lines < 4; lines++) {
      const y = now.top + now.height / 2 + direction * lines * height;
      for (const x of [now.left + now.width / 2, now.left - 40, now.left - 160, this.body.getBoundingClientRect().left + 20]) {
        const found = document.elementFromPoint(x, y), token = found && this.body.contains(found) ? found.closest(".tok") : null;
        if (token) return token.parentElement.piece.first + [...token.parentElement.children].indexOf(token);
      }
    }
    return Math.min(Math.max(this.at + direction * 12, 0), this.texts.length - 1);
  }

  /** Mark the tokens that match a text or expression; return the first token of each match. */
  find(words) {
    this.hits.clear();
    const places = [];
    if (words) {
      const text = this.texts.join("").toLowerCase(), wanted = words.toLowerCase();
      let token = 0, end = this.texts[0] ? this.texts[0].length : 0;
      for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
        while (end <= at) end += this.texts[++token].length;
        places.push(token);
        for (let i = token, reached = end; ; reached += this.texts[++i].length) {
          this.hits.add(i);
          if (reached >= at + wanted.length || i + 1 >= this.texts.length) break;
        }
      }
    }
    this.redress();
    return places;
  }

  leave() {
    this.watch.disconnect();
  }
}
