"""Completion pruning and its controls on answers of 64 tokens: `make evidence CLAIM=pruning`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from evidence.curves import (
    Outcome,
    Run,
    after,
    at_look,
    by_seed,
    difference,
    mean,
    panel,
    print_table,
    run_claim,
    shown,
    told,
    total,
)
from evidence.figure import draw
from proxima.experiments.cell_statistics import mean_over_seeds

STEPS = 30
CELLS = ("grpo_16", "pruned", "random", "smallest", "grpo_8", "grpo_4", "grpo_32")
MARGIN = 0.02


def report(runs: Sequence[Run]) -> None:
    learning = mean("reward", STEPS)
    columns: dict[str, tuple[Outcome, int]] = {
        "held-out accuracy": (after, 3),
        "mean reward of all steps": (learning, 3),
        "CPU seconds": (cpu, 0),
        "generation, share of a step": (generation, 2),
        "tokens trained": (lambda run: total(run, "trained"), 0),
    }
    predictions = (
        ("PR1, held-out accuracy, pruned − grpo_16", "pruned", "grpo_16", after),
        ("PR2, mean reward, pruned − random", "pruned", "random", learning),
        ("PR2, mean reward, pruned − smallest", "pruned", "smallest", learning),
        ("PR3, mean reward, pruned − grpo_8", "pruned", "grpo_8", learning),
    )
    for look, (stage, cells) in enumerate((("sweep", CELLS), ("more", CELLS[:3]), ("equal", CELLS[:2])), 1):
        of_stage = [run for run in runs if run["sweep"] == stage]
        print_table(of_stage, cells, columns)
        for text, a, b, outcome in predictions:
            if {a, b} <= set(cells):
                found = difference(of_stage, a, b, outcome)
                print(f"- {text}: {told(at_look(found, look), MARGIN)}")
        whole, pruned = (by_seed(of_stage, cell, cpu) for cell in ("grpo_16", "pruned"))
        ratios = [whole[seed] / pruned[seed] for seed in sorted(whole.keys() & pruned.keys())]
        share = median(by_seed(of_stage, "grpo_16", generation).values())
        law = f"{faster(share):.3f} by the law at a share of generation of {share:.2f}"
        print(f"- PR4, CPU seconds of grpo_16 / pruned: {shown(mean_over_seeds(ratios))}, {law}")
        print(f"- mean reward, pruned − grpo_16: {told(difference(of_stage, 'pruned', 'grpo_16', learning), MARGIN)}")
    first = [run for run in runs if run["sweep"] == "sweep"]
    right = panel(first, CELLS, "reward", STEPS, title="one update a step, 64 tokens, 5 seeds", y="share right")
    draw(Path(__file__).with_name("pruning.svg"), [right])
    amdahl(runs)


def cpu(run: Run) -> float:
    return total(run, "cpu")


def generation(run: Run) -> float:
    """The median share of generation in the time of a step."""
    return float(median(g / (g + t) for g, t in zip(run["generate_seconds"], run["train_seconds"], strict=True)))


def amdahl(runs: Sequence[Run]) -> None:
    """The speed-up of a step by pruning half, at three ratios of the cost of generation to that of training.

    1 / (g + (1 - g) / 2)        g, the share of generation; the update of half as many answers takes half as long
    """
    share = median(by_seed(runs, "grpo_16", generation).values())
    ratio = share / (1 - share)
    print("\n| generation / training | share of generation | a step is faster by |\n|---|---|---|")
    for factor, name in ((1, "as here"), (1 / 4, "a quarter"), (1 / 16, "a sixteenth")):
        g = ratio * factor / (1 + ratio * factor)
        print(f"| {ratio * factor:.2f}, {name} | {g:.2f} | {faster(g):.2f} |")


def faster(g: float) -> float:
    """By what a step is faster if half of the answers are trained, g being the share of generation in it."""
    return 1 / (g + (1 - g) / 2)


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", "more", "equal")
