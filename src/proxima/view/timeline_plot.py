"""timeline.json as a picture of a few steps: what works, what waits, and the stage of each prompt. Needs no viewer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from proxima.data import UserError
from proxima.runtime.watch.timeline import (
    ENGINE,
    EPISODES,
    PROMPTS,
    REWARDS,
    TRAINER,
    Lane,
    TimelineSpan,
    timeline_spans,
    union,
)
from proxima.view.chart import Color, Drawing, chart_axes
from proxima.view.formatting import count, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 6  # number of steps shown by default
LANES = 48  # maximum lanes of prompts; with episodes, half of them are for these
ENVIRONMENTS = Lane(1, 4)  # while some episode waits for its environment; derived, not in the file
LEGEND = {  # colour: its label, and the spans drawn in it
    "a": ("generate", ("generate", "generating", "turn")),
    "k4": ("environment", ("environment",)),
    "c": ("score", ("scoring",)),
    "b": ("train", ("train",)),
    "k6": ("publish, write", ("publish", "write")),
    "d": ("evaluate, checkpoint", ("evaluate", "checkpoint", "prepare")),
    "e": ("queued", ("queued",)),
}
COLORS = {name: color for color, (_, names) in LEGEND.items() for name in names}
NAMES = {TRAINER: "trainer", ENGINE: "engine", ENVIRONMENTS: "environments", REWARDS: "rewards"}
WAITS = (TRAINER, "generate")  # lasts until the last score
WIDTH, MARGINS, TALL, THIN = 1080, (92, 10, 40, 38), 26, 7  # pixels: of the figure, around the axes, and of a lane


@dataclass(frozen=True)
class TimelineFigure(Drawing):
    """The spans from `begin` to `end`, in seconds of the run, and the number and end of each step."""

    name: str
    steps: Sequence[tuple[int, float]]
    begin: float
    end: float
    spans: Sequence[TimelineSpan]
    salt = "timeline"
    font: ClassVar[int] = 11

    @classmethod
    def of(cls, file: Path, name: str, first: int | None = None, last: int | None = None) -> "TimelineFigure | None":
        """Read the steps from `first` to `last`, by default the run's last six; None if the file has none of them."""
        every = list(timeline_spans(file))
        steps = {int(span.facts["step"]): span for span in every if span.name == "step"}
        shown = [n for n in sorted(steps) if (first or 0) <= n and (last is None or n <= last)]
        shown = shown[-STEPS:] if first is None else shown
        if not shown:
            return None
        begin, end = steps[shown[0]].start, steps[shown[-1]].end
        inside = [span for span in every if span.name in COLORS and span.start < end and span.end > begin]
        spans = [span._replace(start=max(span.start, begin), end=min(span.end, end)) for span in inside]
        return cls(name, [(n, steps[n].end) for n in shown], begin, end, with_environments(spans))

    @property
    def title(self) -> str:
        return f"steps {self.steps[0][0]} to {self.steps[-1][0]} of {self.name}"

    @property
    def rows(self) -> list[tuple[Lane, str, int]]:
        """The lanes from the top, each with its name and height in pixels; at most `LANES` of prompts."""
        used = {span.lane for span in self.spans}
        rows = [(lane, name, TALL) for lane, name in NAMES.items() if lane in used]
        groups = {"episodes": EPISODES, "prompts": PROMPTS}
        lanes = {name: sorted(lane for lane in used if lane.process == number) for name, number in groups.items()}
        room = LANES // 2 if all(lanes.values()) else LANES
        for name, own in lanes.items():
            labels = {0: name} | ({2: f"{room} of {count(len(own))}"} if len(own) > room else {})
            rows += [(lane, labels.get(i, ""), THIN) for i, lane in enumerate(own[:room])]
        return rows

    @property
    def size(self) -> tuple[float, float]:
        return WIDTH, sum(height for _, _, height in self.rows) + MARGINS[2] + MARGINS[3]

    def draw(self, figure: "Figure", color: Color) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = chart_axes(figure, [self.begin, self.end], (0, 1), margins=MARGINS)
        axes.grid(False)
        top, labels = 0, {}
        for lane, label, height in self.rows:
            if label:
                labels[top + height / 2] = label
            for name in dict.fromkeys(span.name for span in self.spans if span.lane == lane):
                pieces = [(s.start, s.end - s.start) for s in self.spans if (s.lane, s.name) == (lane, name)]
                alpha, place = 0.35 if (lane, name) == WAITS else 1.0, (top + 0.1 * height, 0.8 * height)
                axes.broken_barh(pieces, place, linewidth=0, color=color(COLORS[name]), alpha=alpha)
            top += height
        axes.set_ylim(top, 0)
        axes.set_yticks(list(labels), list(labels.values()))
        axes.vlines([end for _, end in self.steps], 0, top, color=color("muted"), linewidth=0.8)
        for number, end in self.steps:
            axes.text(end, -4, f"step {number}", ha="right", color=color("muted"))
        gap = min(150.0, (WIDTH - MARGINS[0] - 150) / max(len(self.legend) - 1, 1))
        for i, (name, text) in enumerate(self.legend):
            place = ((MARGINS[0] + gap * i) / WIDTH, 1 - 13 / self.size[1])
            figure.text(*place, text, color=color(name), fontweight="bold")
        axes.xaxis.set_major_locator(MaxNLocator(8))
        axes.xaxis.set_major_formatter(lambda value, _: significant(value, 6))
        axes.set_xlabel("seconds of the run")

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The colours with their labels."""
        shown = {COLORS[span.name] for span in self.spans}
        words = [(name, text) for name, (text, _) in LEGEND.items() if name in shown]
        waits = any((span.lane, span.name) == WAITS for span in self.spans)
        return [*words, ("muted", "pale: the trainer waits")] if waits else words


def with_environments(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Add a lane for the times in which some episode waits for its environment. With episodes, the engine's lane shows
    the times in which one of them waits for a turn, rather than the whole time of a prompt."""
    played = [span for span in spans if span.lane.process == EPISODES]
    if not played:
        return [*spans]
    lanes = {"turn": ENGINE, "environment": ENVIRONMENTS}
    busy = [
        TimelineSpan(name, lane, start, end, {})
        for name, lane in lanes.items()
        for start, end in union((span.start, span.end) for span in played if span.name == name)
    ]
    return [*(span for span in spans if span.lane != ENGINE), *busy]


def timeline_of_run(file: Path, name: str, steps: str | None) -> TimelineFigure:
    """Return the figure of steps such as `3:8`, or of the last steps. Raises: UserError if the run has none of them."""
    try:
        first, last = (
            (None, None) if steps is None else map(int, (steps if ":" in steps else f"{steps}:{steps}").split(":"))
        )
    except ValueError:
        raise UserError(f"--steps {steps} must be a step, or FIRST:LAST") from None
    figure = TimelineFigure.of(file, name, first, last) if file.is_file() else None
    if figure is None:
        what = "no finished step" if steps is None else f"none of the steps {steps}"
        remedy = "give a run folder of `proxima train`, and steps that it has finished"
        raise UserError(f"{file} has {what}", remedy=remedy)
    return figure
