// A view is an address: `#/RUN/step/N/group/UID`, `#/RUN/step/N/completion/UID.SAMPLE.TURN?t=TOKEN&tint=NAME`, …

const ADDRESSES = [
  ["runs", /^$/, []],
  ["trend", /^(\d+)$/, ["run"]],
  ["heldOut", /^(\d+)\/held-out$/, ["run"]],
  ["compare", /^(\d+)\/compare$/, ["run"]],
  ["step", /^(\d+)\/step\/(\d+)$/, ["run", "step"]],
  ["group", /^(\d+)\/step\/(\d+)\/group\/([^/]+)$/, ["run", "step", "uid"]],
  ["completion", /^(\d+)\/step\/(\d+)\/completion\/([^/]+)$/, ["run", "step", "completion"]],
];

/** {view, path, query, run, step, …} of a hash; null for one that names no view. */
export function parsed(hash) {
  const [path, search] = hash.replace(/^#?\/?/, "").split("?");
  for (const [view, pattern, names] of ADDRESSES) {
    const found = path.match(pattern);
    if (!found) continue;
    const route = { view, path, query: Object.fromEntries(new URLSearchParams(search || "")) };
    names.forEach((name, i) => { route[name] = decodeURIComponent(found[i + 1]); });
    return route;
  }
  return null;
}

export function linkTo(path, query = {}) {
  const filled = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(filled).toString();
  return `#/${path}${search ? `?${search}` : ""}`;
}

export function go(path, query) {
  location.hash = linkTo(path, query);
}

/** Write a choice into the address, without a new entry of the history; a sandboxed frame has none. */
export function remember(query) {
  const here = parsed(location.hash);
  const merged = linkTo(here.path, { ...here.query, ...query });
  try {
    if (merged !== location.hash) history.replaceState(null, "", merged);
  } catch {}
}

/** `uid.sample.turn` and back. */
export function completionId(uid, sample, turn) {
  return `${uid}.${sample}.${turn || 0}`;
}

export function idParts(id) {
  const parts = id.split("."), turn = parts.pop(), sample = parts.pop();
  return { uid: parts.join("."), sample: +sample, turn: +turn };
}

export function stepPath(run, step) {
  return `${run}/step/${step}`;
}

/** The view above: Escape goes there. */
export function above(route) {
  const step = stepPath(route.run, route.step);
  if (route.view === "completion") return `${step}/group/${encodeURIComponent(idParts(route.completion).uid)}`;
  if (route.view === "group") return step;
  if (route.view === "compare") return route.query.c ? `${stepPath(route.run, route.query.step)}/completion/${route.query.c}` : route.run;
  if (route.view === "step" || route.view === "heldOut") return route.run;
  return "";
}
