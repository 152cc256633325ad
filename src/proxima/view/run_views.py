"""All observers of a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer, Record, RunInfo, Tee, WarningList, warning_kind
from proxima.view.diagnostics import warnings_about
from proxima.view.formatting import write_safely
from proxima.view.log_lines import LogFile, LogLines
from proxima.view.microscope.viewer_process import ViewerObserver
from proxima.view.report import write_report
from proxima.view.terminal_lines import TerminalLines
from proxima.view.trackers.protocol import Tracker
from proxima.view.trackers.tracker_observer import TrackerObserver

REPEAT = 10  # steps after which the warning about a lasting state is repeated


class RunViews(Tee):
    """All observers of a training run: report.html at the end, log.txt, and the `screen`.

    The report precedes the screen, so that it exists when the screen's last line names it. `run_folder` is known after
    `started`.

    Args:
        stream: stream of the screen; None: no output.
        notes: warnings of the config, issued after the run has started, so that they are in its log, too.
        trackers: `config.monitor`. They come first, since they may warn at the end of the run.
        view: `config.view`: serve the run's page while it runs.
    """

    def __init__(
        self, stream: TextIO | None, notes: Sequence[str] = (), trackers: Sequence[Tracker] = (), view: bool = False
    ) -> None:
        observers: list[Observer] = []
        for tracker in trackers:
            observers.append(TrackerObserver(tracker, self.warning))
        if view:
            observers.append(ViewerObserver(stream))
        super().__init__(*observers, ReportFile(), LogFile(), *([lines_to(stream)] if stream is not None else []))
        self.notes = notes
        self.run_folder: Path | None = None
        self._warnings, self._step = WarningList(), 0
        self._printed: dict[str, int] = {}  # kind of a lasting state → step of its last warning

    def started(self, info: RunInfo) -> None:
        self.run_folder, self._step = info.folder, info.resumed_at
        super().started(info)
        for note in self.notes if info.resumed_at < info.steps else ():  # for a finished run they are not news
            self.warning(note)

    def step(self, record: Record) -> None:
        self._step = int(record["step"])
        super().step(record)
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
            write_report(self._info.folder)


def lines_to(stream: TextIO, clock: Clock | None = None) -> Observer:
    """Write the lines to a stream, flushing each."""
    if stream.isatty():
        return TerminalLines(stream, clock)
    return LogLines(lambda line: write_safely(stream, f"{line}\n"), clock)
