"""Measure |pi - mu| of the sampled tokens, and the thresholds of cppo that follow.

A RECIPE is trained for a few steps without a trust region, in runs/NAME-calibration or the given folder. For a RUN,
its recorded rollouts are used, which its own trust region has constrained.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from proxima.cli.output import AsJson, Overrides, Recipe, print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError
from proxima.data.recipe_files import find_recipe

if TYPE_CHECKING:
    from proxima.lab.divergences import Calibration

STEPS = 2
IMPORT_CODE = "of a RUN: import its surrogate where it is a class outside proxima, which runs its code"


def calibrate(
    recipe: Recipe,
    override: Overrides = (),
    *,
    steps: Annotated[int | None, Argument("steps to train for a recipe; those of train.steps=N, or 2", "N")] = None,
    share: Annotated[float, Argument("share of the tokens beyond delta; 0.001", "P")] = 0.001,
    import_code: Annotated[bool, Argument(IMPORT_CODE)] = False,
    as_json: AsJson = False,
) -> None:
    """Print the thresholds of a recipe, or of a run folder."""
    if not 0 < share < 1:
        raise UserError(f"--share {share:g} must be between 0 and 1")
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps} must be at least 1")
    place = Path(recipe)
    is_run = (place / "run.sqlite").is_file()
    if is_run and override:
        raise UserError(f"{place} is a run, whose settings are fixed; give its recipe to measure others")
    from proxima.config import load_recipe
    from proxima.core.surrogate import Cppo
    from proxima.lab.divergences import Calibration, measurable, read_algorithm, read_trained

    if is_run:
        algorithm = read_algorithm(place, import_code=import_code)
    else:
        config = load_recipe(recipe, override).config
        algorithm = config.algorithm
        of_override = any(word.partition("=")[0].strip() == "train.steps" for word in override)
        steps = steps or (config.train.steps if of_override else STEPS)
    spec = measurable(algorithm.surrogate) or Cppo()
    folder = place if is_run else warm_up(recipe, override, steps or STEPS)

    calibration = Calibration.of(read_trained(folder), spec, share)
    if as_json:
        print_json({**vars(calibration), "spec": vars(calibration.spec), "folder": str(folder)})
    else:
        print("\n".join(lines(calibration, share, folder)))


def warm_up(recipe: str, overrides: Sequence[str], steps: int) -> Path:
    """Train the recipe's first steps with an unbounded surrogate on every completion; return the run's folder."""
    from proxima.cli.train import train_recipe
    from proxima.config.recipe_reader import with_values

    named = [word.partition("=")[2] for word in overrides if word.startswith("folder=")]
    folder = Path(named[-1]) if named else Path("runs") / f"{Path(recipe).stem}-calibration"
    settings = {
        "folder": json.dumps(str(folder)),
        "train.steps": steps,
        "algorithm.surrogate": "{kind: cppo, delta: .inf, delta_b: .inf}",
        "algorithm.skip_zero_advantage": "false",
        "eval.before": "false",
        "eval.after": "false",
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    words = with_values(overrides, settings)
    if code := train_recipe(str(find_recipe(recipe)), words, overwrite=not named, quiet=True):
        raise SystemExit(code)
    return folder


def lines(calibration: "Calibration", share: float, folder: Path) -> list[str]:
    """The lines of human-readable output."""
    names = {level: "max" if level == 1 else f"P{100 * level:g}" for level in calibration.quantiles}
    levels = "  ".join(f"{names[level]} {value:.2g}" for level, value in calibration.quantiles.items())
    spec = calibration.spec
    few = calibration.tokens * share < 1
    remedy = (
        f"of {calibration.tokens:,} tokens that is the largest; raise --steps for {math.ceil(1 / share):,} and more"
    )
    return [
        f"{calibration.tokens:,} tokens of {calibration.completions:,} completions, {folder}",
        f"|π − μ|   {levels}",
        f"δ   = {calibration.delta:g}   the {100 * (1 - share):g}th percentile of the weighted divergence w |π − μ|",
        *([f"WARNING {remedy}"] if few else []),
        f"δ_b = {calibration.delta_b:g}   the 90th percentile of |π − μ|",
        f"beyond the threshold: {calibration.masked:.3%} of the tokens with these, {calibration.masked_now:.3%} with "
        f"delta={spec.delta:g} delta_b={spec.delta_b:g}",
        f"use it: algorithm.surrogate.delta={calibration.delta:g} algorithm.surrogate.delta_b={calibration.delta_b:g}",
    ]


COMMAND = calibrate
