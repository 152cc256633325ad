"""The observer of a tracker: a queue, and a thread that passes its entries to the tool."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from proxima.config.describe import kind_of
from proxima.experiments.run_reader import read_config, read_mapping
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer, Record, RunInfo
from proxima.system.atomic_files import write_atomic
from proxima.view.trackers.protocol import TrackedRun, Tracker, TrackerSession

PATIENCE = 30.0  # seconds that a tool may take for a call and, at the end of the run, for the rest of the queue
NOT_METRICS = ("kind", "label", "step")


class TrackerObserver(Observer):
    """Passes a run's records to a tracker in a daemon thread; the run waits for it only at its end. `warn` warns the
    user at most once: of the first failure, or that the tool does not answer."""

    def __init__(
        self, tracker: Tracker, warn: Callable[[str], None], *, patience: float = PATIENCE, clock: Clock | None = None
    ) -> None:
        self.name = kind_of(tracker)
        self.tracker = tracker
        self.warn = warn
        self.patience = patience
        self.clock = clock or Clock()
        self.link = ""
        self.failed = 0
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()  # the pending calls of the thread
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self._error = ""
        self._warned = self._hangs = False
        self._session: TrackerSession | None = None
        self._state: dict[str, Any] = {}
        self._before: Mapping[str, int] = {}  # kind of record → the last step logged before this process
        self._file = Path()

    # ---- on the run's event loop -------------------------------------------------------------------------------------

    def started(self, info: RunInfo) -> None:
        folder = RunFolder(info.folder)
        self._file = folder.trackers / f"{self.name.replace(':', '.')}.json"
        self._file.parent.mkdir(exist_ok=True)
        self._state = read_mapping(self._file)
        self._before = self._state.get("logged", {})
        run = TrackedRun(
            name=info.folder.resolve().name,
            folder=folder.trackers,
            config=read_config(folder.config),
            identity=self._state.get("identity"),
        )
        self._later(lambda: self._open(run))
        for record in folder.read_metrics():  # the tool may lack steps from before a resume
            self._later_log(record)
        self._thread = threading.Thread(target=self._work, name=f"proxima-{self.name}", daemon=True)
        self._thread.start()

    def evaluated(self, record: Record) -> None:
        self._later_log(record)

    def step(self, record: Record) -> None:
        self._later_log(record)

    def ending(self) -> Mapping[str, str]:
        """Return the link to the tracked run, once all records have arrived or the tool fails to answer in time."""
        arrived = threading.Event()
        self._later(arrived.set)
        self._wait(arrived)
        if self.failed:
            lost = f" ({self.failed} records failed)"
        else:
            lost = ""
        return {self.name: f"{self.link or self._error or 'no answer'}{lost}"}

    def finished(self, summary: Record) -> None:
        ended = threading.Event()
        self._later(lambda: self._finish(summary, ended))
        self._wait(ended)

    def _later(self, call: Callable[[], None]) -> None:
        self._queue.put(call)
        busy = self._busy_since
        self._hangs |= busy is not None and self.clock.now() - busy > self.patience
        self._warn_once()

    def _later_log(self, record: Record) -> None:
        self._later(lambda: self._log(record))

    def _wait(self, event: threading.Event) -> None:
        if self._thread is not None:
            self._hangs |= not event.wait(0.0 if self._hangs else self.patience)
        self._warn_once()

    def _warn_once(self) -> None:
        """Warn once about any problem of the tool; called on the event loop, like all methods of observers."""
        if self._warned or not (self._error or self._hangs):
            return
        self._warned = True
        if self._error:
            what = f"failed: {self._error}"
        else:
            what = f"has not answered for {self.patience:.0f} s"
        self.warn(f"monitor {self.name} {what}; the run continues, and its own metrics are in the run folder")

    # ---- in the tracker's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._thread is not None:
            call = self._queue.get()
            self._busy_since = self.clock.now()
            try:
                call()
            except BaseException as error:  # also sys.exit() in a tool: the call fails, the thread continues
                self._error = self._error or " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._busy_since = None

    def _open(self, run: TrackedRun) -> None:
        self._session = self.tracker.open(run)
        self.link = self._session.link
        self._remember(identity=self._session.identity, link=self.link)

    def _log(self, record: Record) -> None:
        """Log a record, unless it was logged before the run was interrupted: it has the same numbers then."""
        kind = str(record["kind"])
        step = int(record["step"])
        if step <= self._before.get(kind, -1):
            return
        if self._session is None:
            self.failed += 1
            return
        try:
            self._session.log(tracked_numbers(record), step)
        except BaseException:
            self.failed += 1
            raise
        self._remember(logged={**self._state.get("logged", {}), kind: step})

    def _finish(self, summary: Record, ended: threading.Event) -> None:
        try:
            if self._session is not None:
                self._session.finish(summary)
        finally:
            self._remember(failed=self.failed)
            self._thread = None  # the last call
            ended.set()

    def _remember(self, **facts: object) -> None:
        self._state |= facts
        write_atomic(self._file, json.dumps(self._state, indent=2) + "\n")


def tracked_numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record of metrics.jsonl, by name; those of an evaluation are prefixed with `eval/`."""
    prefix = "eval/" if record["kind"] == "eval" else ""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {f"{prefix}{name}": float(value) for name, value in numbers.items() if name not in NOT_METRICS}
