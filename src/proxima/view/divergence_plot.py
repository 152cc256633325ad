"""Ratio and total variation of sampled tokens over their probability: why a trust region of ratios is noisy for rare
tokens (arXiv 2602.04879, Fig. 1)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from proxima.data.columns import Floats
from proxima.lab.divergences import TrainedCompletion
from proxima.view.chart import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 760, 300
PANELS = ((52, 70, 320, 196), (426, 70, 320, 196))  # left, bottom, width, height in pixels
MOST = 2500  # points drawn
RARE = 0.1  # below this probability a token is called rare


@dataclass(frozen=True)
class DivergenceFigure:
    """`behavior` [N] μ and `policy` [N] π, the probabilities of the sampled tokens, and the run's name."""

    behavior: Floats
    policy: Floats
    name: str

    @classmethod
    def of(cls, completions: Sequence[TrainedCompletion], name: str) -> "DivergenceFigure":
        behavior, policy = (
            np.exp(np.concatenate([getattr(item, field) for item in completions]))
            for field in ("behavior_log_prob", "log_prob")
        )
        return cls(behavior, policy, name)

    @property
    def title(self) -> str:
        return f"π against μ in {self.name}"

    @property
    def ratio(self) -> Floats:
        """[N] π / μ."""
        return self.policy / self.behavior

    @property
    def remark(self) -> str:
        """Standard deviations of both, over rare and over other tokens."""
        rare = self.behavior < RARE
        ratio, difference = (
            [float(values[where].std()) if where.any() else 0.0 for where in (rare, ~rare)]
            for values in (self.ratio, self.policy - self.behavior)
        )
        return (
            f"{len(rare):,} tokens. Standard deviation for μ < {RARE:g} and above: ratio {ratio[0]:.2g} and "
            f"{ratio[1]:.2g}, difference {difference[0]:.2g} and {difference[1]:.2g}"
        )

    @contextmanager
    def plotted(self, color: Callable[[str], str]) -> "Iterator[Figure]":
        from matplotlib.ticker import FuncFormatter, LogLocator

        every = slice(None, None, max(1, len(self.behavior) // MOST))
        behavior = self.behavior[every]
        panels = (
            ("ratio π / μ", self.ratio[every], "a", 1.0),
            ("difference π − μ", (self.policy - self.behavior)[every], "b", 0.0),
        )
        with new_figure(WIDTH, HEIGHT, "divergence", color=color, font=12) as figure:
            figure.patch.set_facecolor(color("paper"))
            for (title, values, name, centre), (left, bottom, width, height) in zip(panels, PANELS, strict=True):
                axes = figure.add_axes((left / WIDTH, bottom / HEIGHT, width / WIDTH, height / HEIGHT))
                axes.axhline(centre, color=color("muted"), linewidth=1)
                axes.plot(behavior, values, ".", color=color(name), markersize=2.5, alpha=0.5, markeredgewidth=0)
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.xaxis.set_major_locator(LogLocator(100))
                axes.set_xlabel("probability μ of the sampled token")
                axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
            figure.text(PANELS[0][0] / WIDTH, 12 / HEIGHT, self.remark, color=color("muted"))
            yield figure
