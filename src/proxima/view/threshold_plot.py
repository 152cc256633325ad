"""CPPO's trust region along a completion: the weighted divergence of each token, its threshold, and what is masked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from proxima.core.surrogate import Cppo
from proxima.data.columns import Bools, Floats
from proxima.lab.divergences import TrainedCompletion, as_batch
from proxima.view.chart import STEPS, new_figure
from proxima.view.formatting import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 66, 56


@dataclass(frozen=True, kw_only=True)
class ThresholdFigure:
    """What the figure shows of a completion."""

    completion: TrainedCompletion
    weighted: Floats  # [T] Z_t
    allowed: Floats  # [T] c_t
    masked: Bools  # [T] the surrogate drops the token
    spec: Cppo
    used: str = ""  # kind of the run's surrogate where it is another one, so that nothing here happened

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
    def remark(self) -> str:
        spent, masked = int((self.allowed < self.spec.delta).sum()), "would be masked" if self.used else "masked"
        return (
            f"{int(self.masked.sum())} of {len(self.masked)} tokens {masked} (δ = {self.spec.delta:g}, δ_b = "
            f"{self.spec.delta_b:g}, w_min = {self.spec.w_min:g}); the prefix had spent its budget at {spent}"
        )

    @contextmanager
    def plotted(self, color: Callable[[str], str]) -> "Iterator[Figure]":
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        position = np.arange(1, len(self.weighted) + 1)
        with new_figure(WIDTH, HEIGHT, "threshold", color=color, font=12) as figure:
            figure.patch.set_facecolor(color("paper"))
            box = (LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT)
            axes = figure.add_axes(box)
            kept, out = ~self.masked, self.masked
            dots: Any = {"linestyle": "", "marker": "o", "markeredgewidth": 0}
            axes.axhline(0, color=color("muted"), linewidth=1)
            axes.plot(position, self.allowed, color=color("b"), linewidth=1.8, label="threshold c")
            axes.vlines(position, 0, self.weighted, color=color("e"), linewidth=1)
            axes.plot(
                position[kept], self.weighted[kept], color=color("a"), markersize=4, label="Z = w |π − μ|", **dots
            )
            axes.plot(
                position[out],
                self.weighted[out],
                color=color("k7"),
                markersize=6,
                label="would be masked" if self.used else "masked",
                **dots,
            )
            axes.set(xlim=(0, len(position) + 1), xlabel="position of the token")
            axes.set_title(self.title, loc="left", fontsize=12, fontweight="bold", pad=30)
            axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False)
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=STEPS))
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(round(value, 12))))
            figure.text(LEFT / WIDTH, 10 / HEIGHT, self.remark, color=color("muted"))
            yield figure


def most_masked(completions: list[TrainedCompletion], spec: Cppo) -> TrainedCompletion:
    """The completion with the most masked tokens; the longest of those."""
    batch = as_batch(completions)
    masked = (~spec(batch).keep).long()
    counts = [int(part.sum()) for part in masked.split(batch.lengths.tolist())]
    return max(zip(counts, completions, strict=True), key=lambda pair: (pair[0], len(pair[1].log_prob)))[1]
