// Finds sections, fields and names by all words of a question: title before text, guides before history.

(() => {
  const SHOWN = 40, ROOM = 110; // results; characters of a snippet on each side of its first word
  const asked = new URLSearchParams(location.search).get("q") || "";
  const place = document.getElementById("search-results");
  for (const input of document.querySelectorAll("input[name=q]")) input.value = asked;

  /** A word of a text begins with what was asked for; `models` finds `model` too. */
  const stem = (word) => (word.length > 4 && word.endsWith("s") && !word.endsWith("ss") ? word.slice(0, -1) : word);
  const words = [...new Set(asked.toLowerCase().split(/[^\p{L}\p{N}_.@|-]+/u).filter(Boolean).map(stem))];
  const escaped = (word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const pattern = (word, flags) => new RegExp(`(?<![\\p{L}\\p{N}])${escaped(word)}`, flags);
  const tests = words.map((word) => pattern(word, "giu"));
  const phrase = words.length > 1 ? new RegExp(`(?<![\\p{L}\\p{N}])${words.map(escaped).join("s?\\W+")}`, "iu") : null;
  const times = (text, test) => (text.match(test) || []).length;

  function score([, page, , title, text, weight]) {
    let sum = 0;
    for (const test of tests) {
      const inTitle = times(title, test) > 0, inPage = times(page, test) > 0, inText = times(text, test);
      if (!inTitle && !inPage && !inText) return 0;
      sum += 12 * inTitle + 5 * inPage + Math.log2(1 + inText);
    }
    // a short title that is the question itself comes first
    if (phrase) sum += 20 * phrase.test(title) + 6 * phrase.test(page) + 5 * phrase.test(text);
    sum += (12 * words.length * tests.filter((test) => times(title, test)).length) / (words.length + title.split(/[\s.]+/).length);
    return sum * weight;
  }

  /** The text around the place where the question begins, its words marked. */
  function snippet(text) {
    const together = phrase ? text.search(phrase) : -1;
    const places = tests.map((test) => text.search(test)).filter((at) => at >= 0);
    const at = together >= 0 ? together : Math.min(...places, text.length);
    const from = at < ROOM ? 0 : text.indexOf(" ", at - ROOM) + 1;
    const cut = text.slice(from, from + 2 * ROOM), end = from + cut.length < text.length ? " …" : "";
    const line = document.createElement("p");
    if (from) line.append("… ");
    const any = new RegExp(`(?<![\\p{L}\\p{N}])(?:${words.map(escaped).join("|")})`, "giu");
    let after = 0;
    for (const found of cut.matchAll(any)) {
      const mark = document.createElement("mark");
      mark.textContent = found[0];
      line.append(cut.slice(after, found.index), mark);
      after = found.index + found[0].length;
    }
    line.append(cut.slice(after), end);
    return line;
  }

  function result([address, page, , title, text]) {
    const link = document.createElement("a"), where = document.createElement("span"), item = document.createElement("li");
    link.href = address;
    link.textContent = title;
    where.textContent = title === page ? "" : page;
    item.append(link, " ", where, snippet(text));
    return item;
  }

  if (!words.length) return;
  const found = SECTIONS.map((one) => [score(one), one]).filter(([value]) => value > 0).sort((a, b) => b[0] - a[0]);
  const list = document.createElement("ol"), said = document.createElement("p");
  said.setAttribute("role", "status");
  said.textContent = found.length ? `${found.length} places${found.length > SHOWN ? `, the first ${SHOWN}` : ""}` : "No section has all these words.";
  list.append(...found.slice(0, SHOWN).map(([, one]) => result(one)));
  place.append(said, list);
})();
