"""Views: what a person sees of a run, live (`observer_for`) and afterwards (`report.write_report`,
`curve.write_curve`).

A view reads; it never decides anything. Live views are observers (`runtime.observer`), told by the loop; the report and
the curve read the run folder alone, also one of a run that is still going or was killed. Every number passes
`view.numbers`, every text that a model or a
data set wrote is escaped: control characters for a terminal (`printable`), markup for a browser.
Figures of surrogates (`surrogate_plot`) need no run: they read `core`.
Imports: rich, jinja2, `core`, `runtime` (observer, folder, rollouts, clock). Imported by `cli` alone; `runtime` never
imports this room.
To add a live view: a class with the six methods of `Observer`, chosen in `screen` or `observer_for`. To add a curve to
the report: a line in `CURVES` of `view.report_curves`. To add a warning: a function in `view.remarks`, in `RULES`.
"""

import os
from typing import TextIO

from proxima.runtime.observer import NullObserver, Observer, Record, RunInfo, Tee
from proxima.view.log_lines import LogFile, lines_to

__all__ = ["LogFile", "ReportFile", "observer_for", "screen"]


def observer_for(stream: TextIO | None) -> Observer:
    """All who watch a training run: the `screen` on `stream` (None: nothing is printed), log.txt, and report.html at
    the end."""
    watchers: list[Observer] = [
        ReportFile(),
        LogFile(),
    ]  # the report first: when the screen's last line names it, it is there
    return Tee(*watchers, screen(stream)) if stream is not None else Tee(*watchers)


def screen(stream: TextIO) -> Observer:
    """The live view where `stream` is a terminal that can be drawn on, plain lines otherwise (a pipe, a file,
    `TERM=dumb`)."""
    if not stream.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        return lines_to(stream)
    from rich.console import Console

    from proxima.view.live import LiveView

    return LiveView(Console(file=stream))


class ReportFile(NullObserver):
    """Writes report.html when the run has ended, however it ended."""

    def __init__(self) -> None:
        self._info: RunInfo | None = None

    def started(self, info: RunInfo) -> None:
        self._info = info

    def finished(self, summary: Record) -> None:
        if self._info is not None:
            from proxima.view.report import write_report

            write_report(self._info.folder)
