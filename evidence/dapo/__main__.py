"""The four parts of DAPO in half of a factorial: `make evidence CLAIM=dapo`."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from evidence.curves import (
    Outcome,
    Run,
    after,
    at_look,
    by_seed,
    mean,
    panel,
    print_table,
    run_claim,
    shown,
    told,
    total,
)
from evidence.figure import draw
from proxima.experiments.cell_statistics import SeedMean, mean_over_seeds

STEPS, MARGIN = 30, 0.02
CELLS = ("none", "cd", "ct", "co", "dt", "do", "to", "cdto")
PARTS = {"c": "clip-higher", "d": "dynamic sampling", "t": "token-level loss", "o": "soft overlong punishment"}


def report(runs: Sequence[Run]) -> None:
    panels = []
    sweeps = (("sweep", "12 to 21 terms, 5 seeds"), ("known", "15 and 21 terms, 5 seeds"))
    for look, (sweep, title) in enumerate(sweeps, 1):
        print(f"\n## {title}")
        of_sweep = [run for run in runs if run["sweep"] == sweep]
        if of_sweep:
            tables(of_sweep, look)
            panels.append(panel(of_sweep, CELLS, "accuracy", STEPS, title=title, y="share right"))
    draw(Path(__file__).with_name("dapo.svg"), panels)


def tables(runs: Sequence[Run], look: int) -> None:
    tokens = min(total(run, "generated") for run in runs)
    columns: dict[str, tuple[Outcome, int]] = {
        "held-out accuracy": (after, 3),
        "right, all steps": (mean("accuracy", STEPS), 3),
        "entropy at the end": (mean("entropy", STEPS, last=5), 3),
        "tokens an answer at the end": (mean("length", STEPS, last=5), 1),
        "cut off at the end": (mean("cut_off", STEPS, last=5), 3),
        "generated tokens": (lambda run: total(run, "generated"), 0),
    }
    print_table(runs, CELLS, columns)
    print("| effect of a part | at equal updates | at equal generated tokens | entropy | length | held-out |")
    print("|---" * 6 + "|")
    for letter, name in PARTS.items():
        judged = (effect(runs, letter, f) for f in (mean("accuracy", STEPS), until(tokens)))
        effects = [told(at_look(found, look), MARGIN) for found in judged]
        ends = (mean("entropy", STEPS, last=5), mean("length", STEPS, last=5), after)
        effects += [shown(effect(runs, letter, f)) for f in ends]
        print(f"| {name} | {' | '.join(effects)} |")


def until(tokens: float) -> Outcome:
    """The share of right answers in the five steps before a run has generated as many tokens."""

    def outcome(run: Run) -> float:
        steps: int = sum(so_far <= tokens for so_far in accumulate(run["generated"]))
        return total(run, "accuracy", max(steps - 5, 0), steps) / min(5, steps)

    return outcome


def effect(runs: Sequence[Run], part: str, outcome: Outcome) -> SeedMean | None:
    """Mean of the cells with a part less that of the cells without, by seed."""
    values = {cell: by_seed(runs, cell, outcome) for cell in CELLS}
    seeds = sorted(set.intersection(*(set(of) for of in values.values())))
    signs = {cell: 1 if part in cell and cell != "none" else -1 for cell in CELLS}
    return mean_over_seeds([sum(signs[cell] * values[cell][seed] for cell in CELLS) / 4 for seed in seeds])


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", "known")
