"""The lines of a run on a terminal, above the progress of the current stage."""

from typing import TextIO

from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Stage
from proxima.view.log_lines import LogLines
from proxima.view.terminal import StageProgress


class TerminalLines(LogLines):
    """Writes the lines to a terminal, above the progress of the current stage."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stage = StageProgress(stream, clock)
        super().__init__(self._stage.write, clock)

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        if self._info is None:  # an error before the run starts should appear alone
            super().progress(stage, done, total, unit)
        else:
            self._stage.update(stage, done, total, unit)
