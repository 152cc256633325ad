"""The learning curve of a run as an SVG file, for a README: `proxima plot run RUN --out OUT.svg`.

It carries its colours for light and dark, so an `<img>` on either page shows it well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.atomic_files import write_atomic
from proxima.evaluate.headline import Headline
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.watch.observer import Record
from proxima.view.chart import Series, chart_axes, draw_series, new_figure, variable, write_svg_text
from proxima.view.formatting import duration, fixed

MARGINS = (44, 24, 44, 40)


def write_curve(run: Path | str, out: Path | str) -> Path:
    """Draw the mean reward by step, and the held-out accuracy, or else reward, with its 95 % interval; return `out`.

    Raises: UserError if the run has no finished step, or `out` is no .svg.
    """
    if Path(out).suffix.lower() != ".svg":
        raise UserError(f"{out}: a learning curve is an .svg, with its own colours for light and dark pages")
    folder = RunFolder(run)
    records = folder.read_metrics()
    train = [r for r in records if r["kind"] == "train" and r.get("reward/mean") is not None]
    evals = [r for r in records if r["kind"] == "eval"]
    if not train:
        raise UserError(f"{folder.metrics} has no finished step; train first")
    write_atomic(Path(out), learning_curve(train, evals))
    return Path(out)


def learning_curve(train: Sequence[Record], evals: Sequence[Record]) -> str:
    """The SVG text."""
    title = caption(train, evals)
    rewards = Series(points=[(float(r["step"]), float(r["reward/mean"])) for r in train], smooth=True)
    headline = Headline.of(evals)
    known = [(r, value) for r in evals if (value := headline.value(r)) is not None]
    spread = [headline.bounds(r) or (value, value) for r, value in known]
    held_out = [(float(r["step"]), value) for r, value in known]
    values = [*([0.0, 1.0] if headline.share else []), *(v for v in rewards.y), *(v for pair in spread for v in pair)]
    with new_figure(760, 330, "curve", font=13) as figure:
        limits = (min(values), max(values))
        axes = chart_axes(figure, [0.0, *rewards.x], limits, margins=MARGINS, intervals=5)
        axes.set_xlabel("step")
        axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=14)
        draw_series(axes, rewards, 0)
        names = [("mean reward of a step", "a", 30)]
        if held_out:
            draw_series(axes, Series(points=held_out, color="b", spread=spread), 1)
            names.append((f"held-out {headline.name}, 95 % interval", "b", 12))
        pixels: dict[str, Any] = {"textcoords": "offset pixels"}
        for x, value in held_out:
            shift, side = (9, "left") if x < rewards.x[-1] / 2 else (-9, "right")
            bold = pixels | {"color": variable("b"), "fontweight": "bold", "ha": side}
            axes.annotate(fixed(value, 3), (x, value), (shift, -18), **bold)
        for text, color, height in names:  # the lower right corner is empty under a curve that rises
            place = pixels | {"xycoords": "axes fraction", "ha": "right", "color": variable(color)}
            axes.annotate(text, (1, 0), (-6, height), **place)
        return write_svg_text(figure, title)


def caption(train: Sequence[Record], evals: Sequence[Record]) -> str:
    """What the curve shows, in one line."""
    spent = f"{train[-1]['step']} steps, {duration(sum(float(r.get('time/step') or 0) for r in train))}"
    headline = Headline.of(evals)
    values = [value for r in evals if (value := headline.value(r)) is not None]
    if len(values) < 2:
        return f"mean reward {fixed(train[0]['reward/mean'])} → {fixed(train[-1]['reward/mean'])} in {spent}"
    figure = f"{headline.name} {fixed(values[0], 3)} → {fixed(values[-1], 3)}"
    return f"held-out {figure} of {evals[-1]['questions']} questions in {spent}"
