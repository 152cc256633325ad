"""Corrections against engines of growing mismatch: `make evidence CLAIM=mismatch`."""

from collections.abc import Sequence
from pathlib import Path

from evidence.curves import (
    Outcome,
    Run,
    by_seed,
    cell_mean,
    difference,
    mean,
    measured,
    panel,
    print_table,
    run_claim,
    shown,
    told,
    total,
)
from evidence.figure import draw
from proxima.experiments.cell_statistics import mean_over_seeds

STEPS, MARGIN, WINDOW, LEARNED = 60, 0.02, 5, 0.6
DOSES = {"int8": "int8", "int4": "engine=weights=int4", "noise 1": "engine=noise=1", "int3": "engine=weights=int3"}
NO_DOSE = {"int8": "bf16_again"}  # with the build of the model that the arms have; others: bf16
STILL = {"int4": "still_int4", "noise 1": "still_noise"}
ARMS = ("none", "token", "masked", "geometric", "veto", "centered")
CONTROLS = ("bf16", "bf16_again", "bf16_token", "float32", *STILL.values())
LEARNING = mean("reward", STEPS)
MOMENTS: dict[str, Outcome] = {
    "of all steps": LEARNING,
    "of the first": lambda run: float(run["reward"][0]),
    "of the last five": mean("reward", STEPS, last=5),
}


def report(runs: Sequence[Run]) -> None:
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward of all steps": (LEARNING, 3),
        "of the last five": (mean("reward", STEPS, last=5), 3),
        "|log π − log μ|, first ten": (measured("gap", 0, 10), 4),
        "last ten": (measured("gap", STEPS - 10, STEPS), 4),
        "k3, last ten": (measured("k3", STEPS - 10, STEPS), 4),
        "collapsed": (lambda run: float(collapse(run) is not None), 2),
    }
    print_table(runs, [*(f"{arm},{dose}" for dose in DOSES.values() for arm in ARMS), *CONTROLS], columns)
    print("| dose | arm | arm − none, mean reward; none − no dose |\n|---|---|---|")
    for name, dose in DOSES.items():
        no_dose = NO_DOSE.get(name, "bf16")
        print(f"| {name} | none | {told(difference(runs, f'none,{dose}', no_dose, LEARNING), MARGIN)} |")
        for arm in ARMS[1:]:
            print(f"| {name} | {arm} | {told(difference(runs, f'{arm},{dose}', f'none,{dose}', LEARNING), MARGIN)} |")
    print()
    for name, no_dose in NO_DOSE.items():
        for arm in ARMS[1:]:
            found = difference(runs, f"{arm},{DOSES[name]}", no_dose, LEARNING)
            print(f"- {name}: mean reward, {arm} − no dose: {told(found, MARGIN)}")
    for name in STILL:
        cell = f"none,{DOSES[name]}"
        times = {arm: [collapse(run) for run in runs if run["cell"] == arm] for arm in (cell, "bf16")}
        lives = {arm: ", ".join(f"{surviving(of, at):.1f}" for at in (20, 40, 60)) for arm, of in times.items()}
        print(f"- M1, {name}: alive at steps 20, 40, 60: {lives[cell]}; without a dose {lives['bf16']}")
        for text, outcome in MOMENTS.items():
            print(
                f"- M1, {name}: reward {text}, none − no dose: {told(difference(runs, cell, 'bf16', outcome), MARGIN)}"
            )
        found = difference(runs, f"token,{DOSES[name]}", cell, LEARNING)
        print(f"- M2, {name}: mean reward, token − none: {told(found, MARGIN)}")
        grown = {arm: by_seed(runs, arm, growth) for arm in (cell, STILL[name])}
        seeds = sorted(set.intersection(*(set(of) for of in grown.values())))
        apart = mean_over_seeds([grown[cell][seed] - grown[STILL[name]][seed] for seed in seeds])
        gap = f"{shown(cell_mean(runs, cell, growth), 4)}, more than at rest: {shown(apart, 4)}"
        rest = shown(cell_mean(runs, STILL[name], growth), 4)
        print(f"- M3, {name}: growth of the gap {gap}; at rest {rest}")
    panels = [
        panel(named(runs, dose), ARMS, "reward", STEPS, title=name, y="share right") for name, dose in DOSES.items()
    ]
    draw(Path(__file__).with_name("mismatch.svg"), panels, columns=2)


def growth(run: Run) -> float:
    """By how much the gap is larger in the last ten steps than in the first ten, nats a token."""
    return measured("gap", STEPS - 10, STEPS)(run) - measured("gap", 0, 10)(run)


def named(runs: Sequence[Run], dose: str) -> list[Run]:
    return [dict(run) | {"cell": run["cell"].partition(",")[0]} for run in runs if run["cell"].endswith(f",{dose}")]


def collapse(run: Run) -> int | None:
    """The first step at which the mean reward of five steps is below half of the largest such mean before, once one has
    reached LEARNED: a run that never learned can't collapse."""
    means = [total(run, "reward", at - WINDOW, at) / WINDOW for at in range(WINDOW, len(run["reward"]) + 1)]
    for i in range(1, len(means)):
        if (best := max(means[:i])) >= LEARNED and means[i] < best / 2:
            return i + WINDOW
    return None


def surviving(times: Sequence[int | None], step: int) -> float:
    """Kaplan and Meier's estimate of the share of runs that have not collapsed at a step. Runs without a collapse are
    censored at their last step, which all of them share, so it is the share itself."""
    return sum(time is None or time > step for time in times) / len(times) if times else float("nan")


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", "controls", "int8")
