"""The charts of report.html: which figures of metrics.jsonl are drawn, how they are written, and when a run has them at
all."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxima.view.chart import Series, bar_chart, line_chart
from proxima.view.formatting import count, duration, fixed, rate, significant
from proxima.view.log_lines import bounds, carried_in, dropped_prompts

Record = Mapping[str, Any]
Card = dict[str, Any]
COLORS = ("var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--e)")
RECENT = 10  # steps of the running acceptance, as many as the collector remembers
LATE = ("stale", "surplus")  # reasons of prompts that had been accepted before they were dropped


@dataclass(frozen=True)
class ChartSpec:
    """A chart of the report: its title, the keys of metrics.jsonl with their names, how a value is written, what it
    tells."""

    title: str
    keys: Mapping[str, str]
    write: Callable[[float | None], str]
    tells: str
    zero: bool = True
    smooth: bool = True
    scale: float = 1.0


CURVES = (
    ChartSpec(
        "Reward",
        {"reward/mean": "mean"},
        lambda v: fixed(v, 3),
        "mean over the valid completions of a step",
        zero=False,
    ),
    ChartSpec(
        "Accuracy",
        {"accuracy": "training"},
        lambda v: fixed(v, 3),
        "share of right answers; dots: held-out, with 95 % interval",
    ),
    ChartSpec(
        "Length", {"length/mean": "mean", "length/max": "longest"}, lambda v: fixed(v, 1), "tokens of a completion"
    ),
    ChartSpec(
        "Entropy",
        {"entropy/mean": "mean"},
        lambda v: fixed(v, 3),
        "nats a token; at 0 the policy has stopped exploring",
    ),
    ChartSpec(
        "KL", {"approx_kl": "behavior to current"}, significant, "nats a token, how far an update moved the policy"
    ),
    ChartSpec(
        "Masked",
        {"masked_fraction": "masked"},
        lambda v: f"{fixed(v, 2)} %",
        "% of tokens, outside the trust region",
        scale=100.0,
    ),
    ChartSpec("Gradient norm", {"grad_norm": "before clipping"}, lambda v: fixed(v, 3), "of the whole update"),
    ChartSpec(
        "Speed", {"tokens_per_second/generate": "generate", "tokens_per_second/train": "train"}, rate, "tokens a second"
    ),
    ChartSpec(
        "Loss", {"loss": "surrogate"}, significant, "its level says little in policy gradients; jumps do", zero=False
    ),
    ChartSpec(
        "Cut off",
        {"truncated_fraction": "cut off"},
        lambda v: f"{fixed(v, 1)} %",
        "% of completions, at the length limit",
        scale=100.0,
    ),
    ChartSpec(
        "Engine against trainer", {"rollout_replay_logp_absdiff_mean": "mean |Δ log-prob|"}, significant, "nats a token"
    ),
    ChartSpec("Learning rate", {"lr": "lr"}, significant, "at the last update of the step", smooth=False),
)
# Where a step used other prompts than it generated.
REFILL = (
    ChartSpec(
        "Acceptance",
        {"acceptance": "accepted"},
        lambda v: f"{fixed(v, 1)} %",
        f"% of the generated and scored prompts that no selection dropped, over {RECENT} steps",
        smooth=False,
        scale=100.0,
    ),
    ChartSpec(
        "Generation batches", {"gen_batches": "made"}, count, "until the batch of the step was full", smooth=False
    ),
    ChartSpec(
        "Age",
        {"age/mean": "mean", "age/max": "oldest"},
        lambda v: fixed(v, 2),
        "of the groups used, in policy versions: 0 was generated in the step itself",
        smooth=False,
    ),
)
KEPT = ChartSpec(
    "Completions",
    {"completions": "generated", "kept": "left for the update"},
    count,
    "of a step: pruning trains on a part of what was generated",
    smooth=False,
)
PHASES = {"time/generate": "generate", "time/score": "score", "time/train": "train", "time/publish": "publish"}
PHASE_COLORS = {
    "generate": "var(--a)",
    "train": "var(--b)",
    "score": "var(--c)",
    "publish": "var(--d)",
    "other": "var(--e)",
}


def all_charts(train: Sequence[Record], evals: Sequence[Record]) -> list[Card]:
    """The cards in the order of the page; those of which the run has no figures are left out."""
    more = with_derived(train)
    curves: list[ChartSpec] = [*CURVES[:1], *parts_of(train), *CURVES[1:]]
    if any(r.get("dropped/pruned") for r in train):
        curves.append(KEPT)
    cards = [card for curve in curves if (card := chart(curve, more, evals)) is not None]
    if any(differs(r) for r in train):
        many = {
            "Age": any(r.get("age/max") for r in train),
            "Generation batches": any((r.get("gen_batches") or 1) > 1 for r in train),
        }
        shown = (chart(curve, more, evals) for curve in REFILL if many.get(curve.title, True))
        cards += [prompts_chart(train), *(card for card in shown if card is not None)]
    return cards + phase_chart(train)


def differs(record: Record) -> bool:
    """The step used other prompts than it generated."""
    used, generated, carried = (record.get(f"prompts_{name}") or 0 for name in ("used", "generated", "carried"))
    return bool(generated) and (used != generated or bool(carried))


def with_derived(train: Sequence[Record]) -> list[Record]:
    """The records with what follows from their counts: `acceptance` (share, of the last ten steps), `kept`
    (completions)."""
    recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
    found: list[Record] = []
    for r in train:
        more: dict[str, float] = {}
        drops = dropped_prompts(r)
        if generated := int(r.get("prompts_generated") or 0):
            accepted = generated - sum(
                n for reason, n in drops.items() if reason not in LATE
            )  # where an earlier version left no count
            recent.append((int(r.get("prompts_accepted", accepted)), generated - int(r.get("prompts_unscored") or 0)))
            if judged := sum(n for _, n in recent):
                more["acceptance"] = sum(n for n, _ in recent) / judged
        if r.get("prompts") and r.get("completions") and r.get("prompts_used") is not None:
            size = r["completions"] / r["prompts"]
            left = sum(n or 0 for key, n in r.items() if key.startswith("dropped/"))
            more["kept"] = (r["prompts_used"] + sum(drops.values())) * size - left
        found.append({**r, **more})
    return found


def parts_of(train: Sequence[Record]) -> Iterator[ChartSpec]:
    """A chart of what each reward gave, where there are several; those beyond the five colours are left out."""
    found = dict.fromkeys(
        key.removeprefix("reward/part/") for r in train for key in r if key.startswith("reward/part/")
    )
    names = [name for name in found if "/" not in name]  # what a reward says besides its value has a scale of its own
    if len(names) > 1:
        shown = {f"reward/part/{name}": name for name in names[: len(COLORS)]}
        left = f"; {len(names) - len(shown)} more in metrics.jsonl" if len(names) > len(shown) else ""
        yield ChartSpec(
            "Reward parts", shown, lambda v: fixed(v, 3), f"mean of each reward, before its weight{left}", zero=False
        )


def chart(curve: ChartSpec, train: Sequence[Record], evals: Sequence[Record]) -> Card | None:
    """A card: the drawing, and each series' value at each step for the ruler. None when no record has any of the
    keys."""
    known = {key: name for key, name in curve.keys.items() if any(r.get(key) is not None for r in train)}
    drawn, legend, values = [], [], []
    for color, (key, name) in zip(COLORS, known.items(), strict=False):
        points = [(float(r["step"]), None if r.get(key) is None else curve.scale * float(r[key])) for r in train]
        drawn.append(Series(name=name, points=points, color=color, smooth=curve.smooth and not key.endswith("max")))
        written = [curve.write(v) for _, v in points]
        legend.append({"name": name, "color": color, "last": written[-1]})
        values.append(written)
    if curve.title == "Accuracy" and (held := [r for r in evals if r.get("accuracy") is not None]):
        spread = [bounds(r) for r in held]
        points = [(float(r["step"]), float(r["accuracy"])) for r in held]
        drawn.append(Series(name="held-out", points=points, color="var(--b)", spread=spread))
        legend.append({"name": "held-out", "color": "var(--b)", "last": fixed(held[-1]["accuracy"], 3)})
    if not drawn:
        return None
    picture = line_chart(
        drawn, label=f"{curve.title} by step", zero=curve.zero, unit_interval=curve.title == "Accuracy"
    )
    return (
        {"title": curve.title, "tells": curve.tells, "svg": picture, "legend": legend, "values": values}
        if picture
        else None
    )


def prompts_chart(train: Sequence[Record]) -> Card:
    """Where the prompts of a step went, stacked; for the ruler also whence: used + dropped + carried on = generated +
    carried in."""
    reasons = sorted({reason for r in train for reason, n in dropped_prompts(r).items() if n and reason != "uniform"})
    columns = {
        "used": [float(r.get("prompts_used") or 0) for r in train],
        "dropped: uniform": [float(r.get("prompts_dropped_uniform") or 0) for r in train],
        "carried on": [float(r.get("prompts_carried") or 0) for r in train],
        f"dropped: {', '.join(reasons).replace('_', ' ')}": [
            float(sum(dropped_prompts(r).get(name, 0) for name in reasons)) for r in train
        ],
    }
    shown = {name: column for name, column in columns.items() if name == "used" or any(column)}
    origin = {
        "generated": [float(r.get("prompts_generated") or 0) for r in train],
        "carried in": [float(carried_in(r)) for r in train],
    }
    steps = [float(r["step"]) for r in train]
    colors = dict(zip(columns, ("var(--a)", "var(--e)", "var(--c)", "var(--b)"), strict=True))
    series = [
        Series(name=name, points=list(zip(steps, column, strict=True)), color=colors[name])
        for name, column in shown.items()
    ]
    every = {**shown, **{name: column for name, column in origin.items() if any(column)}}
    legend = [
        {"name": name, "color": colors.get(name, "transparent"), "last": count(column[-1])}
        for name, column in every.items()
    ]
    values = [[count(v) for v in column] for column in every.values()]
    tells = "of a step, as they ended; a bar is what was generated and what came in from the step before"
    return {
        "title": "Prompts",
        "tells": tells,
        "svg": bar_chart(series, label="Prompts of a step"),
        "legend": legend,
        "values": values,
    }


def phase_chart(train: Sequence[Record]) -> list[Card]:
    """Where the seconds of a step went, stacked; what no phase names is `other`."""
    known = {key: name for key, name in PHASES.items() if any(r.get(key) for r in train)}
    if not known:
        return []
    columns = {name: [float(r.get(key) or 0.0) for r in train] for key, name in known.items()}
    whole = [float(r.get("time/step") or 0.0) for r in train]
    columns["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(whole, *columns.values(), strict=True)]
    steps = [float(r["step"]) for r in train]
    series = [
        Series(name=n, points=list(zip(steps, c, strict=True)), color=PHASE_COLORS[n]) for n, c in columns.items()
    ]
    legend = [{"name": s.name, "color": s.color, "last": duration(s.points[-1][1])} for s in series]
    picture = bar_chart(series, label="Seconds of a step by phase")
    values = [[duration(v) for _, v in s.points] for s in series]
    return [
        {"title": "Time per phase", "tells": "seconds of a step", "svg": picture, "legend": legend, "values": values}
    ]
