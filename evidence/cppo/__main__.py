"""CPPO against DPPO by length, its controls, and the largest stable learning rate: `make evidence CLAIM=cppo`."""

from collections.abc import Sequence
from pathlib import Path

from evidence.curves import Run, by_seed, cell_mean, difference, mean, panel, run_claim, shown, told
from evidence.figure import draw
from proxima.experiments.cell_statistics import SeedMean, mean_over_seeds

STEPS, MARGIN = 30, 0.02
LENGTHS = ("16", "64", "200", "400")
MASKS, UPDATES, RATES = ("cppo", "dppo", "none"), (1, 4, 8), ("5.0e-5", "1.0e-4", "1.5e-4", "2.0e-4")
FIRST_STAGE = 5  # the last seed of the rates' first stage
CPPO_200, DPPO_200 = "200,algorithm=cppo", "200,algorithm=dppo"
JUDGED = ("weights_alone", "dppo_tuned", "none")  # controls of C2
LEARNING, MASKED = mean("reward", STEPS), mean("masked", STEPS)


def report(runs: Sequence[Run]) -> None:
    print("\n| tokens | CPPO, mean reward | DPPO | masked, CPPO | DPPO | CPPO − DPPO |\n" + "|---" * 6 + "|")
    for length in LENGTHS:
        cppo, dppo = (f"{length},algorithm={name}" for name in ("cppo", "dppo"))
        cells = [shown(cell_mean(runs, cell, outcome)) for outcome in (LEARNING, MASKED) for cell in (cppo, dppo)]
        print(f"| {length} | {' | '.join(cells)} | {told(difference(runs, cppo, dppo, LEARNING), MARGIN)} |")
    print(f"\n- C1, lead at 400 tokens − lead at 16: {told(growth(runs), MARGIN)}")
    print("\n| control, 200 tokens | mean reward | masked | CPPO − control |\n|---|---|---|---|")
    for cell in (*JUDGED, "reversed", "budget_alone", "static", DPPO_200, CPPO_200):
        cells = [shown(cell_mean(runs, cell, outcome)) for outcome in (LEARNING, MASKED)]
        lead = told(difference(runs, CPPO_200, cell, LEARNING), MARGIN) if cell != CPPO_200 else ""
        print(f"| {'C2 ' if cell in JUDGED else ''}`{cell}` | {' | '.join(cells)} | {lead} |")
    later = [run for run in runs if run["seed"] > FIRST_STAGE]
    for seeds, of in (("all", runs), ("new", later)):
        print(f"\n| C3, stable of {seeds} seeds, at learning rate | {' | '.join(RATES)} |")
        print("|---" * (1 + len(RATES)) + "|")
        for updates in UPDATES:
            for mask in MASKS:
                print(f"| {updates} updates a step, `{mask}` | " + " | ".join(stable(of, mask, updates)) + " |")
    print("\n| CPPO − DPPO, mean reward, 64 tokens, at learning rate | " + " | ".join(RATES) + " |")
    print("|---" * (1 + len(RATES)) + "|")
    for updates in UPDATES:
        cells = []
        for rate in RATES:
            cppo, dppo = (f"{mask},updates_per_step={updates},lr={rate}" for mask in MASKS[:2])
            cells.append(told(difference(runs, cppo, dppo, LEARNING), MARGIN))
        print(f"| {updates} updates a step | {' | '.join(cells)} |")
    panels = []
    for length in LENGTHS:
        short = [
            dict(run) | {"cell": run["cell"].rpartition("=")[2]} for run in runs if run["cell"].startswith(f"{length},")
        ]
        panels.append(panel(short, ("cppo", "dppo"), "reward", STEPS, title=f"{length} tokens", y="mean reward"))
    draw(Path(__file__).with_name("cppo.svg"), panels, columns=2)


def growth(runs: Sequence[Run]) -> SeedMean | None:
    """By how much CPPO's lead at 400 tokens is larger than that at 16, by seed."""
    names = [f"{length},algorithm={name}" for length in ("400", "16") for name in ("cppo", "dppo")]
    cells = [by_seed(runs, name, LEARNING) for name in names]
    seeds = sorted(set.intersection(*(set(cell) for cell in cells)))
    long, long_dppo, short, short_dppo = ([cell[seed] for seed in seeds] for cell in cells)
    columns = zip(long, long_dppo, short, short_dppo, strict=True)
    return mean_over_seeds([(a - b) - (c - d) for a, b, c, d in columns])


def stable(runs: Sequence[Run], mask: str, updates: int) -> list[str]:
    """Of each rate, the seeds that end no lower than they began, and how many there are."""
    counts = []
    for rate in RATES:
        cell = f"{mask},updates_per_step={updates},lr={rate}"
        ended = [mean("reward", STEPS, last=5)(run) >= run["reward"][0] for run in runs if run["cell"] == cell]
        counts.append(f"{sum(ended)} of {len(ended)}")
    return counts


if __name__ == "__main__":
    run_claim(__file__, report, "lengths", "controls", "rates")
