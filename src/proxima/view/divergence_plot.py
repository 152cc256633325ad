"""Ratio and total variation of sampled tokens over their probability: why a trust region of ratios is noisy for rare
tokens (arXiv 2602.04879, Fig. 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from proxima.config.validate import load_recipe
from proxima.core.surrogate.cppo import Cppo
from proxima.data.columns import Floats
from proxima.experiments.divergences import Calibration, TrainedCompletion, measurable, read_algorithm, read_trained
from proxima.view.chart import Color, Drawing, panel_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGINS = ((52, 388, 34, 70), (426, 14, 34, 70))  # around each of the two panels
MOST = 2500  # maximum points drawn
RARE = 0.1  # below this probability a token is called rare


@dataclass(frozen=True)
class DivergenceFigure(Drawing):
    """`behavior` [N] μ and `policy` [N] π, the probabilities of the sampled tokens, and the run's name."""

    behavior: Floats
    policy: Floats
    name: str
    salt = "divergence"
    size = (760, 300)

    @classmethod
    def of(cls, completions: Sequence[TrainedCompletion], name: str) -> "DivergenceFigure":
        behavior = np.concatenate([completion.behavior_log_prob for completion in completions])
        policy = np.concatenate([completion.log_prob for completion in completions])
        return cls(np.exp(behavior), np.exp(policy), name)

    @property
    def title(self) -> str:
        return f"π against μ in {self.name}"

    @property
    def ratio(self) -> Floats:
        """[N] π / μ."""
        return self.policy / self.behavior

    @property
    def remark(self) -> str:
        """The standard deviations of ratio and difference, over rare and over other tokens."""
        rare = self.behavior < RARE
        ratio, difference = (
            [float(values[where].std()) if where.any() else 0.0 for where in (rare, ~rare)]
            for values in (self.ratio, self.policy - self.behavior)
        )
        return (
            f"{len(rare):,} tokens. Standard deviation for μ < {RARE:g} and above: ratio {ratio[0]:.2g} and "
            f"{ratio[1]:.2g}, difference {difference[0]:.2g} and {difference[1]:.2g}"
        )

    def draw(self, figure: "Figure", color: Color) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator

        every = slice(None, None, max(1, len(self.behavior) // MOST))
        panels = (("ratio π / μ", self.ratio, "a", 1.0), ("difference π − μ", self.policy - self.behavior, "b", 0.0))
        for (title, values, name, centre), margins in zip(panels, MARGINS, strict=True):
            axes = panel_axes(figure, margins)
            axes.axhline(centre, color=color("muted"), linewidth=1)
            dots: Any = {"color": color(name), "alpha": 0.5, "markersize": 2.5, "markeredgewidth": 0}
            axes.plot(self.behavior[every], values[every], ".", **dots)
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_major_locator(LogLocator(100))
            axes.set_xlabel("probability μ of the sampled token")
            axes.set_title(title)
        figure.text(MARGINS[0][0] / self.size[0], 12 / self.size[1], self.remark, color=color("muted"))


def surrogate_of(recipe: str, overrides: Sequence[str]) -> Any:
    """The surrogate of a recipe, checked as for a training."""
    return load_recipe(recipe, overrides).config.algorithm.surrogate


def surrogate_of_run(folder: Path, *, import_code: bool) -> Any:
    """The surrogate of a run."""
    return read_algorithm(folder, import_code=import_code).surrogate


def calibrated(
    folder: Path, step: int | None, surrogate: Any, share: float
) -> tuple[list[TrainedCompletion], Calibration]:
    """The trained completions of a run; and the thresholds of cppo that follow, with the fields of the run's surrogate
    if that is a cppo."""
    completions = read_trained(folder, step)
    return completions, Calibration.of(completions, measurable(surrogate) or Cppo(), share)


def threshold_lines(calibration: Calibration, share: float, folder: Path) -> list[str]:
    """What was measured, and the thresholds that follow."""
    names = {level: "max" if level == 1 else f"P{100 * level:g}" for level in calibration.quantiles}
    levels = "  ".join(f"{names[level]} {value:.2g}" for level, value in calibration.quantiles.items())
    spec = calibration.spec
    few = calibration.tokens * share < 1
    remedy = f"of {calibration.tokens:,} tokens that is the largest; more steps give {math.ceil(1 / share):,} and more"
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
