"""CPPO's trust region along a completion: each token's weighted divergence, the two parts of its threshold, and the
tokens that each of them masks."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proxima.config.describe import kind_of
from proxima.core.surrogate.cppo import Cppo
from proxima.core.token_reasons import band_of
from proxima.data import UserError
from proxima.data.columns import Bools, Floats
from proxima.experiments.divergences import TrainedCompletion, as_batch, measurable, read_algorithm, read_trained
from proxima.view.chart import Color, Drawing, panel_axes, round_ticks
from proxima.view.surrogate_plot import parse_surrogate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGINS = (52, 14, 86, 56)


@dataclass(frozen=True, kw_only=True)
class ThresholdFigure(Drawing):
    """A completion, and the values that the figure shows of it."""

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
        shown = {"weighted": weighted, "prefix": prefix, "allowed": allowed, "masked": masked}
        return cls(completion=completion, spec=spec, used=used, **shown)

    @property
    def title(self) -> str:
        it = self.completion
        if it is EXAMPLE:
            return "CPPO's threshold along a completion (an example, A > 0)"
        what = f"hypothetical, the run used {self.used}: " if self.used else ""
        return (
            f"{what}step {it.step}, prompt {it.prompt_uid}, sample {it.sample}, advantage {float(it.advantage[-1]):.3g}"
        )

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

    def draw(self, figure: "Figure", color: Color) -> None:
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
    chosen = measurable(parse_surrogate(surrogate)) if surrogate else None
    if surrogate and chosen is None:
        raise UserError(f"--surrogate {surrogate}: only cppo with a finite delta and divergence binary_tv fits")
    if run_folder is None:
        if step is not None or completion:
            raise UserError("--step and --completion are of a run; give its folder")
        return ThresholdFigure.of(EXAMPLE, chosen or Cppo())
    completions = read_trained(run_folder, step)
    algorithm = read_algorithm(run_folder, import_code=import_code)
    own_surrogate = algorithm.surrogate
    spec = chosen or measurable(own_surrogate) or Cppo()
    keys = {f"{each.prompt_uid}:{each.sample}": each for each in reversed(completions)}
    if completion and completion not in keys:
        near = ", ".join(f"{each.prompt_uid}:{each.sample}" for each in completions[:3])
        raise UserError(f"--completion {completion}: no such trained completion; there are {near} …")
    used = "" if own_surrogate == spec else kind_of(own_surrogate or algorithm.preference)
    if isinstance(own_surrogate, Cppo):
        pairs = ((field.name, getattr(own_surrogate, field.name), getattr(spec, field.name)) for field in fields(Cppo))
        used = ",".join([used, *(f"{name}={value}" for name, value, drawn in pairs if value != drawn)])
    if used and not surrogate:
        print(f"the run used {used}, which has no such threshold: drawn is what cppo would have done", file=sys.stderr)
    drawn = keys[completion] if completion else most_masked(completions, spec)
    return ThresholdFigure.of(drawn, spec, used)
