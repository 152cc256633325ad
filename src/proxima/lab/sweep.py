"""Runs a sweep: each run in a process of its own, so that one that dies takes no other with it; the same command again goes on.

What is done stays done, what was begun goes on from its last checkpoint (`proxima train … --resume`), what failed waits for `retry_failed`.
The sweep's folder gets sweep.json (what was asked, versions, machine); each run's folder output.txt (what its process printed).
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from proxima.lab.plan import PlannedRun, Sweep
from proxima.lab.tail import Standing, State, Tail
from proxima.runtime.environment import describe_environment
from proxima.runtime.files import write_whole
from proxima.runtime.folder import RunFolder
from proxima.runtime.records import dumps

try:
    import fcntl
except ImportError:  # Windows has none: two sweeps in one folder are not caught there
    fcntl = None  # type: ignore[assignment]

POLL = 0.5  # seconds between two looks at the runs
OUTPUT = "output.txt"
STOPPED_BY_HAND = (130, -signal.SIGINT, -signal.SIGTERM)

Command = Callable[[PlannedRun], Sequence[str]]


class Watcher(Protocol):
    """Who is told how a sweep goes; all in the order in which it happens."""

    def started(self, sweep: Sweep, standings: Sequence[Standing]) -> None:
        """The states are known; nothing has begun."""

    def changed(self, standing: Standing, records: Sequence[dict[str, Any]]) -> None:
        """A run has another state, or new records in its metrics."""

    def tick(self) -> None:
        """Some time has gone by."""

    def warning(self, text: str) -> None:
        """Something a person should know."""

    def finished(self, standings: Sequence[Standing]) -> None:
        """Nothing runs any more."""


def train_command(run: PlannedRun) -> list[str]:
    """The command line of a run: what a person would type."""
    return [sys.executable, "-m", "proxima.cli.main", "train", str(run.recipe), *run.overrides, "--resume", "--quiet"]


def run_sweep(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    watcher: Watcher,
    *,
    retry_failed: bool = False,
    command: Command = train_command,
    poll: float = POLL,
) -> list[Standing]:
    """Run what is not done, `sweep.jobs` side by side, and return where every run stands at the end.

    Ctrl-C (SIGTERM, a closed terminal) asks the running ones to end with a checkpoint and begins no other; the second one kills them.
    Either way the same command goes on later.

    Args:
        runs: of `plan_runs`.
        retry_failed: go on with failed runs too, from their last checkpoint.
        command: what starts a run; a test's own.

    Raises:
        ValueError: another sweep is using the folder.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with _held(sweep.folder):
        standings = [standing_of(run, retry_failed) for run in runs]
        write_whole(sweep.folder / "sweep.json", dumps(_facts(sweep), indent=2) + "\n")
        loop = _Loop(sweep, standings, watcher, command, poll)
        watcher.started(sweep, standings)
        with loop.interruptible():
            loop.run()
        watcher.finished(standings)
    return standings


def standing_of(run: PlannedRun, retry_failed: bool = False) -> Standing:
    """Where a run stands by its folder: done, failed, or waiting to begin or go on."""
    standing = Standing(run)
    Tail(standing).look()
    try:
        summary = json.loads(RunFolder(run.folder).summary.read_text(encoding="utf-8"))
        status = summary.get("status")
    except (OSError, ValueError, AttributeError):
        return standing
    if status == "done":
        standing.state, standing.before = State.DONE, True
    elif status == "failed" and not retry_failed:
        standing.state, standing.before = State.FAILED, True
        standing.error = f"{summary.get('error') or 'failed'}; run it again with --retry-failed"
    return standing


@dataclass
class _Job:
    standing: Standing
    tail: Tail
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]


@dataclass
class _Loop:
    sweep: Sweep
    standings: Sequence[Standing]
    watcher: Watcher
    command: Command
    poll: float
    jobs: list[_Job] = field(default_factory=list)
    interrupts: int = 0
    obeyed: int = 0

    def run(self) -> None:
        waiting = [standing for standing in self.standings if standing.state is State.WAITING]
        try:
            while waiting or self.jobs:
                self.obey(waiting)
                while waiting and len(self.jobs) < self.sweep.jobs and not self.interrupts:
                    self.begin(waiting.pop(0))
                time.sleep(self.poll)
                for job in list(self.jobs):
                    self.look(job)
                self.watcher.tick()
        finally:
            for job in self.jobs:  # an error of our own must not leave processes behind that nobody watches
                _signal_group(job.process, signal.SIGKILL)

    def begin(self, standing: Standing) -> None:
        run = standing.run
        run.folder.mkdir(parents=True, exist_ok=True)
        output = (run.folder / OUTPUT).open("wb")
        environment = dict(os.environ)
        if run.threads:
            environment.setdefault("OMP_NUM_THREADS", str(run.threads))
        # a session of its own: the terminal's Ctrl-C reaches us alone, and we pass it on once
        process = subprocess.Popen(
            list(self.command(run)), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        standing.state = State.RUNNING
        self.jobs.append(_Job(standing, Tail(standing), process, output))
        self.watcher.changed(standing, [])

    def look(self, job: _Job) -> None:
        code, standing = job.process.poll(), job.standing  # asked first: what is written before the end is then seen below
        records = job.tail.look()
        if code is None:
            if records:
                self.watcher.changed(standing, records)
            return
        self.jobs.remove(job)
        job.output.close()
        if code == 0 and _status(standing.run) == "done":
            standing.state = State.DONE
        elif self.interrupts or code in STOPPED_BY_HAND:
            standing.state = State.STOPPED
        else:
            standing.state, standing.error = State.FAILED, _reason(standing.run, code)
        self.watcher.changed(standing, records)

    def obey(self, waiting: list[Standing]) -> None:
        """Pass on the Ctrl-Cs that have come since."""
        while self.obeyed < self.interrupts:
            self.obeyed += 1
            waiting.clear()
            if self.obeyed == 1:
                if self.jobs:
                    self.watcher.warning(
                        f"stopping: {len(self.jobs)} running, each writes a checkpoint first; press Ctrl-C again to kill them"
                    )
                for job in self.jobs:
                    with suppress(ProcessLookupError):
                        job.process.send_signal(signal.SIGINT)
            else:
                for job in self.jobs:
                    _signal_group(job.process, signal.SIGKILL)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(number: int, frame: Any) -> None:
            self.interrupts += 1

        wanted = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is gone; nohup ignores that
            wanted.append(signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """To the process and to those it started (reward workers)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _status(run: PlannedRun) -> str | None:
    try:
        found = json.loads(RunFolder(run.folder).summary.read_text(encoding="utf-8"))
        return str(found.get("status"))
    except (OSError, ValueError, AttributeError):
        return None


def _reason(run: PlannedRun, code: int) -> str:
    """The last line the process left, or how it ended."""
    path = run.folder / OUTPUT
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    said = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    return f"{ended}: {said}; see {path}"


def _facts(sweep: Sweep) -> dict[str, Any]:
    """What sweep.json holds."""
    environment = describe_environment(sweep.seeds[0])
    return {
        "file": str(sweep.file),
        "asked": dict(sweep.asked),
        "jobs": sweep.jobs,
        "seeds": list(sweep.seeds),
        "cells": {cell.name: list(cell.overrides) for cell in sweep.every},
        "runs": [{"cell": c.name, "seed": s, "folder": f"{c.name}/seed-{s}"} for c, s in itertools.product(sweep.every, sweep.seeds)],
        **{key: environment[key] for key in ("proxima", "python", "packages", "machine")},
    }


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """One sweep at a time in a folder; the lock goes with the process, however it ends."""
    with (folder / ".lock").open("wb") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"{folder} is in use by another sweep; wait for it, stop it, or take another --folder") from error
        yield
