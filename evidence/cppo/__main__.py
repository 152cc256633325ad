"""CPPO against DPPO by length, its controls, and the largest stable learning rate: `make evidence CLAIM=cppo`."""

from collections.abc import Sequence

from evidence.curves import Run, cell_mean, difference, mean, run_claim, shown, told

STEPS, MARGIN = 30, 0.02
LENGTHS = ("16", "64", "200", "400")
MASKS, UPDATES, RATES = ("cppo", "dppo", "reinforce"), (1, 4, 8), ("5.0e-5", "1.0e-4", "1.5e-4", "2.0e-4")
TREATMENT = "200,algorithm=cppo"  # of `lengths`
STABLE = 0.3  # mean reward of the last five steps


def report(runs: Sequence[Run]) -> None:
    learning, masked = mean("reward", STEPS), mean("masked", STEPS)
    print(
        "\n| tokens | CPPO, mean reward of all steps | DPPO | masked, CPPO | DPPO | C1, CPPO − DPPO |\n"
        + "|---" * 6
        + "|"
    )
    for length in LENGTHS:
        cppo, dppo = (f"{length},algorithm={name}" for name in ("cppo", "dppo"))
        cells = [shown(cell_mean(runs, cell, outcome)) for outcome in (learning, masked) for cell in (cppo, dppo)]
        print(f"| {length} | {' | '.join(cells)} | {told(difference(runs, cppo, dppo, learning), MARGIN)} |")
    print("\n| control, 200 tokens | mean reward | masked | C2, CPPO − control |\n|---|---|---|---|")
    for cell in ("200,algorithm=dppo", "dppo_tuned", "reversed", "budget_alone", "weights_alone", "static", "none"):
        cells = [shown(cell_mean(runs, cell, outcome)) for outcome in (learning, masked)]
        print(f"| `{cell}` | {' | '.join(cells)} | {told(difference(runs, TREATMENT, cell, learning), MARGIN)} |")
    print("\n| C3, largest stable learning rate | " + " | ".join(f"{n} updates a batch" for n in UPDATES))
    print("|---" * (1 + len(UPDATES)) + "|")
    for mask in MASKS:
        print(f"| `{mask}` | " + " | ".join(largest(runs, mask, updates) for updates in UPDATES) + " |")


def largest(runs: Sequence[Run], mask: str, updates: int) -> str:
    """The largest rate up to which every seed ends with a mean reward of at least `STABLE`."""
    stable = "none"
    for rate in RATES:
        cell = f"algorithm={mask},updates_per_step={updates},lr={rate}"
        ends = [mean("reward", STEPS, last=5)(run) for run in runs if run["cell"] == cell]
        if not ends or min(ends) < STABLE:
            break
        stable = rate
    return stable


if __name__ == "__main__":
    run_claim(__file__, report, "lengths", "controls", "rates")
