"""The tables, verdicts and figure of `evidence/mechanism`, from its results: `python -m evidence.mechanism.summary`."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from statistics import fmean
from typing import Any

from evidence.curves import shown, told
from evidence.figure import Line, Panel, draw
from evidence.mechanism.run import ASKED, BINDING, BINDING_RESULTS, MASKS, POSITIONS, RESULTS, SETTINGS, UPDATES
from proxima.experiments.cell_statistics import mean_over_seeds
from proxima.system.jsonl import read_lines

Batch = dict[str, Any]  # its lines by mask


def main() -> None:
    found = by_start(RESULTS)
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
        for text, (needed, outcome) in OUTCOMES.items():
            values = [outcome(batches[number]) for number in sorted(batches) if needed <= batches[number].keys()]
            mean = mean_over_seeds(values)
            said = told(mean, MARGIN, "batches") if text.startswith("M3") else shown(mean)
            print(f"- {text}, {len(values)} batches: {said}")
        for title, names in (("the real trust regions", REGIONS), ("all masks", tuple(MASKS))):
            means = [[fmean(last(b, name, key) for b in whole) for name in names] for key in ("kl", "return")]
            values = [correlation(b, lambda step: step["kl"], names) for b in whole]
            over = f"over their means {spearman(*means):.2f} of {len(names)} masks"
            print(f"- M1 among {title}: {shown(mean_over_seeds(values))}; {over}")
        panels += panels_of(start, whole)
    draw(RESULTS.with_name("mechanism.svg"), panels)
    positions()


def by_start(results: Path) -> dict[str, dict[int, Batch]]:
    """The lines of a file by start model, batch and mask."""
    found: dict[str, dict[int, Batch]] = {name: defaultdict(dict) for name in SETTINGS}
    for line in read_lines(results):
        found[line["start"]][line["batch"]][line["mask"]] = line
    return found


def drawn(xs: Sequence[int], values: Sequence[Sequence[float]]) -> Line:
    """At each place the mean over batches, with its interval."""
    means = [mean_over_seeds(of) for of in values]
    return xs, [m.mean for m in means if m], [m.half or 0.0 for m in means if m]


def panels_of(start: str, batches: Sequence[Batch]) -> list[Panel]:
    """Drift by update, drift by position after the last one, return by update."""

    def lines(xs: Sequence[int], value: Callable[[Any, int], float]) -> dict[str, Line]:
        made: dict[str, Line] = {}
        for name in MASKS:  # in the same colors in each row
            made[name] = drawn(xs, [[value(masks[name]["steps"], x) for masks in batches] for x in xs])
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


def positions() -> None:
    """The share of tokens masked by eighth of the answer, mean over updates and batches."""
    found = by_start(BINDING_RESULTS)
    panels = list[Panel]()
    for start, _, masks in BINDING:
        if not (batches := found[start]):
            continue
        late = [half_gap(batch["cppo"]) - half_gap(batch["dppo_tuned"]) for batch in batches.values()]
        print(f"\n### {start}, where masks bind, {len(batches)} batches\n")
        print("| mask | last half − first half |\n|---|---|")
        for name in masks:
            print(f"| `{name}` | {shown(mean_over_seeds([half_gap(batch[name]) for batch in batches.values()]))} |")
        print(f"\n- M4, cppo − dppo_tuned: {told(mean_over_seeds(late), 0.0, 'batches')}")
        for sign in ("positive", "negative"):
            lines: dict[str, Line] = {}
            for name in masks:
                shares = [by_eighth(batch[name], f"masked_{sign}_at") for batch in batches.values()]
                lines[name] = drawn(range(1, POSITIONS + 1), list(zip(*shares, strict=True)))
            title = f"{start}: masked, A {'>' if sign == 'positive' else '<'} 0"
            panels.append(Panel(title=title, x="eighth of the answer", y="share of tokens", lines=lines))
    if panels:
        draw(BINDING_RESULTS.with_suffix(".svg"), panels, columns=2)


def by_eighth(line: Any, key: str) -> list[float]:
    """A share by eighth of the answer, mean over the updates."""
    return [sum(step[key][part] for step in line["steps"]) / len(line["steps"]) for part in range(POSITIONS)]


def half_gap(line: Any) -> float:
    """The share of tokens masked in the last half of an answer less that in its first."""
    shares = by_eighth(line, "masked_at")
    return (sum(shares[POSITIONS // 2 :]) - sum(shares[: POSITIONS // 2])) / (POSITIONS // 2)


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


def correlation(batch: Batch, drift: Callable[[Any], float], names: Sequence[str] = ()) -> float:
    """Of drift and return after the last update, over masks, or those with these names."""
    ends = [batch[name]["steps"][-1] for name in names or batch]
    return spearman([drift(end) for end in ends], [end["return"] for end in ends])


COMPARED = {"cppo", "dppo_tuned"}
REGIONS = ("ppo", "dppo", "cppo", "gspo", "dppo_tuned")  # methods that keep a run from falling to nothing at 64 tokens
MARGIN = 0.02
OUTCOMES: dict[str, tuple[Set[str], Callable[[Batch], float]]] = {  # with the masks that a batch must have
    "M1, correlation of KL and return": (MASKS.keys(), lambda b: correlation(b, lambda step: step["kl"])),
    "of KL over the first half of an answer": (
        MASKS.keys(),
        lambda b: correlation(b, lambda step: sum(step["kl_at"][: POSITIONS // 2])),
    ),
    "M2, logarithm of the ratio of KL, cppo / dppo_tuned": (
        COMPARED,
        lambda b: math.log(last(b, "cppo", "kl") / last(b, "dppo_tuned", "kl")),
    ),
    "M3, return of cppo − dppo_tuned": (
        COMPARED,
        lambda b: last(b, "cppo", "return") - last(b, "dppo_tuned", "return"),
    ),
    "return of cppo − dppo": ({"cppo", "dppo"}, lambda b: last(b, "cppo", "return") - last(b, "dppo", "return")),
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
