"""The tracker interface: a spec whose fields are its settings, and the session that it opens for one run."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from proxima.runtime.watch.observer import Record


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a session is opened for."""

    name: str  # of the run folder
    folder: Path  # inside the run folder, for the tracker's files; it exists
    config: Mapping[str, Any]  # the resolved recipe, nested
    identity: str | None = None  # of the session that tracked the run before it was interrupted; None for a new run


class TrackerSession(Protocol):
    """One run in a tool. All calls come from one thread, in order; exceptions are counted, with one warning.

    `identity` becomes `TrackedRun.identity` when the run is resumed; `link` leads to the tracked run: a URL, or a
    command.
    """

    identity: str
    link: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step. Those of an evaluation come in a separate call, as `eval/accuracy`, after those of
        the step."""

    def finish(self, summary: Record) -> None:
        """End the session after the run; `summary` is the content of summary.json. Called even if `log` has raised."""


def without_time(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename `time` to `time/run`, for tools that reserve `time`, or need it as the folder of `time/step`."""
    return {{"time": "time/run"}.get(name, name): value for name, value in metrics.items()}


class Tracker:
    """Base class of the trackers, which are frozen dataclasses whose fields are the settings."""

    package: ClassVar[str] = ""  # that must be installed; the extra of proxima-rl of this name does it

    def problem(self) -> str | None:
        """Explain why runs can't be tracked here, with a remedy, or return None; called before the model is loaded."""
        if self.package and find_spec(self.package) is None:
            return (
                f"needs the package {self.package}: pip install 'proxima-rl[{self.package}]', or monitor=[] without it"
            )
        return None

    def open(self, run: TrackedRun) -> TrackerSession:
        """Begin tracking the run, or continue the session `run.identity`. It may block; the run continues meanwhile."""
        raise NotImplementedError
