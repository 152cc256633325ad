// An episode of several turns: its messages as a graph and in order, with roles, tools, rewards, and other paths.

import { h, s } from "./dom.js";
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
  const values = Object.entries(call.arguments || {}).map(([name, value]) => `${name ? `${name}=` : ""}${plain(value)}`);
  return `${call.name}(${values.join(", ")})`;
}

const ENDS = { turns: "ended by the limit of turns", tokens: "ended by the limit of tokens", context: "ended by the context's length" };
const TIMES = { queued: "queued", own: "own", policy: "the policy's" };

/** Why it ended; of a path that is not the last one nothing is known. */
function endOf(episode) {
  if (episode.failure) return `failed: ${episode.failure}`;
  const end = ENDS[episode.cut] || (episode.seconds ? "ended by itself" : "");
  return episode.unrewarded ? `${end}, without a reward: ${episode.unrewarded}` : end;
}

/** Where its time went. */
function timesOf(episode) {
  const spent = Object.entries(episode.seconds || {}).map(([account, seconds]) => `${TIMES[account]} ${plain(seconds)} s`);
  return spent.length ? `time ${spent.join(", ")}` : "";
}

/** A message's calls and errors. */
function callsOf(span) {
  return [(span.calls || []).map((call) => h("code", { class: "call" }, `→ ${callText(call)}`)), (span.unreadable || []).map((why) => h("p", { class: "bad" }, `✕ unreadable call: ${why}`))];
}

function factsOf(episode) {
  const rewards = Object.entries(episode.rewards || {}).map(([player, reward]) => `${player} ${signed(reward)}`).join(", ");
  return [episode.player ? `written by ${episode.player}` : "", episode.reward ? `reward of the episode ${signed(episode.reward)}` : "", rewards ? `rewards: ${rewards}` : "", endOf(episode), episode.attempts > 1 ? `begun ${episode.attempts} times` : "", timesOf(episode)].filter(Boolean).join(" · ");
}

/** The messages in short form, for comparison with others. */
export function shortTurns(episode) {
  const facts = factsOf(episode);
  return h("div", { class: "text" }, facts ? h("p", { class: "muted" }, facts) : null, h("ol", { class: "turns" }, episode.spans.map((span) => h("li", { class: span.role === "assistant" ? "model" : span.error ? "given bad" : "given" },
    h("b", {}, span.role === "assistant" ? `turn ${span.turn}` : span.error ? `✕ ${span.role}` : span.role), span.reward ? ` reward ${signed(span.reward)}` : "", h("p", {}, span.text), callsOf(span)))));
}

const GAP = 26;

/** A node per message, left to right; other paths branch off below. The model's are round. */
function graph(sections, paths, linkOf, onselect) {
  const parts = [], wide = [sections.length];
  const node = (span, x, y, act, about) => {
    const wrong = span.error || (span.unreadable || []).length, calls = (span.calls || []).map((call) => call.name);
    const label = [about, span.role, `turn ${span.turn}`, `${count(span.tokens)} tokens`, calls.length ? `calls ${calls.join(", ")}` : "", wrong ? "error" : "", span.reward ? `reward ${signed(span.reward)}` : ""].filter(Boolean).join(", ");
    const shape = span.role === "assistant" ? s("circle", { cx: x, cy: y, r: 9 }) : s("rect", { x: x - 7, y: y - 7, width: 14, height: 14 });
    parts.push(s("a", { ...act, class: span.sampled ? "model" : "given", "aria-label": label }, s("title", {}, label), shape, s("text", { x, y: y + 4 }, wrong ? "!" : calls.length ? "ƒ" : span.role === "assistant" ? span.turn : "")));
  };
  const edge = (x, y, to, below) => parts.unshift(s("path", { d: `M${x} ${y}L${to} ${below}` }));
  const at = (i) => 14 + i * GAP;
  sections.forEach(({ span, start }, i) => {
    if (i) edge(at(i - 1), 14, at(i), 14);
    const act = () => onselect(start);
    node(span, at(i), 14, { role: "button", tabindex: 0, onclick: act, onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); act(); } } });
  });
  paths.forEach((path, row) => {
    const y = 14 + (row + 1) * GAP;
    let end = 0;
    (path.spans || []).forEach((span, i, all) => {
      end += span.tokens;
      if (end <= path.shared_tokens) return;
      const first = end - span.tokens <= path.shared_tokens;
      if (i) edge(at(i - 1), first ? 14 : y, at(i), y);
      node(span, at(i), y, { href: linkOf(path) }, `${path.player ? `path of ${path.player}` : "another path"} from token ${count(path.shared_tokens + 1)}${isNumber(path.reward) ? `, reward ${signed(path.reward)}` : ""}`);
      wide.push(all.length);
    });
  });
  const width = 2 + GAP * Math.max(...wide), height = 28 + paths.length * GAP;
  return s("svg", { class: "graph", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Graph of ${sections.length} messages and ${paths.length} other paths` }, parts);
}

/** The graph, and the messages as a list; each goes to its first token. */
export function episodePanel(episode, route, parts, onselect) {
  if (!episode) return null;
  const paths = episode.paths || [], sections = sectionsOf(episode), facts = factsOf(episode);
  const linkOf = (path) => linkTo(`${stepPath(route.run, route.step)}/completion/${completionId(parts.uid, path.sample ?? parts.sample, path.turn)}`);
  const items = sections.map(({ start, span }) => h("li", { class: span.sampled ? "model" : "given" },
      h("button", { type: "button", onclick: () => onselect(start) }, h("b", {}, span.role), ` turn ${span.turn}`, h("span", { class: "muted" }, ` ${count(span.tokens)} tokens`), span.reward ? h("span", {}, ` reward ${signed(span.reward)}`) : null),
      callsOf(span)));
  const turns = sections.filter((one) => one.span.role === "assistant").length;
  return h("details", { class: "episode", open: true }, h("summary", {}, `Episode of ${turns} turn${turns === 1 ? "" : "s"}`), facts ? h("p", { class: "muted" }, facts) : null,
    h("div", { class: "scroll" }, graph(sections, paths, linkOf, onselect)), h("ol", {}, items));
}
