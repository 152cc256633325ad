"""The interface of a tracker: a spec whose fields are its settings, and the session that it opens for one run."""

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
    folder: Path  # inside the run folder, for what the tracker writes; it exists
    config: Mapping[str, Any]  # the resolved recipe, nested
    identity: str | None = None  # of the session that tracked the run before it was interrupted; None for a new run


class TrackerSession(Protocol):
    """One run in a tool. All calls come from one thread, in order; what they raise is counted, and warned of once.

    `identity` is what `TrackedRun.identity` will be when the run is resumed; `link` says where to look: a URL, or a
    command.
    """

    identity: str
    link: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The numbers of a step. Those of an evaluation come in a call of their own, as `eval/accuracy`, after those of
        the step."""

    def log_page(self, file: Path, step: int) -> None:
        """A page of the step, HTML of some hundred kB; only for trackers that have the field `sample_every`."""
        return None

    def finish(self, summary: Record) -> None:
        """The run has ended; `summary` is the content of summary.json. Called also where `log` has raised."""


def without_time(metrics: Mapping[str, float]) -> dict[str, float]:
    """`time` as `time/run`, for tools that keep `time` for themselves or for a folder of `time/step`."""
    return {{"time": "time/run"}.get(name, name): value for name, value in metrics.items()}


class Tracker:
    """Base of the trackers: frozen dataclasses; the fields are settings."""

    package: ClassVar[str] = ""  # what must be installed
    extra: ClassVar[str] = ""  # which extra of proxima-rl installs it

    def problem(self) -> str | None:
        """The reason why no run can be tracked here, with the remedy, or None; checked before the model is loaded."""
        if self.package and find_spec(self.package) is None:
            return f"needs the package {self.package}: pip install 'proxima-rl[{self.extra}]'"
        if (every := getattr(self, "sample_every", 0)) < 0:
            return f"sample_every={every} must be >= 0"
        if every and find_spec("starlette") is None:
            return "sample_every needs starlette: pip install 'proxima-rl[serve]'"
        return None

    def open(self, run: TrackedRun) -> TrackerSession:
        """Begin to track the run, or continue where `run.identity` was. It may block; the run continues meanwhile."""
        raise NotImplementedError
