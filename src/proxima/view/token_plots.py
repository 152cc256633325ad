"""Figures of a run's tokens: CPPO's trust region along a completion, and how far tokens moved, by probability."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from proxima.config.describe import kind_of
from proxima.config.validate import load_recipe
from proxima.core.surrogate.cppo import Cppo
from proxima.core.token_reasons import band_of
from proxima.data import UserError
from proxima.data.columns import Bools, Floats
from proxima.data.flow import prompt_name
from proxima.experiments.divergences import (
    Calibration,
    TrainedCompletion,
    as_batch,
    measurable,
    read_algorithm,
    read_trained,
)
from proxima.view.chart import Color, Drawing, Figure, panel_axes, round_ticks
from proxima.view.surrogate_plot import parse_surrogate

MARGINS = (52, 14, 86, 56)


@dataclass(frozen=True, kw_only=True)
class ThresholdFigure(Drawing):
    """CPPO's trust region along a completion: each token's weighted divergence, the two parts of its threshold, and the
    tokens that each of them masks."""

    completion: TrainedCompletion
    weighted: Floats  # [T] Z_t
    prefix: Floats  # [T] δ + budget W_{t-1} − S_{t-1}, what the prefix leaves
    allowed: Floats  # [T] c_t, the smaller one of δ and `prefix`
    masked: Bools  # [T] the surrogate drops the token
    spec: Cppo
    used: str = ""  # kind of the run's surrogate if it is not CPPO, which makes the figure hypothetical
    salt = "threshold"
    size = (760, 360)

    @classmethod
    def of(cls, completion: TrainedCompletion, spec: Cppo, used: str = "") -> "ThresholdFigure":
        batch = as_batch([completion])
        weighted, allowed = (values.numpy() for values in spec.threshold(batch))
        masked = ~spec(batch).keep.numpy()
        band = band_of(spec, batch)
        assert band is not None
        columns = band.columns
        prefix = (spec.delta + columns["prefix_budget"] - columns["prefix_spent"]).numpy()
        return cls(
            completion=completion,
            spec=spec,
            used=used,
            weighted=weighted,
            prefix=prefix,
            allowed=allowed,
            masked=masked,
        )

    @property
    def title(self) -> str:
        it = self.completion
        if it is EXAMPLE:
            return "CPPO's threshold along a completion (an example, A > 0)"
        if self.used:
            what = f"hypothetical, the run used {self.used}: "
        else:
            what = ""
        place = f"step {it.step}, {prompt_name(it.prompt_uid)}, sample {it.sample}"
        return f"{what}{place}, advantage {float(it.advantage[-1]):.3g}"

    @property
    def outcome(self) -> str:
        return "would be masked" if self.used else "masked"

    @property
    def remark(self) -> str:
        spent = int((self.allowed < self.spec.delta).sum())
        return (
            f"{int(self.masked.sum())} of {len(self.masked)} tokens {self.outcome} (δ = {self.spec.delta:g}, δ_b = "
            f"{self.spec.delta_b:g}, w_min = {self.spec.w_min:g}); the prefix had spent its budget at {spent}"
        )

    def draw(self, figure: Figure, color: Color) -> None:
        position = np.arange(1, len(self.weighted) + 1)
        axes = panel_axes(figure, MARGINS)
        delta = self.spec.delta
        low = min(0.0, *self.allowed)
        positive = np.maximum(self.allowed, 0)
        axes.fill_between(position, 0, positive, color=color("c"), alpha=0.15, linewidth=0, label="kept")
        axes.fill_between(position, positive, delta, color=color("b"), alpha=0.15, linewidth=0, label="spent before")
        axes.axhline(0, color=color("muted"), linewidth=1)
        axes.axhline(delta, color=color("ink"), linewidth=1.2, linestyle=(0, (6, 3)), label="δ")
        axes.plot(position, self.prefix, color=color("b"), linewidth=1.2, linestyle=(0, (2, 2)), label="δ + δ_b W − S")
        axes.plot(position, self.allowed, color=color("b"), linewidth=2, label="threshold c, the smaller one")
        flat = self.weighted > delta
        for where, name, label in (
            (~self.masked, "e", "Z = w |π − μ|"),
            (self.masked & flat, "k7", f"{self.outcome}: above δ"),
            (self.masked & ~flat, "k5", "by the prefix alone"),
        ):
            axes.bar(position[where], self.weighted[where], color=color(name), label=label, width=0.5, zorder=2)
        highest = max(delta, *self.weighted, *self.allowed)
        axes.set(xlim=(0, len(position) + 1), ylim=(low, 1.15 * highest), xlabel="position of the token")
        axes.set_title(self.title, pad=48)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, frameon=False)
        round_ticks(axes.xaxis, 8, integer=True)
        round_ticks(axes.yaxis, 5)
        figure.text(MARGINS[0] / self.size[0], 10 / self.size[1], self.remark, color=color("muted"))


#: Divergences that meet every case: below both bounds, above δ, and above what the prefix has left alone.
EXAMPLE_DIVERGENCES = np.asarray(
    [
        *(0.01, 0.03, 0.02, 0.05, 0.01, 0.18, 0.02, 0.04, 0.05, 0.09, 0.07, 0.08),
        *(0.02, 0.01, 0.01, 0.02, 0.04, 0.01, 0.02, 0.05, 0.01, 0.01, 0.02, 0.01),
    ],
    np.float32,
)
EXAMPLE = TrainedCompletion(
    step=0,
    prompt_uid=0,
    sample=0,
    behavior_log_prob=np.log(np.full_like(EXAMPLE_DIVERGENCES, 0.5)),
    log_prob=np.log(0.5 + EXAMPLE_DIVERGENCES),
    advantage=np.ones_like(EXAMPLE_DIVERGENCES),
)


def most_masked(completions: list[TrainedCompletion], spec: Cppo) -> TrainedCompletion:
    """Return the completion with the most masked tokens; of several, the longest."""
    batch = as_batch(completions)
    masked = (~spec(batch).keep).long()
    counts = [int(part.sum()) for part in masked.split(batch.lengths.tolist())]
    return max(zip(counts, completions, strict=True), key=lambda pair: (pair[0], len(pair[1].log_prob)))[1]


def threshold_of_run(
    run_folder: Path | None, step: int | None, completion: str | None, surrogate: str | None, *, import_code: bool
) -> ThresholdFigure:
    """The figure of a completion of a run, or of the example; print a note if the run used another surrogate.

    Args:
        run_folder: None: the example.
        completion: UID:SAMPLE; None: the one with the most masked tokens.
        surrogate: a cppo with its fields; None: the run's.

    Raises:
        UserError: the surrogate has no such threshold, or the run no such completion.
    """
    chosen = None
    if surrogate:
        chosen = measurable(parse_surrogate(surrogate))
    if surrogate and chosen is None:
        raise UserError(f"--surrogate {surrogate}: only cppo with a finite delta and divergence binary_tv fits")
    if run_folder is None:
        if step is not None or completion:
            raise UserError("--step and --completion need a run; give its folder")
        return ThresholdFigure.of(EXAMPLE, chosen or Cppo())
    completions = read_trained(run_folder, step)
    algorithm = read_algorithm(run_folder, import_code=import_code)
    own_surrogate = algorithm.surrogate
    spec = chosen or measurable(own_surrogate) or Cppo()
    keys = {f"{each.prompt_uid}:{each.sample}": each for each in reversed(completions)}
    if completion and completion not in keys:
        near = ", ".join(f"{each.prompt_uid}:{each.sample}" for each in completions[:3])
        raise UserError(f"--completion {completion}: no such trained completion; there are {near} …")
    if own_surrogate == spec:
        used = ""
    else:
        used = kind_of(own_surrogate or algorithm.preference)
    if isinstance(own_surrogate, Cppo):
        pairs = ((field.name, getattr(own_surrogate, field.name), getattr(spec, field.name)) for field in fields(Cppo))
        used = ",".join([used, *(f"{name}={value}" for name, value, drawn in pairs if value != drawn)])
    if used and not surrogate:
        said = f"the run used {used}, which has no such threshold: the figure shows what cppo would have done"
        print(said, file=sys.stderr)
    if completion:
        drawn = keys[completion]
    else:
        drawn = most_masked(completions, spec)
    return ThresholdFigure.of(drawn, spec, used)


PANEL_MARGINS = ((52, 388, 34, 70), (426, 14, 34, 70))  # around each of the two panels
MOST_POINTS = 2500  # maximum points drawn
RARE = 0.1  # below this probability a token is called rare


@dataclass(frozen=True)
class DivergenceFigure(Drawing):
    """Ratio and difference of sampled tokens over their probability: why a trust region of ratios is noisy for rare
    tokens (arXiv 2602.04879, Fig. 1). `behavior` [N] μ, `policy` [N] π, and the run's name."""

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
        difference = self.policy - self.behavior
        return (
            f"{len(rare):,} tokens. Standard deviation for μ < {RARE:g} and above: "
            f"ratio {_deviation(self.ratio[rare]):.2g} and {_deviation(self.ratio[~rare]):.2g}, "
            f"difference {_deviation(difference[rare]):.2g} and {_deviation(difference[~rare]):.2g}"
        )

    def draw(self, figure: Figure, color: Color) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator

        every = slice(None, None, max(1, len(self.behavior) // MOST_POINTS))
        panels = (("ratio π / μ", self.ratio, "a", 1.0), ("difference π − μ", self.policy - self.behavior, "b", 0.0))
        for (title, values, name, centre), margins in zip(panels, PANEL_MARGINS, strict=True):
            axes = panel_axes(figure, margins)
            axes.axhline(centre, color=color("muted"), linewidth=1)
            axes.plot(
                self.behavior[every],
                values[every],
                ".",
                color=color(name),
                alpha=0.5,
                markersize=2.5,
                markeredgewidth=0,
            )
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_major_locator(LogLocator(100))
            axes.set_xlabel("probability μ of the sampled token")
            axes.set_title(title)
        figure.text(PANEL_MARGINS[0][0] / self.size[0], 12 / self.size[1], self.remark, color=color("muted"))


def _deviation(values: Floats) -> float:
    """The standard deviation; 0 without a value."""
    return float(values.std()) if len(values) else 0.0


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
    """Format what was measured, and the thresholds that follow."""
    levels = []
    for level, value in calibration.quantiles.items():
        name = "max" if level == 1 else f"P{100 * level:g}"
        levels.append(f"{name} {value:.2g}")
    spec = calibration.spec
    lines = [
        f"{calibration.tokens:,} tokens of {calibration.completions:,} completions, {folder}",
        f"|π − μ|   {'  '.join(levels)}",
        f"δ   = {calibration.delta:g}   the {100 * (1 - share):g}th percentile of the weighted divergence w |π − μ|",
    ]
    if calibration.tokens * share < 1:
        few = f"{calibration.tokens:,} tokens are too few for this percentile: it is the largest value"
        lines.append(f"WARNING {few}; use more steps, with {math.ceil(1 / share):,} tokens or more")
    return [
        *lines,
        f"δ_b = {calibration.delta_b:g}   the 90th percentile of |π − μ|",
        f"beyond the threshold: {calibration.masked:.3%} of the tokens with these, {calibration.masked_now:.3%} with "
        f"delta={spec.delta:g} delta_b={spec.delta_b:g}",
        f"use it: algorithm.surrogate.delta={calibration.delta:g} algorithm.surrogate.delta_b={calibration.delta_b:g}",
    ]
