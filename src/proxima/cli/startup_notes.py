"""Repeats the config's warnings once the run has started, so that its log has them too."""

from collections.abc import Sequence
from pathlib import Path

from proxima.runtime.observer import Observer, RunInfo


class StartupNotes(Observer):
    """Passes `notes` to `observer` as warnings when the run starts, and remembers the run's folder."""

    def __init__(self, observer: Observer, notes: Sequence[str]) -> None:
        self.observer, self.notes = observer, notes
        self.run_folder: Path | None = None

    def started(self, info: RunInfo) -> None:
        self.run_folder = info.folder
        for note in self.notes:
            self.observer.warning(note)
