"""CPPO's trust region along a completion: each token's weighted divergence, its threshold, and the masked tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from proxima.core.surrogate import Cppo
from proxima.data.columns import Bools, Floats
from proxima.lab.divergences import TrainedCompletion, as_batch
from proxima.view.chart import Color, Drawing, panel_axes, round_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGINS = (52, 14, 66, 56)


@dataclass(frozen=True, kw_only=True)
class ThresholdFigure(Drawing):
    """A completion, and the values that the figure shows of it."""

    completion: TrainedCompletion
    weighted: Floats  # [T] Z_t
    allowed: Floats  # [T] c_t
    masked: Bools  # [T] the surrogate drops the token
    spec: Cppo
    used: str = ""  # kind of the run's surrogate if it is not CPPO, which makes the figure hypothetical
    salt = "threshold"
    size = (760, 330)

    @classmethod
    def of(cls, completion: TrainedCompletion, spec: Cppo, used: str = "") -> "ThresholdFigure":
        batch = as_batch([completion])
        weighted, allowed = (values.numpy() for values in spec.threshold(batch))
        masked = ~spec(batch).keep.numpy()
        return cls(completion=completion, weighted=weighted, allowed=allowed, masked=masked, spec=spec, used=used)

    @property
    def title(self) -> str:
        it = self.completion
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
        dots: Any = {"linestyle": "", "marker": "o", "markeredgewidth": 0}
        axes.axhline(0, color=color("muted"), linewidth=1)
        axes.plot(position, self.allowed, color=color("b"), linewidth=1.8, label="threshold c")
        axes.vlines(position, 0, self.weighted, color=color("e"), linewidth=1)
        for where, name, size, label in ((~self.masked, "a", 4, "Z = w |π − μ|"), (self.masked, "k7", 6, self.outcome)):
            axes.plot(position[where], self.weighted[where], color=color(name), markersize=size, label=label, **dots)
        axes.set(xlim=(0, len(position) + 1), xlabel="position of the token")
        axes.set_title(self.title, pad=30)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False)
        round_ticks(axes.xaxis, 8, integer=True)
        round_ticks(axes.yaxis, 5)
        figure.text(MARGINS[0] / self.size[0], 10 / self.size[1], self.remark, color=color("muted"))


def most_masked(completions: list[TrainedCompletion], spec: Cppo) -> TrainedCompletion:
    """Return the completion with the most masked tokens; of several, the longest."""
    batch = as_batch(completions)
    masked = (~spec(batch).keep).long()
    counts = [int(part.sum()) for part in masked.split(batch.lengths.tolist())]
    return max(zip(counts, completions, strict=True), key=lambda pair: (pair[0], len(pair[1].log_prob)))[1]
