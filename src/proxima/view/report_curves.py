"""The charts of report.html as cards with a legend and the value at each step, and the choice of charts for a run."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from proxima.evaluate.headline import PART, Headline
from proxima.evaluate.held_out import named_sets
from proxima.lab.metric_names import metric_of
from proxima.runtime.watch.observer import Record
from proxima.view.chart import Series, bar_chart, line_chart
from proxima.view.formatting import NONE, count, duration, percent
from proxima.view.log_lines import carried_in, dropped_prompts, prompts_used
from proxima.view.report_specs import (
    ACCURACY,
    ASYNCHRONOUS,
    CRITIC,
    CURVES,
    EPISODES,
    EXAMPLE_CURVES,
    KEPT,
    RECENT,
    REFILL,
    REWARD,
    SHARE,
    VITAL,
    Curves,
    InPercent,
    three,
    training_and_held_out,
)

Card = dict[str, Any]
Bars = dict[str, tuple[str, list[float]]]  # name: its colour and its values
COLORS, DOT_COLORS = ("a", "b", "c", "d", "e"), ("b", "e")
LARGE, LARGE_SIZE, SMALL_SIZE = 3, (380, 240), (280, 150)  # number of large charts; width and height
LATE = ("stale", "surplus")  # prompts that had been accepted before they were dropped
PHASES = {  # key: name and colour
    "time/generate": ("generate", "a"),
    "time/score": ("score", "c"),
    "time/train": ("train", "b"),
    "time/publish": ("publish", "d"),
}
LAG = "lag/"


def all_charts(train: Sequence[Record], evals: Sequence[Record]) -> list[Card]:
    """Return the cards in page order, the first three large; charts whose metrics the run lacks are left out."""
    cards: list[Card] = []
    if any("examples" in r for r in train):
        add_cards(cards, EXAMPLE_CURVES, train, evals)
        return cards
    both = replace(ACCURACY, explanation="share of right answers, which is the mean reward")
    main = [both] if rewards_are_accuracy(train, evals) else [ACCURACY, REWARD]
    specs = [*named_part(evals), *main, *VITAL, *CRITIC, *EPISODES, *reward_parts(train), *CURVES]
    if any(r.get("dropped/pruned") for r in train):
        specs.append(KEPT)
    add_cards(cards, specs, records := with_derived(train), evals)
    if any(prompts_used(r) for r in train):
        varies = {
            "Age": any(r.get("age/max") for r in train) and not any("async/queue" in r for r in train),
            "Generation batches": any((r.get("gen_batches") or 1) > 1 for r in train),
        }
        cards.append(prompts_card(train))
        add_cards(cards, [spec for spec in REFILL if varies.get(spec.title, True)], records, evals)
    if (sets := sets_card(train, evals)) is not None:
        cards.insert(LARGE, sets)
    return cards


def add_cards(cards: list[Card], specs: Iterable[Curves], train: Sequence[Record], evals: Sequence[Record]) -> None:
    """Append the charts whose metrics the run has."""
    for spec in specs:
        if (card := line_card(spec, train, evals, large=len(cards) < LARGE)) is not None:
            cards.append(card)


def rewards_are_accuracy(train: Sequence[Record], evals: Sequence[Record]) -> bool:
    """Return True if mean reward and share of correct answers are equal everywhere: one chart shows both."""
    both = [(r["reward/mean"], r.get("accuracy")) for r in (*train, *evals) if r.get("reward/mean") is not None]
    return bool(both) and all(reward == accuracy for reward, accuracy in both)


def with_derived(train: Sequence[Record]) -> list[Record]:
    """Add metrics that follow from the records' counts: `acceptance` (a share, over the last ten steps) and `kept`
    (completions)."""
    recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
    records: list[Record] = []
    for r in train:
        derived: dict[str, float] = {}
        drops = dropped_prompts(r)
        if generated := int(r.get("prompts_generated") or 0):
            # earlier versions recorded no count of accepted prompts
            accepted = generated - sum(n for reason, n in drops.items() if reason not in LATE)
            recent.append((int(r.get("prompts_accepted", accepted)), generated - int(r.get("prompts_unscored") or 0)))
            if judged := sum(n for _, n in recent):
                derived["acceptance"] = sum(n for n, _ in recent) / judged
        if r.get("prompts") and r.get("completions") and r.get("prompts_used") is not None:
            size = r["completions"] / r["prompts"]
            dropped = sum(n or 0 for key, n in r.items() if key.startswith("dropped/"))
            derived["kept"] = (r["prompts_used"] + sum(drops.values())) * size - dropped
        records.append({**r, **derived})
    return records


def named_part(evals: Sequence[Record]) -> Iterator[Curves]:
    """Yield a chart of the reward part that is the run's headline metric, if it is a part."""
    headline = Headline.of(evals)
    if headline.key.startswith(PART):
        part = training_and_held_out(headline.name, headline.key, "mean, before its weight", zero=False)
        yield replace(part, share_if_possible=True)


def reward_parts(train: Sequence[Record]) -> Iterator[Curves]:
    """Yield a chart of the mean of each reward if there are several; at most as many as there are colours."""
    keys = dict.fromkeys(key for r in train for key in r if key.startswith("reward/part/"))
    names = [key.removeprefix("reward/part/") for key in keys]
    names = [name for name in names if "/" not in name]  # further metrics of a reward have their own scales
    if len(names) > 1:
        shown = {f"reward/part/{name}": name for name in names[: len(COLORS)]}
        rest = f"; {len(names) - len(shown)} more in metrics.jsonl" if len(names) > len(shown) else ""
        yield Curves("Reward parts", shown, three, f"mean of each reward, before its weight{rest}", zero=False)


def line_card(spec: Curves, train: Sequence[Record], evals: Sequence[Record], *, large: bool = False) -> Card | None:
    """Return the chart, its legend, and each series' value at each step for the ruler; None if no record has any of the
    keys."""
    values_of = {key: [value for r in train if (value := metric_of(r, key)) is not None] for key in spec.keys}
    shown = any if spec.unusual else bool
    present = {key: name for key, name in spec.keys.items() if shown(values_of[key])}
    drawn, legend, values, dotted = [], [], [], ""
    for color, (key, name) in zip(COLORS, present.items(), strict=False):
        recorded = [(float(r["step"]), metric_of(r, key)) for r in train]
        points = [(step, None if value is None else spec.scale * float(value)) for step, value in recorded]
        drawn.append(Series(points=points, color=color, smooth=spec.smooth and not key.endswith("max")))
        values.append([spec.write(v) for _, v in points])
        legend.append(legend_entry(name, color, values[-1][-1]))
    for color, (key, name) in zip(DOT_COLORS, spec.held_out.items(), strict=False):
        headline = Headline(key)
        if judged := [(r, value) for r in evals if (value := headline.value(r)) is not None]:
            dots: list[tuple[float, float | None]] = [(float(r["step"]), value) for r, value in judged]
            bounds = [headline.bounds(r) if color == DOT_COLORS[0] else None for r, _ in judged]  # two overlap
            spread = [pair or (value, value) for pair, (_, value) in zip(bounds, judged, strict=True)]
            drawn.append(Series(points=dots, color=color, spread=spread))
            dotted = dotted or f"; dots: held-out{', with 95 % interval' if any(bounds) else ''}"
            legend.append(legend_entry(name, color, spec.write(judged[-1][1])))
    ends = SHARE if spec.share_if_possible and in_unit_interval(drawn) else spec.ends
    size = LARGE_SIZE if large else SMALL_SIZE
    svg = line_chart(drawn, label=f"{spec.title} by step", zero=spec.zero, ends=ends, size=size)
    return card(spec.title, f"{spec.explanation}{dotted}", svg, legend, values, list(present)) if svg else None


def in_unit_interval(series: Iterable[Series]) -> bool:
    numbers = (v for s in series for v in (*(y for _, y in s.points if y is not None), *sum(s.spread, ())))
    return all(0 <= v <= 1 for v in numbers)


def sets_card(train: Sequence[Record], evals: Sequence[Record]) -> Card | None:
    """Return a chart with the curve of each held-out set; None without sets."""
    drawn, legend, values = [], [], []
    names = dict.fromkeys(name for record in evals for name in named_sets(record))
    for color, name in zip(COLORS, names, strict=False):
        results = {int(r["step"]): sets[name] for r in evals if name in (sets := named_sets(r))}
        headline = Headline.of(results.values())
        points = [(float(step), headline.value(result)) for step, result in results.items()]
        drawn.append(Series(points=points, color=color, dots=True))
        by_step = {int(x): three(y) for x, y in points}
        values.append([by_step.get(int(r["step"]), NONE) for r in train])
        legend.append(legend_entry(name, color, three(points[-1][1])))
    svg = line_chart(drawn, label="Held-out sets by step", zero=True, size=SMALL_SIZE)
    more = f"; {len(names) - len(COLORS)} more in metrics.jsonl" if len(names) > len(COLORS) else ""
    text = f"accuracy, or mean reward, of the sets of eval.sets{more}"
    return card("Held-out sets", text, svg, legend, values, ["accuracy"]) if svg else None


def prompts_card(train: Sequence[Record]) -> Card:
    """Return stacked bars of a step's prompts by outcome; the ruler also shows their origin: used + dropped + carried
    over = generated + carried in."""
    reasons = sorted({reason for r in train for reason, n in dropped_prompts(r).items() if n and reason != "uniform"})
    bars = {
        "used": ("a", column(train, "prompts_used")),
        "dropped: uniform": ("e", column(train, "prompts_dropped_uniform")),
        "carried over": ("c", column(train, "prompts_carried")),
    }
    other = [float(sum(dropped_prompts(r).get(name, 0) for name in reasons)) for r in train]
    bars[f"dropped: {', '.join(reasons).replace('_', ' ')}"] = ("b", other)
    bars = {name: bar for name, bar in bars.items() if name == "used" or any(bar[1])}
    sources = {"generated": column(train, "prompts_generated"), "carried in": [float(carried_in(r)) for r in train]}
    shown = bars | {name: ("", values) for name, values in sources.items() if any(values)}
    explanation = "of a step, by outcome; a bar is what was generated and what the step before carried over"
    return bar_card("Prompts", explanation, "prompts_", train, bars, shown, count)


def phase_cards(train: Sequence[Record]) -> list[Card]:
    """Return stacked bars of the seconds of a step by phase; the time outside all phases is `other`."""
    bars = {
        name: (color, column(train, key)) for key, (name, color) in PHASES.items() if any(r.get(key) for r in train)
    }
    if not bars:
        return []
    phases = [values for _, values in bars.values()]
    others = [max(0.0, total - sum(parts)) for total, *parts in zip(column(train, "time/step"), *phases, strict=True)]
    bars["other"] = ("e", others)
    return [bar_card("Time per phase", "seconds of a step", "time/", train, bars, bars, duration)]


def waiting_cards(train: Sequence[Record]) -> list[Card]:
    """Return the cards in page order; queue, ages, idle shares and lags only for an asynchronous run."""
    cards: list[Card] = []
    if any("async/queue" in r for r in train):
        cards = [card for spec in ASYNCHRONOUS if (card := line_card(spec, train, ())) is not None]
    return [*cards, *lag_cards(train), *phase_cards(train)]


def lag_cards(train: Sequence[Record]) -> list[Card]:
    """Return stacked bars of the trained tokens by lag; the largest lags share the last colour."""
    lags = sorted({int(key.removeprefix(LAG)) for r in train for key in r if key.startswith(LAG) and r[key]})
    if not lags:
        return []
    several, rest = (lags, []) if len(lags) <= len(COLORS) else (lags[: len(COLORS) - 1], lags[len(COLORS) - 1 :])
    shares = {f"lag {lag}": [_share(r, [lag]) for r in train] for lag in several}
    if rest:
        shares[f"lag {rest[0]} or more"] = [_share(r, rest) for r in train]
    tokens = [float(r.get("tokens/trained") or 0) for r in train]
    total = sum(tokens) or 1.0
    means = {name: sum(a * b for a, b in zip(values, tokens, strict=True)) / total for name, values in shares.items()}
    over_the_run = ", ".join(f"{name} {percent(mean)}" for name, mean in means.items())
    explanation = f"% of the tokens trained, by policy versions behind; over the run {over_the_run}"
    bars: Bars = {
        name: (color, [100 * value for value in values])
        for color, (name, values) in zip(COLORS, shares.items(), strict=False)
    }
    return [bar_card("Lag", explanation, LAG, train, bars, bars, InPercent(1))]


def _share(record: Record, lags: Sequence[int]) -> float:
    return sum(float(record.get(f"{LAG}{lag}") or 0) for lag in lags)


def column(train: Sequence[Record], key: str) -> list[float]:
    return [float(r.get(key) or 0) for r in train]


def bar_card(
    title: str,
    explanation: str,
    key: str,
    train: Sequence[Record],
    bars: Bars,
    shown: Bars,
    write: Callable[[float | None], str],
) -> Card:
    """Return a card of stacked `bars` with a legend of everything `shown`; `key` is the common part of metric names."""
    steps = [float(r["step"]) for r in train]
    series = [Series(points=list(zip(steps, values, strict=True)), color=color) for color, values in bars.values()]
    legend = [legend_entry(name, color, write(values[-1])) for name, (color, values) in shown.items()]
    texts = [[write(v) for v in values] for _, values in shown.values()]
    svg = bar_chart(series, label=f"{title}, of each step", size=SMALL_SIZE)
    return card(title, explanation, svg, legend, texts, [key])


def legend_entry(name: str, color: str, last: str) -> dict[str, str]:
    return {"name": name, "color": f"var(--{color})" if color else "transparent", "last": last}


def card(
    title: str, explanation: str, svg: str, legend: list[dict[str, str]], values: list[list[str]], keys: Sequence[str]
) -> Card:
    """Build a card; with its `query` the viewer shows only these metrics."""
    keys = keys or [""]
    stem = keys[0].rpartition("/")[0]
    shared = stem if stem and len(keys) > 1 and all(key.startswith(stem) for key in keys) else keys[0]
    facts: Card = {"title": title, "explanation": explanation, "svg": svg, "legend": legend, "values": values}
    return facts | {"query": f"?q={quote(shared)}"}
