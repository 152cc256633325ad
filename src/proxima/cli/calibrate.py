"""Measure |pi - mu| of the sampled tokens, and the thresholds of cppo that follow.

A RECIPE is trained for a few steps without a trust region, in runs/NAME-calibration or the folder that is given. The
rollouts of a RUN are read as they are: its own trust region has held them.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.cli.output import add_import_code, add_overrides, add_recipe, print_json
from proxima.data import UserError
from proxima.data.recipe_files import find_recipe

if TYPE_CHECKING:
    from proxima.lab.divergences import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_overrides(parser)
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps to train for a recipe; 2")
    share = "share of the tokens beyond delta; 0.001"
    parser.add_argument("--share", type=float, default=0.001, metavar="P", help=share)
    add_import_code(parser, "of a RUN: import its surrogate where it is a class outside proxima, which runs its code")
    parser.add_argument("--json", action="store_true", help="print everything for programs")


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.share < 1:
        raise UserError(f"--share {arguments.share:g} must be between 0 and 1")
    if arguments.steps < 1:
        raise UserError(f"--steps {arguments.steps} must be at least 1")
    place = Path(arguments.recipe)
    is_run = (place / "run.sqlite").is_file()
    if is_run and arguments.override:
        raise UserError(f"{place} is a run, which has its settings; give its recipe to measure others")
    from proxima.config import load_recipe
    from proxima.core.surrogate import Cppo
    from proxima.lab.divergences import Calibration, measurable, read_algorithm, read_trained

    if is_run:
        algorithm = read_algorithm(place, import_code=arguments.import_code)
    else:
        algorithm = load_recipe(arguments.recipe, arguments.override).config.algorithm
    spec = measurable(algorithm.surrogate) or Cppo()
    folder = place if is_run else warm_up(arguments)

    found = Calibration.of(read_trained(folder), spec, arguments.share)
    if arguments.json:
        print_json({**vars(found), "spec": vars(found.spec), "folder": str(folder)})
    else:
        print("\n".join(lines(found, arguments.share, folder)))
    return 0


def warm_up(arguments: argparse.Namespace) -> Path:
    """Train the recipe's first steps with an unbounded surrogate and every completion; the run's folder."""
    from proxima.cli.train import train_recipe

    named = [word.partition("=")[2] for word in arguments.override if word.startswith("folder=")]
    folder = Path(named[-1]) if named else Path("runs") / f"{Path(arguments.recipe).stem}-calibration"
    settings = {
        "folder": json.dumps(str(folder)),
        "train.steps": arguments.steps,
        "algorithm.surrogate": "{kind: cppo, delta: .inf, delta_b: .inf}",
        "algorithm.skip_zero_advantage": "false",
        "eval.before": "false",
        "eval.after": "false",
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    given = [word for word in arguments.override if not word.startswith("folder=")]
    overrides = [*given, *(f"{key}={value}" for key, value in settings.items())]
    if code := train_recipe(str(find_recipe(arguments.recipe)), overrides, overwrite=not named, quiet=True):
        raise SystemExit(code)
    return folder


def lines(found: "Calibration", share: float, folder: Path) -> list[str]:
    """What a person reads."""
    names = {level: "max" if level == 1 else f"P{100 * level:g}" for level in found.quantiles}
    levels = "  ".join(f"{names[level]} {value:.2g}" for level, value in found.quantiles.items())
    spec = found.spec
    few = found.tokens * share < 1
    remedy = f"of {found.tokens:,} tokens that is the largest; raise --steps for {math.ceil(1 / share):,} and more"
    return [
        f"{found.tokens:,} tokens of {found.completions:,} completions, {folder}",
        f"|π − μ|   {levels}",
        f"δ   = {found.delta:g}   the {100 * (1 - share):g}th percentile of the weighted divergence w |π − μ|",
        *([f"WARNING {remedy}"] if few else []),
        f"δ_b = {found.delta_b:g}   the 90th percentile of |π − μ|",
        f"beyond the threshold: {found.masked:.3%} of the tokens with these, {found.masked_now:.3%} with "
        f"delta={spec.delta:g} delta_b={spec.delta_b:g}",
        f"use it: algorithm.surrogate.delta={found.delta:g} algorithm.surrogate.delta_b={found.delta_b:g}",
    ]
