"""Corrections against engines of growing mismatch: `make evidence CLAIM=mismatch`."""

from collections.abc import Sequence
from pathlib import Path

from evidence.curves import Outcome, Run, difference, mean, panel, print_table, run_claim, told, total
from evidence.figure import draw

STEPS, MARGIN, WINDOW = 60, 0.02, 5
DOSES = {"int4": "engine=weights=int4", "noise 1": "engine=noise=1", "int3": "engine=weights=int3"}
ARMS = ("none", "token", "masked", "geometric", "veto", "centered")
CONTROLS = ("bf16", "bf16_token", "float32", "still_int4", "still_noise")


def report(runs: Sequence[Run]) -> None:
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward of all steps": (mean("reward", STEPS), 3),
        "of the last five": (mean("reward", STEPS, last=5), 3),
        "|log π − log μ|, first five": (lambda run: total(run, "gap", 0, 5) / 5, 4),
        "last five": (mean("gap", STEPS, last=5), 4),
        "k3, last five": (mean("k3", STEPS, last=5), 4),
    }
    cells = [f"{arm},{dose}" for dose in DOSES.values() for arm in ARMS]
    print_table(runs, [*cells, *CONTROLS], columns)
    print("| dose | arm | arm − none, mean reward | collapsed by step 20, 40, 60 |\n|---|---|---|---|")
    for name, dose in DOSES.items():
        for arm in ARMS:
            found = difference(runs, f"{arm},{dose}", f"none,{dose}", mean("reward", STEPS))
            lead = told(found, MARGIN) if arm != "none" else ""
            times = [collapse(run) for run in runs if run["cell"] == f"{arm},{dose}"]
            print(f"| {name} | {arm} | {lead} | {' '.join(f'{1 - surviving(times, at):.2f}' for at in (20, 40, 60))} |")
    panels = [
        panel(named(runs, dose), ARMS, "reward", STEPS, title=name, y="share right") for name, dose in DOSES.items()
    ]
    draw(Path(__file__).with_name("mismatch.svg"), panels)


def named(runs: Sequence[Run], dose: str) -> list[Run]:
    return [dict(run) | {"cell": run["cell"].partition(",")[0]} for run in runs if run["cell"].endswith(f",{dose}")]


def collapse(run: Run) -> int | None:
    """The first step at which the mean reward of five steps is below half of the largest such mean before."""
    means = [total(run, "reward", at - WINDOW, at) / WINDOW for at in range(WINDOW, len(run["reward"]) + 1)]
    for i in range(1, len(means)):
        if means[i] < max(means[:i]) / 2:
            return i + WINDOW
    return None


def surviving(times: Sequence[int | None], step: int) -> float:
    """Kaplan and Meier's estimate of the share of runs that have not collapsed at a step. Runs without a collapse are
    censored at their last step, which all of them share, so it is the share itself."""
    return sum(time is None or time > step for time in times) / len(times) if times else float("nan")


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", "controls")
