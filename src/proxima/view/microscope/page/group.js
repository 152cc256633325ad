// The completions of one prompt side by side, with their differences from the chosen one.

import { h } from "./dom.js";
import { get } from "./api.js";
import { count, figure, plain, signed, words } from "./format.js";
import { completionId, go, linkTo, remember, stepPath } from "./router.js";
import { differing, wordsOf } from "./difference.js";
import { shortTurns } from "./episode.js";
import { outcomeWords } from "./step.js";
import { noteField } from "./notes.js";

const SHOWN = 24000; // characters of an answer; the rest is in the view of its tokens

class Group {
  constructor(route, group) {
    Object.assign(this, { route, group, played: group.completions.some((one) => one.episode) });
    this.path = stepPath(route.run, route.step);
    this.at = Math.max(0, group.completions.findIndex((one) => `${one.sample}.${one.turn || 0}` === route.query.at));
    const best = group.completions.reduce((found, one, i, all) => ((one.reward ?? -Infinity) > (all[found].reward ?? -Infinity) ? i : found), 0);
    const given = group.completions.findIndex((one) => `${one.sample}.${one.turn || 0}` === route.query.base);
    this.base = given >= 0 ? given : best;
    this.watch = new IntersectionObserver((seen) => seen.forEach((one) => { if (one.isIntersecting) this.fill(one.target); }), { rootMargin: "200px" });
    this.place = h("div", { class: "columns", role: "list", tabindex: 0, "aria-label": "Completions; arrow keys move, Enter opens one, b compares with it" });
    this.place.addEventListener("keydown", (event) => { if (event.target === this.place && event.key === "Enter") { event.preventDefault(); this.open(this.at); } });
    this.element = h("div", { class: "frame group" }, this.head(), this.played ? null : h("p", { class: "explain" }, h("mark", { class: "differs" }, "marked"), " words are not in the one it is compared with; the pale beginning is the same. ", h("b", {}, "◆"), " is where they part."), this.place);
    this.draw();
  }

  head() {
    const { group } = this, messages = (group.messages || []).map((message) => h("div", { class: "message" }, h("b", {}, message.role), h("p", { class: "text" }, plain(message.content))));
    return h("header", { class: "about" }, h("h1", {}, plain(group.question)), h("p", { class: "muted" }, plain(group.answer) ? `expected ${plain(group.answer)} · ` : "", `prompt ${group.uid} · ${count(group.completions.length)} completions`),
      messages.length ? h("details", {}, h("summary", {}, "prompt"), messages) : null, noteField(this.route.run, `step/${this.route.step}/group/${group.uid}`));
  }

  draw() {
    this.watch.disconnect();
    this.cards = this.group.completions.map((one, i) => this.card(one, i));
    this.place.replaceChildren(...this.cards);
    this.cards.forEach((card, i) => { if (!this.group.completions[i].episode) this.watch.observe(card); });
    this.mark();
  }

  /** Fill what nobody has scrolled to. */
  print() {
    for (const [i, card] of this.cards.entries()) if (!this.group.completions[i].episode) this.fill(card);
  }

  card(one, i) {
    const id = completionId(this.group.uid, one.sample, one.turn), parts = Object.entries(one.parts || {});
    const verdict = one.correct === true ? "✓ right" : one.correct === false ? "✕ wrong" : one.error ? "! no score" : "";
    const numbers = [["reward", figure(one.reward)], ["advantage", signed(one.advantage)], ["length", count(one.length)]];
    return h("article", { role: "listitem", "data-index": i, class: i === this.base ? "base" : null },
      h("h2", {}, h("a", { href: linkTo(`${this.path}/completion/${id}`) }, `sample ${one.sample}${one.turn ? `.${one.turn}` : ""}`), " ", h("span", { class: one.correct === true ? "good" : one.correct === false ? "bad" : "muted" }, verdict),
        this.played ? null : h("button", { type: "button", "aria-pressed": String(i === this.base), onclick: () => this.compareWith(i) }, i === this.base ? "compared with" : "compare with")),
      h("dl", { class: "strip" }, numbers.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      parts.length > 1 || (parts.length === 1 && parts[0][1] !== one.reward) ? h("dl", { class: "strip parts" }, parts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, figure(value, 3))))) : null,
      h("p", { class: "muted" }, [outcomeWords(one.outcome || ""), one.finish_reason ? `ended: ${words(one.finish_reason)}` : ""].filter(Boolean).join(" · ")),
      one.error ? h("p", { class: "bad" }, `✕ ${one.error}`) : null,
      one.episode ? shortTurns(one.episode) : h("p", { class: "text" }));
  }

  /** The text with its differences; run when the card becomes visible. */
  fill(card) {
    this.watch.unobserve(card);
    const i = +card.dataset.index, text = card.querySelector(".text"), own = this.group.completions[i].text, words_ = wordsOf(own.slice(0, SHOWN));
    const more = own.length > SHOWN ? [h("a", { href: card.querySelector("a").getAttribute("href") }, ` … ${count(own.length - SHOWN)} more characters`)] : [];
    if (i === this.base || this.group.completions.length < 2) return text.replaceChildren(own.slice(0, SHOWN), ...more);
    const { flags, first } = differing(words_, wordsOf(this.group.completions[this.base].text.slice(0, SHOWN)));
    const pieces = [];
    for (let start = 0; start < words_.length; ) {
      let end = start + 1;
      while (end < words_.length && flags[end] === flags[start] && (end < first) === (start < first)) end++;
      const piece = words_.slice(start, end).join("");
      if (start === first) pieces.push(h("b", { class: "parts-here", title: "here they part" }, "◆"));
      pieces.push(flags[start] ? h("mark", { class: "differs" }, piece) : start < first ? h("span", { class: "same" }, piece) : piece);
      start = end;
    }
    if (first === words_.length) pieces.push(h("b", { class: "parts-here" }, "◆"));
    return text.replaceChildren(...pieces, ...more);
  }

  compareWith(i) {
    if (this.played) return;
    this.base = i;
    const one = this.group.completions[i], scroll = this.place.scrollTop;
    remember({ base: `${one.sample}.${one.turn || 0}` });
    this.draw();
    this.place.scrollTop = scroll;
    this.cards[i].querySelector("button").focus({ preventScroll: true });
  }

  mark() {
    this.cards.forEach((card, i) => {
      card.classList.toggle("at", i === this.at);
      if (i === this.at) card.setAttribute("aria-current", "true");
      else card.removeAttribute("aria-current");
    });
  }

  move(direction) {
    this.at = Math.min(Math.max(this.at + direction, 0), this.cards.length - 1);
    this.mark();
    this.cards[this.at].scrollIntoView({ inline: "nearest", block: "nearest" });
  }

  open(i) {
    const one = this.group.completions[i];
    if (!one) return;
    remember({ at: `${one.sample}.${one.turn || 0}` });
    go(`${this.path}/completion/${completionId(this.group.uid, one.sample, one.turn)}`);
  }

  async beside(direction) {
    const { groups } = await get(this.path), sorted = [...groups].sort((a, b) => (b.std ?? -1) - (a.std ?? -1));
    const next = sorted[sorted.findIndex((one) => String(one.uid) === this.route.uid) + direction];
    if (next) go(`${this.path}/group/${encodeURIComponent(next.uid)}`);
  }
}

export async function groupView(route) {
  const view = new Group(route, await get(`${stepPath(route.run, route.step)}/group/${encodeURIComponent(route.uid)}`));
  const keys = [
    { key: "ArrowRight", text: "completion after", run: () => view.move(1) },
    { key: "ArrowLeft", text: "completion before", run: () => view.move(-1) },
    { key: "Enter", text: "open the completion", run: () => view.open(view.at) },
    { key: "b", text: "compare the others with this one", run: () => view.compareWith(view.at) },
    { key: "n", text: "next group, by spread", run: () => view.beside(1) },
    { key: "p", text: "group before", run: () => view.beside(-1) },
  ];
  return { element: view.element, keys, focus: view.place, settle: () => view.move(0), print: () => view.print(), leave: () => view.watch.disconnect() };
}
