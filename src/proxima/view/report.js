"use strict";
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const cards = [...document.querySelectorAll("[data-chart]")].map((card) => {
    const outputs = [...card.querySelectorAll("output")];
    return { svg: card.querySelector("svg"), values: run.charts[card.dataset.chart], outputs, last: outputs.map((o) => o.textContent), card };
  });

  // One ruler over all charts: the step under the pointer, and the value of every series there.
  function show(index) {
    for (const { svg, values, outputs, last } of cards) {
      const ruler = svg.querySelector(".ruler");
      outputs.forEach((output, i) => { output.textContent = index === null || !values[i] ? last[i] : values[i][index]; });
      ruler.setAttribute("visibility", index === null ? "hidden" : "visible");
      if (index !== null) {
        const { left, right, from, to } = svg.dataset;
        const x = +left + ((run.steps[index] - from) / ((to - from) || 1)) * (right - left);
        ruler.setAttribute("x1", x);
        ruler.setAttribute("x2", x);
      }
    }
  }
  function nearest(numbers, wanted) {
    let best = 0;
    numbers.forEach((number, i) => { if (Math.abs(number - wanted) < Math.abs(numbers[best] - wanted)) best = i; });
    return best;
  }
  function stepAt(svg, event) {
    const box = svg.getBoundingClientRect(), { left, right, from, to } = svg.dataset;
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    return +from + ((x - left) / (right - left)) * (to - from);
  }

  // Samples. Foreign text enters the page only through textContent.
  const slider = document.getElementById("step"), place = document.getElementById("groups");
  const steps = slider ? slider.dataset.steps.split(" ").map(Number) : [];
  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function turns(messages) {
    const list = element("ol", "turns");
    list.append(...messages.map((m) => {
      const item = element("li", m.role + (m.error ? " error" : ""));
      item.append(element("b", "", m.role), element("span", "reward", m.reward));
      if (m.text) item.append(element("pre", "", m.text));
      item.append(...m.calls.map((call) => element("code", "", "→ " + call)), ...(m.unreadable || []).map((why) => element("p", "bad", "unreadable call: " + why)));
      return item;
    }));
    return list;
  }
  function completion(c) {
    const box = element("div", "completion " + c.mark), label = element("p", "label");
    label.append(element("span", "reward", "reward " + c.reward), element("span", "mark", c.mark), element("span", "", c.parts), element("span", "", c.note));
    const view = element("a", "view", "view");
    view.href = place.dataset.viewer + "/step/" + steps[slider.value] + "/completion/" + c.name;
    label.append(view);
    box.append(label, c.turns.length ? turns(c.turns) : element("pre", "", c.text));
    return box;
  }
  function showSamples(index) {
    document.getElementById("shown-step").textContent = steps[index];
    place.replaceChildren(...run.samples[index].map((group) => {
      const card = element("article", "card");
      card.append(element("h3", "", group.question));
      const view = element("a", "view", "every token of it in proxima view");
      view.href = place.dataset.viewer + "/step/" + steps[index] + "/group/" + group.uid;
      card.append(view);
      if (group.answer) card.append(element("p", "muted", "expected " + group.answer));
      card.append(...group.completions.map(completion));
      if (group.of > group.completions.length) card.append(element("p", "muted label", group.completions.length + " of " + group.of + " completions"));
      return card;
    }));
  }
  if (slider) {
    slider.addEventListener("input", () => showSamples(+slider.value));
    showSamples(+slider.value);
  }

  for (const { svg } of cards) {
    if (!run.steps.length) break;
    svg.addEventListener("pointermove", (event) => show(nearest(run.steps, stepAt(svg, event))));
    svg.addEventListener("pointerleave", () => show(null));
    svg.addEventListener("click", (event) => {
      if (!slider) return;
      slider.value = nearest(steps, stepAt(svg, event));
      showSamples(+slider.value);
      document.getElementById("samples").scrollIntoView({ behavior: "smooth" });
    });
  }
})();
