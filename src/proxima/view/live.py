"""The live view on a terminal: progress, metrics over time, and the policy's latest completion.

It redraws on events, at most ten times a second, and not in a thread, which would slow down training on a small
machine.
"""

import atexit
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proxima.data import Group as Completed  # rich has a Group, too
from proxima.evaluate.headline import ACCURACY, Headline
from proxima.runtime.watch.clock import Clock, SystemClock
from proxima.runtime.watch.observer import Observer, Record, RunInfo, Sample, Stage
from proxima.view import log_lines
from proxima.view.formatting import count, duration, fixed, printable, signed, sparkline
from proxima.view.step_figures import LIVE_FIGURES, step_figures
from proxima.view.terminal import INTERVAL

ACTIVITIES: dict[Stage, str] = {"load": "loading", "generate": "generating", "score": "scoring", "train": "training"}
ACTIVITIES |= {"check": "checking", "tokenize": "tokenizing", "prepare": "preparing"}
ACTIVITIES |= {"evaluate": "evaluating", "checkpoint": "saving"}


class LiveView(Observer):
    """Draws the run on a terminal."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._info: RunInfo | None = None
        self._records: list[Record] = []
        self._evals: list[Record] = []
        self._sample: Sample | None = None
        self._stage = Text("starting", style="dim")
        self._drawn = float("-inf")
        self._running = False
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop", get_renderable=self._view)

    def started(self, info: RunInfo) -> None:
        self._info = info
        if info.resumed_at:
            self._evals = log_lines.earlier_evaluations(info)
            self._console.print(Text(log_lines.resumed(info), style="dim"))
        self._live.start()
        self._running = True
        atexit.register(self._live.stop)  # restores the cursor if the run crashes before `finished`
        self._draw()

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        self._stage = Text.assemble((ACTIVITIES.get(stage, stage), "cyan"), f"  {count(done)}/{count(total)} {unit}")
        if self._clock.now() - self._drawn >= INTERVAL:
            self._draw()

    def evaluated(self, record: Record) -> None:
        self._evals.append(record)
        self._draw()

    def sampled(self, groups: Sequence[Completed]) -> None:
        for group in groups[:1]:
            self._sample = Sample(question=group.prompt.question, text=group.completions[0].text)
        self._draw()

    def step(self, record: Record, sample: Sample | None) -> None:
        self._records.append(record)
        self._sample = sample or self._sample
        self._draw()

    def synced(self, record: Record) -> None:
        self._console.print(Text(log_lines.sync_line(record), style="dim"))

    def warning(self, text: str) -> None:
        stamp = log_lines.time_of_day(self._clock.wall())
        self._console.print(Text.assemble((stamp, "dim"), "  ", ("WARNING ", "bold yellow"), printable(text)))

    def finished(self, summary: Record) -> None:
        status = str(summary.get("status", "done"))
        self._stage = Text(status, style="green" if status == "done" else "yellow")
        self._draw()
        self._live.stop()
        self._running = False
        atexit.unregister(self._live.stop)
        self._console.print(Text(log_lines.closing_line(summary, self._info)))

    def _draw(self) -> None:
        if self._running:  # before `started`, an error message should appear alone on the screen
            self._drawn = self._clock.now()
            self._live.refresh()

    def _view(self) -> RenderableType:
        if self._info is None:
            return Text("")
        name, folder = f"proxima {self._info.version}", (str(self._info.folder), "dim")
        head = _line((name, "bold"), f"{log_lines.header(self._info).removeprefix(name)}  ", folder)
        step = _line((log_lines.arithmetic(self._info), "dim"))
        parts: list[RenderableType] = [head, step, self._bar(self._info)]
        if self._evals:
            parts.append(self._held_out())
        if self._records:
            parts += [Text(""), self._table()]
        if self._sample is not None:
            parts.append(self._panel(self._sample))
        return Group(*parts)

    def _bar(self, info: RunInfo) -> RenderableType:
        done = int(self._records[-1]["step"]) if self._records else info.resumed_at
        times = [float(r.get("time/step") or 0.0) for r in self._records]
        left = log_lines.remaining(times, self._records[-1], info) if self._records else None
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text.assemble("step ", (f"{done}/{info.steps}", "bold")),
            ProgressBar(total=max(info.steps, 1), completed=done, width=min(40, max(10, self._console.width - 60))),
            Text(f"eta {duration(left)}" if left else ""),
            self._stage,
        )
        return grid

    def _held_out(self) -> RenderableType:
        first, last = self._evals[0], self._evals[-1]
        headline, after = Headline.of(self._evals), f"after step {last['step']}"
        before, value = headline.value(first), headline.value(last)
        if value is None:
            return _line((f"held-out {headline.name} unknown: {log_lines.why_unknown(last)}, {after}", "yellow"))
        parts: list[str | tuple[str, str]] = [f"held-out {headline.name}  ", (fixed(before, 3), "bold")]
        if last is not first:
            gain = f"  {signed(value - before)}" if before is not None else ""
            parts += [" → ", (fixed(value, 3), "bold green"), gain]
        right = " right" if headline.key == ACCURACY else ""
        parts.append((f"  {log_lines.of_questions(last, headline)}{right} {after}", "dim"))
        if figures := log_lines.sampling_figures(last, headline):
            parts.append((f"  {figures}", "dim"))
        return _line(*parts)

    def _table(self) -> RenderableType:
        last, width = self._records[-1], max(0, min(48, self._console.width - 40))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=9)
        table.add_column(justify="right", min_width=13)
        table.add_column(no_wrap=True, style="cyan")
        for figure in (*step_figures(last), *(() if "examples" in last else LIVE_FIGURES)):
            if any(map(figure.is_recorded, self._records)):
                curve = sparkline([r.get(figure.key) for r in self._records], width)
                table.add_row(figure.label, figure.text(last), curve)
        return table

    def _panel(self, sample: Sample) -> RenderableType:
        room = max(40, 3 * (self._console.width - 4))
        body = Text(printable(sample.question, room), style="dim")
        body.append("\n" + printable(sample.text, room), style="default")
        mark = {True: ("right", "green"), False: ("wrong", "red"), None: ("", "default")}[sample.correct]
        reward = "invalid" if sample.reward is None else fixed(sample.reward)
        title = Text.assemble("sample  reward ", (reward, "bold"), "  ", mark)
        if self._info is not None and self._info.examples:
            title = Text("held-out sample")
        parts = "  ".join(f"{printable(name)} {fixed(value)}" for name, value in sample.parts.items())
        subtitle = Text(parts, style="dim") if len(sample.parts) > 1 else None
        return Panel(body, title=title, title_align="left", subtitle=subtitle, border_style="dim")


def _line(*parts: str | tuple[str, str]) -> Text:
    """Join texts, or pairs of text and style, on one line that is truncated at the edge."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
