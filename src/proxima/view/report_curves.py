"""The charts of report.html: which metrics they draw, how they format values, and which runs have which chart."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.evaluate.headline import PART, Headline
from proxima.runtime.held_out import named_sets
from proxima.runtime.metric_names import metric_of
from proxima.runtime.observer import Record
from proxima.runtime.step_metrics import idle_shares
from proxima.view.chart import Series, bar_chart, line_chart
from proxima.view.formatting import NONE, count, duration, fixed, percent, rate, significant
from proxima.view.log_lines import carried_in, dropped_prompts, prompts_used

Card = dict[str, Any]
Bars = dict[str, tuple[str, list[float]]]  # name: its colour and its values
COLORS = ("a", "b", "c", "d", "e")
RECENT = 10  # steps of the running acceptance rate
DOTS = "dots: held-out, with 95 % interval"
LATE = ("stale", "surplus")  # prompts that had been accepted before they were dropped


@dataclass(frozen=True)
class Curves:
    """A chart of the report: its title, the keys of metrics.jsonl with their names, the format of a value, and the
    explanation below the title. `held_out`: evaluations have the first key, too, and are drawn as dots."""

    title: str
    keys: Mapping[str, str]
    write: Callable[[float | None], str]
    explanation: str
    zero: bool = True
    smooth: bool = True
    scale: float = 1.0
    held_out: bool = False


def three(value: float | None) -> str:
    return fixed(value, 3)


def in_percent(places: int) -> Callable[[float | None], str]:
    return lambda value: f"{fixed(value, places)} %"


CURVES = (
    Curves(
        "Reward",
        {"reward/mean": "training"},
        three,
        f"mean over the valid completions of a step; {DOTS}",
        zero=False,
        held_out=True,
    ),
    Curves("Accuracy", {"accuracy": "training"}, three, f"share of right answers; {DOTS}", held_out=True),
    Curves("Length", {"length/mean": "mean", "length/max": "longest"}, lambda v: fixed(v, 1), "tokens of a completion"),
    Curves("Entropy", {"entropy/mean": "mean"}, three, "nats per token; at 0 the policy no longer explores"),
    Curves(
        "KL", {"approx_kl": "behavior to current"}, significant, "nats per token: how far an update moved the policy"
    ),
    Curves(
        "Masked", {"masked_fraction": "masked"}, in_percent(2), "% of tokens, outside the trust region", scale=100.0
    ),
    Curves("Gradient norm", {"grad_norm": "before clipping"}, three, "of the whole update"),
    Curves(
        "Speed",
        {"tokens_per_second/generate": "generate", "tokens_per_second/train": "train"},
        rate,
        "tokens per second",
    ),
    Curves(
        "Loss", {"loss": "surrogate"}, significant, "in policy gradients levels say little; jumps matter", zero=False
    ),
    Curves(
        "Truncated",
        {"truncated_fraction": "truncated"},
        in_percent(1),
        "% of completions that reached the length limit",
        scale=100.0,
    ),
    Curves(
        "Engine against trainer", {"mismatch/log_prob_absdiff_mean": "mean |Δ log-prob|"}, significant, "nats per token"
    ),
    Curves(
        "Weights at the engine",
        {"sync/probe_mean": "mean |Δ log-prob|", "sync/probe_max": "largest"},
        significant,
        "nats, of the probe's tokens after each hand-over: the engine against the trainer, on the same weights",
        smooth=False,
    ),
    Curves("Learning rate", {"lr": "lr"}, significant, "at the last update of the step", smooth=False),
)
# Of training on a fixed data set.
EXAMPLE_CURVES = (
    Curves("Loss", {"loss": "training"}, three, f"of the examples of a step; {DOTS}", zero=False, held_out=True),
    Curves(
        "Accuracy",
        {"accuracy": "training", "rewards/accuracies": "training"},
        three,
        f"share of right choices; {DOTS}",
        held_out=True,
    ),
    Curves(
        "Margin",
        {"rewards/margins": "training"},
        three,
        f"implicit reward of the chosen completion minus that of the rejected one; {DOTS}",
        held_out=True,
    ),
    Curves(
        "Implicit rewards",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
        three,
        "beta times the log-ratio to the reference; both may fall while the margin grows",
    ),
    Curves(
        "Log-probs",
        {"logps/chosen": "chosen", "logps/rejected": "rejected"},
        lambda v: fixed(v, 1),
        "nats of a completion, summed over its tokens",
        zero=False,
    ),
    *(curves for curves in CURVES if curves.title in ("Gradient norm", "Learning rate", "Speed")),
)


def age_curves(explanation: str) -> Curves:
    """The chart of the ages of groups, in policy versions."""
    ages = {"age/mean": "mean", "age/max": "oldest"}
    return Curves("Age", ages, lambda v: fixed(v, 2), explanation, smooth=False)


# For steps that used other prompts than they generated.
REFILL = (
    Curves(
        "Acceptance",
        {"acceptance": "accepted"},
        in_percent(1),
        f"% of the generated and scored prompts that no selection dropped, over {RECENT} steps",
        smooth=False,
        scale=100.0,
    ),
    Curves(
        "Generation batches", {"gen_batches": "generated"}, count, "until the batch of the step was full", smooth=False
    ),
    age_curves("policy versions since the groups were generated; 0 means in this step"),
)
KEPT = Curves(
    "Completions",
    {"completions": "generated", "kept": "kept for the update"},
    count,
    "of a step; pruning trains on a part of them",
    smooth=False,
)
PHASES = {  # key: name and colour
    "time/generate": ("generate", "a"),
    "time/score": ("score", "c"),
    "time/train": ("train", "b"),
    "time/publish": ("publish", "d"),
}
# Who waits for whom.
LAG = "lag/"
QUEUE = Curves(
    "Queue",
    {"async/queue": "finished", "async/running": "running"},
    count,
    "groups that wait for their step, and prompts that are generated or scored, at the end of a step",
    smooth=False,
)
AGE = age_curves("policy versions by which the oldest token of a group is behind, when its step takes it")
IDLE = Curves(
    "Idle",
    {"idle/trainer": "trainer", "idle/engine": "engine"},
    in_percent(1),
    "% of a step: the trainer waits for groups; the engine generates nothing",
    scale=100.0,
)


def all_charts(train: Sequence[Record], evals: Sequence[Record]) -> list[Card]:
    """The cards in the order of the page; charts whose metrics the run lacks are left out."""
    if any("examples" in r for r in train):
        return [card for spec in EXAMPLE_CURVES if (card := line_card(spec, train, evals)) is not None]
    records = with_derived(train)
    specs: list[Curves] = [*CURVES[:1], *named_part(evals), *reward_parts(train), *CURVES[1:]]
    if any(r.get("dropped/pruned") for r in train):
        specs.append(KEPT)
    cards = [card for spec in specs if (card := line_card(spec, records, evals)) is not None]
    if any(prompts_used(r) for r in train):
        varies = {
            "Age": any(r.get("age/max") for r in train) and not any("async/queue" in r for r in train),
            "Generation batches": any((r.get("gen_batches") or 1) > 1 for r in train),
        }
        more = (line_card(spec, records, evals) for spec in REFILL if varies.get(spec.title, True))
        cards += [prompts_card(train), *(card for card in more if card is not None)]
    if (sets := sets_card(train, evals)) is not None:
        cards.insert(2, sets)
    return cards


def with_derived(train: Sequence[Record]) -> list[Record]:
    """The records with metrics that follow from their counts: `acceptance` (a share, over the last ten steps) and
    `kept` (completions)."""
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
    """A chart of the part of the reward by which the run is judged, if it is one."""
    headline = Headline.of(evals)
    if headline.key.startswith(PART):
        explanation = f"mean, before its weight; {DOTS}"
        yield Curves(headline.name, {headline.key: "training"}, three, explanation, zero=False, held_out=True)


def reward_parts(train: Sequence[Record]) -> Iterator[Curves]:
    """A chart of the mean of each reward, where there are several; as many as there are colours."""
    keys = dict.fromkeys(key for r in train for key in r if key.startswith("reward/part/"))
    names = [key.removeprefix("reward/part/") for key in keys]
    names = [name for name in names if "/" not in name]  # further metrics of a reward have scales of their own
    if len(names) > 1:
        shown = {f"reward/part/{name}": name for name in names[: len(COLORS)]}
        rest = f"; {len(names) - len(shown)} more in metrics.jsonl" if len(names) > len(shown) else ""
        yield Curves("Reward parts", shown, three, f"mean of each reward, before its weight{rest}", zero=False)


def line_card(spec: Curves, train: Sequence[Record], evals: Sequence[Record]) -> Card | None:
    """The chart, its legend, and each series' value at each step for the ruler. None when no record has any of the
    keys."""
    present = {key: name for key, name in spec.keys.items() if any(metric_of(r, key) is not None for r in train)}
    drawn, legend, values = [], [], []
    for color, (key, name) in zip(COLORS, present.items(), strict=False):
        known = [(float(r["step"]), metric_of(r, key)) for r in train]
        points = [(step, None if value is None else spec.scale * float(value)) for step, value in known]
        drawn.append(Series(points=points, color=color, smooth=spec.smooth and not key.endswith("max")))
        values.append([spec.write(v) for _, v in points])
        legend.append(legend_entry(name, color, values[-1][-1]))
    headline = Headline(next(iter(spec.keys)))
    if spec.held_out and (judged := [(r, value) for r in evals if (value := headline.value(r)) is not None]):
        dots: list[tuple[float, float | None]] = [(float(r["step"]), value) for r, value in judged]
        spread = [headline.bounds(r) or (value, value) for r, value in judged]
        drawn.append(Series(points=dots, color="b", spread=spread))
        legend.append(legend_entry("held-out", "b", three(judged[-1][1])))
    svg = line_chart(drawn, label=f"{spec.title} by step", zero=spec.zero, unit_interval=spec.title == "Accuracy")
    return card(spec.title, spec.explanation, svg, legend, values) if svg else None


def sets_card(train: Sequence[Record], evals: Sequence[Record]) -> Card | None:
    """A chart with the curve of each held-out set; None without sets."""
    drawn, legend, values = [], [], []
    names = dict.fromkeys(name for record in evals for name in named_sets(record))
    for color, name in zip(COLORS, names, strict=False):
        known = {int(r["step"]): sets[name] for r in evals if name in (sets := named_sets(r))}
        headline = Headline.of(known.values())
        points = [(float(step), headline.value(one)) for step, one in known.items()]
        drawn.append(Series(points=points, color=color, dots=True))
        by_step = {int(x): three(y) for x, y in points}
        values.append([by_step.get(int(r["step"]), NONE) for r in train])
        legend.append(legend_entry(name, color, three(points[-1][1])))
    svg = line_chart(drawn, label="Held-out sets by step", zero=True)
    more = f"; {len(names) - len(COLORS)} more in metrics.jsonl" if len(names) > len(COLORS) else ""
    text = f"accuracy, or mean reward, of the sets of eval.sets{more}"
    return card("Held-out sets", text, svg, legend, values) if svg else None


def prompts_card(train: Sequence[Record]) -> Card:
    """What became of the prompts of a step, stacked; the ruler also shows where they came from: used + dropped +
    carried over = generated + carried in."""
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
    return bar_card("Prompts", explanation, "Prompts of a step", train, bars, shown, count)


def phase_cards(train: Sequence[Record]) -> list[Card]:
    """The seconds of a step by phase, stacked; the time outside all phases is `other`."""
    bars = {
        name: (color, column(train, key)) for key, (name, color) in PHASES.items() if any(r.get(key) for r in train)
    }
    if not bars:
        return []
    phases = [values for _, values in bars.values()]
    others = [max(0.0, total - sum(parts)) for total, *parts in zip(column(train, "time/step"), *phases, strict=True)]
    bars["other"] = ("e", others)
    return [bar_card("Time per phase", "seconds of a step", "Seconds of a step by phase", train, bars, bars, duration)]


def waiting_cards(train: Sequence[Record]) -> list[Card]:
    """The cards in the order of the page; queue, ages and lags of an asynchronous run."""
    records = [{**r, **idle_shares(r)} for r in train]
    specs = [QUEUE, AGE, IDLE] if any("async/queue" in r for r in train) else [IDLE]
    cards = [card for spec in specs if (card := line_card(spec, records, ())) is not None]
    return [*cards, *lag_cards(train), *phase_cards(train)]


def lag_cards(train: Sequence[Record]) -> list[Card]:
    """The tokens trained by lag, stacked; the largest lags share the last colour."""
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
    return [bar_card("Lag", explanation, "Tokens of a step by lag", train, bars, bars, in_percent(1))]


def _share(record: Record, lags: Sequence[int]) -> float:
    return sum(float(record.get(f"{LAG}{lag}") or 0) for lag in lags)


def column(train: Sequence[Record], key: str) -> list[float]:
    return [float(r.get(key) or 0) for r in train]


def bar_card(
    title: str,
    explanation: str,
    label: str,
    train: Sequence[Record],
    bars: Bars,
    shown: Bars,
    write: Callable[[float | None], str],
) -> Card:
    """Stacked `bars`, and a legend of all that is `shown`."""
    steps = [float(r["step"]) for r in train]
    series = [Series(points=list(zip(steps, values, strict=True)), color=color) for color, values in bars.values()]
    legend = [legend_entry(name, color, write(values[-1])) for name, (color, values) in shown.items()]
    texts = [[write(v) for v in values] for _, values in shown.values()]
    return card(title, explanation, bar_chart(series, label=label), legend, texts)


def legend_entry(name: str, color: str, last: str) -> dict[str, str]:
    return {"name": name, "color": f"var(--{color})" if color else "transparent", "last": last}


def card(title: str, explanation: str, svg: str, legend: list[dict[str, str]], values: list[list[str]]) -> Card:
    return {"title": title, "explanation": explanation, "svg": svg, "legend": legend, "values": values}
