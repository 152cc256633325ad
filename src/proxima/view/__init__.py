"""Views: what a user sees of runs, live (`RunViews`) and afterwards (`report`, `curve`, `comparison_page`).

    log_lines.py, live.py       a run as lines, and on a terminal      diagnostics.py       warnings about a step
    report*.py                  report.html                            comparison_page.py   compare.html
    chart.py, page.py           charts by matplotlib, HTML pages       formatting.py        numbers and foreign text
    sweep_progress.py           a sweep while it runs                  eval_tables.py       an evaluation
    terminal.py                 tables and progress on one line        trackers/            wandb, trackio and others
    simulation_page.py          the page of `simulate`
    surrogate_*.py              figures of surrogates                  curve.py             a learning curve as SVG
    timeline_plot.py            a few steps over time
A view reads and never decides anything. Live views are observers (`runtime.observer`); report and curve need only the
run folder, even of an unfinished run. `formatting` formats every number; text of a model or a data set is escaped, for
a terminal (`printable`) or for a browser.
Imports: rich, jinja2, matplotlib, `core`, `config`, `evaluate`, `runtime`, `lab`. Imported by `api` and `cli`.
To add a live view: a subclass of `Observer`, chosen in `screen` or `RunViews`. To add a curve to the
report: an entry in `CURVES` of `report_specs`. To add a warning: a function in `RULES` of `diagnostics`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from proxima.runtime.watch.observer import Observer, Record, RunInfo, Sample, Tee, WarningList, warning_kind
from proxima.view.diagnostics import warnings_about
from proxima.view.log_lines import LogFile, lines_to

if TYPE_CHECKING:
    from proxima.view.trackers.protocol import Tracker

REPEAT = 10  # steps before the warning about a lasting state is printed again

__all__ = ["LogFile", "ReportFile", "RunViews", "screen"]


class RunViews(Tee):
    """All observers of a training run: report.html at the end, log.txt, and the `screen`.

    The report comes first: it is written when the screen's last line names it. `run_folder` is known from `started` on.

    Args:
        stream: of the screen; None: no output.
        notes: warnings of the config, told when the run has started, so that its log has them too.
        trackers: `config.monitor`. They come first: they may have a warning when the run has ended.
    """

    def __init__(self, stream: TextIO | None, notes: Sequence[str] = (), trackers: "Sequence[Tracker]" = ()) -> None:
        observers: list[Observer] = []
        for tracker in trackers:
            from proxima.view.trackers.tracker_observer import TrackerObserver

            observers.append(TrackerObserver(tracker, self.warning))
        super().__init__(*observers, ReportFile(), LogFile(), *([screen(stream)] if stream is not None else []))
        self.notes = notes
        self.run_folder: Path | None = None
        self._warnings, self._step = WarningList(), 0
        self._printed: dict[str, int] = {}  # kind of a lasting state: the step of its last warning

    def started(self, info: RunInfo) -> None:
        self.run_folder, self._step = info.folder, info.resumed_at
        super().started(info)
        for note in self.notes if info.resumed_at < info.steps else ():  # of a finished run they say nothing new
            self.warning(note)

    def step(self, record: Record, sample: Sample | None) -> None:
        self._step = int(record["step"])
        super().step(record, sample)
        for text in warnings_about(record):
            self.lasting(text)

    def warning(self, text: str) -> None:
        self._warnings.add(text, self._step)
        super().warning(text)

    def lasting(self, text: str) -> None:
        kind = warning_kind(text)
        if self._step - self._printed.get(kind, self._step - REPEAT) >= REPEAT:
            self._printed[kind] = self._step
            self.warning(text)
        else:
            self._warnings.add(text, self._step)

    def warned(self) -> Sequence[Record]:
        return self._warnings.records()


def screen(stream: TextIO) -> Observer:
    """The live view if `stream` is a terminal, lines otherwise (a pipe, a file, `TERM=dumb`)."""
    if not stream.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        return lines_to(stream)
    from rich.console import Console

    from proxima.view.live import LiveView

    return LiveView(Console(file=stream))


class ReportFile(Observer):
    """Writes report.html when the run ends, in success or failure."""

    def __init__(self) -> None:
        self._info: RunInfo | None = None

    def started(self, info: RunInfo) -> None:
        self._info = info

    def ending(self) -> Mapping[str, str]:
        return {} if self._info is None else {"report": str(self._info.folder / "report.html")}

    def finished(self, summary: Record) -> None:
        if self._info is not None:
            from proxima.view.report import write_report

            write_report(self._info.folder)
