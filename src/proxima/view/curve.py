"""The learning curve of a run as a figure, for a README: `proxima plot run RUN --out OUT.svg`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from proxima.data import UserError
from proxima.evaluate.headline import Headline
from proxima.lab.run_reader import read_run
from proxima.runtime.watch.observer import Record
from proxima.view.chart import Color, Drawing, Series, chart_axes, draw_series
from proxima.view.formatting import duration, fixed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGINS = (44, 24, 44, 40)


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
        rewards = Series(points=[(float(r["step"]), float(r["reward/mean"])) for r in self.train], smooth=True)
        headline = Headline.of(self.evals)
        judged = [(r, value) for r in self.evals if (value := headline.value(r)) is not None]
        spread = [headline.bounds(r) or (value, value) for r, value in judged]
        held_out = [(float(r["step"]), value) for r, value in judged]
        values = [*([0.0, 1.0] if headline.share else []), *rewards.y, *(v for pair in spread for v in pair)]
        axes = chart_axes(figure, [0.0, *rewards.x], (min(values), max(values)), margins=MARGINS, intervals=5)
        axes.set_xlabel("step")
        axes.set_title(self.title, fontsize=15, pad=14)
        draw_series(axes, rewards, 0, color)
        names = [("mean reward of a step", "a", 30)]
        if held_out:
            draw_series(axes, Series(points=held_out, color="b", spread=spread), 1, color)
            names.append((f"held-out {headline.name}, 95 % interval", "b", 12))
        pixels: dict[str, Any] = {"textcoords": "offset pixels"}
        for x, value in held_out:
            shift, side = (9, "left") if x < rewards.x[-1] / 2 else (-9, "right")
            bold = pixels | {"color": color("b"), "fontweight": "bold", "ha": side}
            axes.annotate(fixed(value, 3), (x, value), (shift, -18), **bold)
        for text, name, height in names:  # the lower right corner is empty under a rising curve
            place = pixels | {"xycoords": "axes fraction", "ha": "right", "color": color(name)}
            axes.annotate(text, (1, 0), (-6, height), **place)
