"""The tables, verdicts and figure of `evidence/mechanism`, from its results: `python -m evidence.mechanism.summary`."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from evidence.curves import shown
from evidence.figure import Line, Panel, draw
from evidence.mechanism.run import ASKED, MASKS, POSITIONS, RESULTS, SETTINGS, UPDATES
from proxima.experiments.seed_statistics import mean_over_seeds
from proxima.system.jsonl import read_lines

Batch = dict[str, Any]  # its lines by mask


def main() -> None:
    found: dict[str, dict[int, Batch]] = {name: defaultdict(dict) for name in SETTINGS}
    for line in read_lines(RESULTS):
        found[line["start"]][line["batch"]][line["mask"]] = line
    panels = list[Panel]()
    for start, batches in found.items():
        whole = [masks for masks in batches.values() if len(masks) == len(MASKS)]
        if not whole:
            continue
        print(f"\n### {start}, {len(whole)} batches with all masks\n")
        print(
            "| mask | return after 1 | best | after 16 | KL of an answer | masked, A > 0 | A < 0 |\n" + "|---" * 7 + "|"
        )
        for name in MASKS:
            print(f"| `{name}` | {' | '.join(row(whole, name))} |")
        print()
        for text, outcome in OUTCOMES.items():
            values = [outcome(batches[number]) for number in sorted(batches)]
            have = [value for value in values if value is not None]
            print(f"- {text}, {len(have)} batches: {shown(mean_over_seeds(have))}")
        panels += panels_of(start, whole)
    draw(RESULTS.with_name("mechanism.svg"), panels)


def panels_of(start: str, batches: Sequence[Batch]) -> list[Panel]:
    """Drift by update, drift by position after the last one, return by update."""

    def lines(xs: Sequence[int], value: Callable[[Any, int], float]) -> dict[str, Line]:
        made: dict[str, Line] = {}
        for name in MASKS:  # in the same colors in each row
            means = [mean_over_seeds([value(masks[name]["steps"], x) for masks in batches]) for x in xs]
            made[name] = (xs, [m.mean for m in means if m], [m.half or 0.0 for m in means if m])
        return made

    updates, parts = range(1, UPDATES + 1), range(1, POSITIONS + 1)
    kl = lines(updates, lambda steps, x: steps[x - 1]["kl"])
    at = lines(parts, lambda steps, x: steps[-1]["kl_at"][x - 1])
    right = lines(ASKED, lambda steps, x: steps[x - 1]["return"])
    return [
        Panel(title=f"{start}: KL(μ‖π)", x="updates", y="nats an answer", log=True, lines=kl),
        Panel(title="after update 16", x="eighth of the answer", y="nats a token", log=True, lines=at),
        Panel(title="return of fresh answers", x="updates", y="share right", lines=right),
    ]


def row(batches: Sequence[Batch], name: str) -> list[str]:
    """The cells of a mask: means over batches with their intervals."""
    runs = [masks[name]["steps"] for masks in batches]
    columns: list[Callable[[Any], float]] = [
        lambda steps: steps[0]["return"],
        lambda steps: max(step["return"] for step in steps if "return" in step),
        lambda steps: steps[-1]["return"],
        lambda steps: steps[-1]["kl"],
        lambda steps: sum(step["masked_positive"] for step in steps) / len(steps),
        lambda steps: sum(step["masked_negative"] for step in steps) / len(steps),
    ]
    return [shown(mean_over_seeds([column(steps) for steps in runs])) for column in columns]


def last(batch: Batch, name: str, key: str) -> float:
    return float(batch[name]["steps"][-1][key])


def correlation(batch: Batch) -> float | None:
    """M1, of a batch with all masks: KL and return after the last update."""
    if len(batch) < len(MASKS):
        return None
    return spearman([last(batch, name, "kl") for name in batch], [last(batch, name, "return") for name in batch])


def log_ratio(batch: Batch) -> float | None:
    """M2: the logarithm of the ratio of KL after the last update."""
    if not {"cppo", "dppo_tuned"} <= batch.keys():
        return None
    return math.log(last(batch, "cppo", "kl") / last(batch, "dppo_tuned", "kl"))


def gain(batch: Batch) -> float | None:
    """M3: the difference of the return after the last update."""
    if not {"cppo", "dppo_tuned"} <= batch.keys():
        return None
    return last(batch, "cppo", "return") - last(batch, "dppo_tuned", "return")


def prefix_correlation(batch: Batch) -> float | None:
    """As M1, of the drift over the first half of an answer."""
    if len(batch) < len(MASKS):
        return None
    drift = [sum(batch[name]["steps"][-1]["kl_at"][: POSITIONS // 2]) for name in batch]
    return spearman(drift, [last(batch, name, "return") for name in batch])


OUTCOMES: dict[str, Callable[[Batch], float | None]] = {
    "M1, correlation of KL and return": correlation,
    "of KL over the first half of an answer": prefix_correlation,
    "M2, logarithm of the ratio of KL, cppo / dppo_tuned": log_ratio,
    "M3, return of cppo − dppo_tuned": gain,
}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; equal values share their mean rank."""
    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    spread = math.sqrt(sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y))
    return sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True)) / spread if spread else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


if __name__ == "__main__":
    main()
