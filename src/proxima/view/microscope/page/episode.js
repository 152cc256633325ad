// An episode of several turns: its messages in order, with roles, tools and rewards, and where other paths leave it.

import { h } from "./dom.js";
import { count, isNumber, plain, signed } from "./format.js";
import { completionId, linkTo, stepPath } from "./router.js";

/** Sections of the text: where each message begins. */
export function sectionsOf(episode) {
  let start = 0;
  return (episode ? episode.spans : []).map((span) => {
    const section = { start, span, className: span.sampled ? "model" : "given", title: `${span.role} · turn ${span.turn} · ${count(span.tokens)} tokens${span.sampled ? "" : " · given"}` };
    start += span.tokens;
    return section;
  });
}

function callText(call) {
  const values = Object.entries(call.arguments || {}).map(([name, value]) => `${name}=${plain(value)}`);
  return `${call.name}(${values.join(", ")})`;
}

const ENDS = { turns: "ended by the limit of turns", tokens: "ended by the limit of tokens", context: "ended by the context's length" };

/** The messages as a list; each goes to its first token. */
export function episodePanel(episode, route, parts, onselect) {
  if (!episode) return null;
  const paths = episode.paths || [], sections = sectionsOf(episode);
  const items = sections.map(({ start, span }) => {
    const end = start + span.tokens, forks = paths.filter((path) => path.shared_tokens >= start && path.shared_tokens < end);
    return h("li", { class: span.sampled ? "model" : "given" },
      h("button", { type: "button", onclick: () => onselect(start) }, h("b", {}, span.role), ` turn ${span.turn}`, h("span", { class: "muted" }, ` ${count(span.tokens)} tokens`), span.reward ? h("span", {}, ` reward ${signed(span.reward)}`) : null),
      (span.calls || []).map((call) => h("code", { class: "call" }, `→ ${callText(call)}`)),
      (span.unreadable || []).map((why) => h("p", { class: "bad" }, `✕ unreadable call: ${why}`)),
      forks.map((path) => h("a", { class: "fork", href: linkTo(`${stepPath(route.run, route.step)}/completion/${completionId(parts.uid, path.sample ?? parts.sample, path.turn)}`) }, `↳ another path from token ${count(path.shared_tokens)}${isNumber(path.reward) ? `, reward ${signed(path.reward)}` : ""}`)));
  });
  const facts = [isNumber(episode.reward) ? `reward of the episode ${signed(episode.reward)}` : "", ENDS[episode.cut] || "", episode.failure ? `failed: ${episode.failure}` : "",
    episode.attempts > 1 ? `begun ${episode.attempts} times` : "", episode.forks && !paths.length ? `${episode.forks} other paths` : ""].filter(Boolean);
  return h("details", { class: "episode", open: true }, h("summary", {}, `Episode of ${sections.filter((one) => one.span.sampled).length} turns`), facts.length ? h("p", { class: "muted" }, facts.join(" · ")) : null, h("ol", {}, items));
}
