"""The learning curve of the demo's run as a figure, docs/learning_curve.svg, drawn by make_docs.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from proxima.data import UserError
from proxima.evaluation.headline import Headline
from proxima.experiments.cell_statistics import smoothed
from proxima.experiments.run_reader import read_run
from proxima.runtime.watch.observer import Record
from proxima.view.chart import Color, Drawing, panel_axes, round_ticks
from proxima.view.formatting import duration, fixed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGINS, SMOOTHED = (44, 24, 44, 40), 12  # steps from which the running mean is drawn, too


@dataclass(frozen=True)
class LearningCurve(Drawing):
    """The mean reward by step, and the held-out accuracy (or else reward) with its 95 % interval."""

    train: Sequence[Record]  # those with a mean reward
    evals: Sequence[Record]
    salt = "curve"
    size = (760, 330)
    font: ClassVar[int] = 13

    @classmethod
    def of(cls, run: Path | str) -> "LearningCurve":
        """Read the curve of a run folder. Raises: UserError if the run has no finished step."""
        records = read_run(run, empty=True)
        train = [record for record in records.train if record.get("reward/mean") is not None]
        if not train:
            raise UserError(f"{Path(run) / 'metrics.jsonl'} has no finished step; train first")
        return cls(train, records.evals)

    @property
    def title(self) -> str:
        """The content of the curve, in one line."""
        spent = f"{self.train[-1]['step']} steps, {duration(sum(float(r.get('time/step') or 0) for r in self.train))}"
        headline = Headline.of(self.evals)
        values = [value for r in self.evals if (value := headline.value(r)) is not None]
        if len(values) < 2:
            first, last = (fixed(self.train[i]["reward/mean"]) for i in (0, -1))
            return f"mean reward {first} → {last} in {spent}"
        figure = f"{headline.name} {fixed(values[0], 3)} → {fixed(values[-1], 3)}"
        return f"held-out {figure} of {self.evals[-1]['questions']} questions in {spent}"

    def draw(self, figure: "Figure", color: Color) -> None:
        steps = [float(r["step"]) for r in self.train]
        rewards = [float(r["reward/mean"]) for r in self.train]
        headline = Headline.of(self.evals)
        judged = [
            (float(r["step"]), value, headline.bounds(r))
            for r in self.evals
            if (value := headline.value(r)) is not None
        ]
        spread = [(x, *(bounds or (value, value))) for x, value, bounds in judged]
        values = [*([0.0, 1.0] if headline.share else []), *rewards, *(v for _, *pair in spread for v in pair)]
        axes = panel_axes(figure, MARGINS)
        axes.set(xlim=(0.0, steps[-1]), ylim=(min(values), max(values)))
        round_ticks(axes.xaxis, 5, integer=True)
        round_ticks(axes.yaxis, 5)
        axes.set_xlabel("step")
        axes.set_title(self.title, fontsize=15, pad=14)
        line: Any = {"color": color("a"), "clip_on": False}
        if len(steps) >= SMOOTHED:
            axes.plot(steps, rewards, linewidth=1.0, alpha=0.35, **line)
            rewards = smoothed(rewards)
        axes.plot(steps, rewards, linewidth=1.8, marker="o" if len(steps) == 1 else "", **line)
        names = [("mean reward of a step", "a", 30)]
        if judged:
            held_out: Any = {"color": color("b"), "clip_on": False}
            axes.vlines(*zip(*spread, strict=True), linewidth=1.6, alpha=0.75, **held_out)
            places, heights, _ = zip(*judged, strict=True)
            axes.plot(places, heights, marker="o", markersize=7, linestyle="", markeredgewidth=0, **held_out)
            names.append((f"held-out {headline.name}, 95 % interval", "b", 12))
        pixels: dict[str, Any] = {"textcoords": "offset pixels"}
        for x, value, _ in judged:
            shift, side = (9, "left") if x < steps[-1] / 2 else (-9, "right")
            bold = pixels | {"color": color("b"), "fontweight": "bold", "ha": side}
            axes.annotate(fixed(value, 3), (x, value), (shift, -18), **bold)
        for text, name, height in names:  # the lower right corner is empty under a rising curve
            place = pixels | {"xycoords": "axes fraction", "ha": "right", "color": color(name)}
            axes.annotate(text, (1, 0), (-6, height), **place)
