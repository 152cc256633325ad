"""Chained weights, a held trust region and the question pool on answers of 64 tokens: `make evidence CLAIM=beyond`."""

from collections.abc import Sequence

from evidence.curves import Outcome, Run, after, cell_mean, difference, mean, print_table, run_claim, told, total

MARGIN = 0.02
FIXED = ("tenth", "half", "default", "double", "fourfold")
RATES = ("1e-4", "4e-4")


def report(runs: Sequence[Run]) -> None:
    chained(of(runs, "chained"))
    hold(of(runs, "hold"))
    pool(of(runs, "pool"))


def of(runs: Sequence[Run], sweep: str) -> list[Run]:
    """The runs of a sweep."""
    return [run for run in runs if run["sweep"] == sweep]


def chained(runs: Sequence[Run]) -> None:
    learning = mean("reward", 60)
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward of all steps": (learning, 3),
        "of the last 10": (mean("reward", 60, 10), 3),
        "mean age": (mean("age", 60), 1),
        "CPU seconds of the trainer": (lambda run: total(run, "cpu"), 0),
    }
    print_table(runs, ("decoupled", "sdp", "chained"), columns)
    print(
        f"- CH1, mean reward, chained − decoupled: {told(difference(runs, 'chained', 'decoupled', learning), MARGIN)}"
    )
    print(f"- CH2, mean reward, chained − sdp: {told(difference(runs, 'chained', 'sdp', learning), MARGIN)}")


def hold(runs: Sequence[Run]) -> None:
    last = mean("reward", 30, 10)
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward of the last 10 steps": (last, 3),
        "of all steps": (mean("reward", 30), 3),
        "masked": (mean("masked", 30), 4),
    }
    for rate in RATES:
        cells = {name: f"{name},lr={rate}" for name in (*FIXED, "held")}
        print_table(runs, list(cells.values()), columns)
        best = max(FIXED, key=lambda name: mean_of(runs, cells[name], last))
        found = difference(runs, cells["held"], cells[best], last)
        print(f"- HO1, lr {rate}, last 10 steps, held − {best}: {told(found, MARGIN)}")


def mean_of(runs: Sequence[Run], cell: str, outcome: Outcome) -> float:
    """The mean of a cell over its seeds; −1 before a run of it has ended."""
    found = cell_mean(runs, cell, outcome)
    if found is None:
        return -1.0
    return found.mean


def pool(runs: Sequence[Run]) -> None:
    columns: dict[str, tuple[Outcome, int]] = {
        "groups generated for one used": (per_used, 2),
        "held-out accuracy": (after, 3),
        "tokens generated": (lambda run: total(run, "generated"), 0),
    }
    print_table(runs, ("plain", "pool"), columns)
    print(f"- PO2, held-out accuracy, pool − plain: {told(difference(runs, 'pool', 'plain', after), MARGIN)}")


def per_used(run: Run) -> float:
    """Groups generated over groups used, of the whole run."""
    return total(run, "prompts") / max(1.0, total(run, "prompts_used"))


if __name__ == "__main__":
    run_claim(__file__, report, "chained", "hold", "pool")
