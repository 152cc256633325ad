"""The charts of report.html that say who waits for whom: queue, ages, lags, idle shares, seconds of a step."""

from collections.abc import Sequence

from proxima.runtime.observer import Record
from proxima.runtime.step_metrics import idle_shares
from proxima.view.formatting import count, percent
from proxima.view.report_curves import (
    COLORS,
    Bars,
    Card,
    Curves,
    age_curves,
    bar_card,
    in_percent,
    line_card,
    phase_cards,
)

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
