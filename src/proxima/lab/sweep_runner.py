"""Runs a sweep: each run in a process of its own, so that one that dies takes no other with it; the same command again
goes on.

What is done stays done, what was begun goes on from its last checkpoint (`proxima train … --resume`), what failed waits
for `retry_failed`. What still runs after its sweep was killed is followed to its end and not begun a second time.
The sweep's folder gets sweep.json (what was asked, versions, machine). Each run's folder gets planned.yaml (the config
it was
planned with: an edit of the recipe meanwhile changes no later run) and output.txt (what its processes printed).
"""

import errno
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

from proxima.config.dump import dump
from proxima.data import UserError
from proxima.data.atomic_files import write_whole
from proxima.data.jsonl import dumps
from proxima.lab.metrics_follower import MetricsFollower, RunProgress, RunState
from proxima.lab.sweep_plan import PlannedRun, Sweep
from proxima.runtime.environment import describe_environment
from proxima.runtime.folder import RunFolder

try:
    import fcntl
except ImportError:  # Windows has none: two sweeps in one folder are not caught there
    fcntl = None  # type: ignore[assignment]

POLL = 0.5  # seconds between two looks at the runs
LAST_WORD = 60.0  # seconds for a checkpoint when the sweep itself fails
FULL = (errno.ENOSPC, errno.EDQUOT)
OUTPUT = "output.txt"
WRONG_INPUT = 2
STOPPED_BY_HAND = (130, -signal.SIGINT, -signal.SIGTERM)

Command = Callable[[PlannedRun], Sequence[str]]


class SweepObserver(Protocol):
    """Who is told how a sweep goes; all in the order in which it happens."""

    def started(self, sweep: Sweep, progresses: Sequence[RunProgress]) -> None:
        """The states are known; nothing has begun."""

    def changed(self, progress: RunProgress, records: Sequence[dict[str, Any]]) -> None:
        """A run has another state, or new records in its metrics."""

    def tick(self) -> None:
        """Some time has gone by."""

    def warning(self, text: str) -> None:
        """Something a person should know."""

    def finished(self, progresses: Sequence[RunProgress]) -> None:
        """Nothing runs any more."""


def train_command(run: PlannedRun) -> list[str]:
    """The command line of a run: its config as planned. A person would type the recipe and `overrides` to the same
    effect."""
    return [sys.executable, "-m", "proxima.cli.main", "train", str(run.file), "--resume", "--quiet"]


def run_sweep(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    watcher: SweepObserver,
    *,
    retry_failed: bool = False,
    command: Command = train_command,
    poll: float = POLL,
) -> list[RunProgress]:
    """Run what is not done, `sweep.jobs` side by side, and return where every run stands at the end.

    Ctrl-C (SIGTERM, a closed terminal) asks the running ones to end with a checkpoint and begins no other; the second
    one kills them. Either way the same command goes on later.

    Args:
        runs: of `plan_runs`.
        retry_failed: go on with failed runs too, from their last checkpoint.
        command: what starts a run; a test's own.

    Raises:
        ValueError: another sweep is using the folder.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with _held(sweep.folder):
        progresses = [read_progress(run, retry_failed) for run in runs]
        write_whole(sweep.folder / "sweep.json", dumps(_facts(sweep), indent=2) + "\n")
        loop = _SweepLoop(sweep, progresses, watcher, command, poll)
        watcher.started(sweep, progresses)
        with loop.interruptible():
            loop.run()
        watcher.finished(progresses)
    return progresses


def read_progress(run: PlannedRun, retry_failed: bool = False) -> RunProgress:
    """Where a run stands by its folder: done, failed, or waiting to begin or go on."""
    progress = RunProgress(run)
    MetricsFollower(progress).look()
    try:
        summary = json.loads(RunFolder(run.folder).summary.read_text(encoding="utf-8"))
        status = summary.get("status")
    except (OSError, ValueError, AttributeError):
        return progress
    if status == "done":
        progress.state, progress.before = RunState.DONE, True
    elif status == "failed" and not retry_failed:
        progress.state, progress.before = RunState.FAILED, True
        progress.error = f"{summary.get('error') or 'failed'}; run it again with --retry-failed"
    return progress


@dataclass
class _RunningJob:
    """A run that goes on. `process` and `output` are None for one that another process runs; `begun`: where in
    output.txt ours begins."""

    progress: RunProgress
    tail: MetricsFollower
    process: "subprocess.Popen[bytes] | None" = None
    output: IO[bytes] | None = None
    begun: int = 0


@dataclass
class _SweepLoop:
    sweep: Sweep
    progresses: Sequence[RunProgress]
    watcher: SweepObserver
    command: Command
    poll: float
    jobs: list[_RunningJob] = field(default_factory=list)
    interrupts: int = 0
    obeyed: int = 0

    def run(self) -> None:
        waiting = [progress for progress in self.progresses if progress.state is RunState.WAITING]
        try:
            while waiting or self.jobs:
                self.obey(waiting)
                while waiting and len(self.jobs) < self.sweep.jobs and not self.interrupts:
                    progress = waiting.pop(0)
                    try:
                        self.begin(progress)
                    except OSError as error:  # a full disk, no more processes: this one's loss, not its neighbours'
                        progress.state, progress.error = RunState.FAILED, f"could not begin: {error}"
                        self.changed(progress)
                time.sleep(self.poll)
                for job in list(self.jobs):
                    self.look(job, waiting)
                with _unless_full():
                    self.watcher.tick()
        finally:
            self.end()

    def begin(self, progress: RunProgress) -> None:
        """Start a run; follow it instead where another process has its folder."""
        run = progress.run
        if _in_use(run.folder):
            self.follow(progress)
            return
        run.folder.mkdir(parents=True, exist_ok=True)
        write_whole(run.file, dump(run.resolved))
        environment = dict(os.environ)
        if run.threads:
            environment.setdefault("OMP_NUM_THREADS", str(run.threads))
        output = (run.folder / OUTPUT).open("ab")
        try:
            begun = output.seek(0, os.SEEK_END)
            # a session of its own: the terminal's Ctrl-C reaches us alone, and we pass it on once
            process = subprocess.Popen(
                list(self.command(run)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            output.close()
            raise
        progress.state = RunState.RUNNING
        self.jobs.append(_RunningJob(progress, MetricsFollower(progress), process, output, begun))
        self.changed(progress)

    def follow(self, progress: RunProgress) -> None:
        progress.state = RunState.RUNNING
        self.jobs.append(_RunningJob(progress, MetricsFollower(progress)))
        self.warn(
            f"{progress.run.name}: running elsewhere, perhaps left by a sweep that was killed; waiting for it to end"
        )
        self.changed(progress)

    def look(self, job: _RunningJob, waiting: list[RunProgress]) -> None:
        progress = job.progress
        code = (
            job.process.poll() if job.process else None
        )  # asked first: what is written before the end is then seen below
        going = code is None if job.process else _in_use(progress.run.folder)
        records = job.tail.look()
        if going and (job.process or not self.interrupts):
            if records:
                self.changed(progress, records)
            return
        self.jobs.remove(job)
        if job.output:
            job.output.close()
        if code is None:
            self.left(progress, going, waiting)
        elif code == 0 and _status(progress.run) == "done":
            progress.state = RunState.DONE
        elif self.interrupts or code in STOPPED_BY_HAND:
            progress.state = RunState.STOPPED
        elif code == WRONG_INPUT and _in_use(progress.run.folder):  # another one took the folder after we had looked
            return self.follow(progress)
        else:
            progress.state, progress.error = RunState.FAILED, _reason(progress.run, code, job.begun)
        self.changed(progress, records)

    def left(self, progress: RunProgress, going: bool, waiting: list[RunProgress]) -> None:
        """A run elsewhere has ended, or we end and it does not: it is as its folder says; what is not over goes on
        here."""
        after = read_progress(progress.run)
        progress.state, progress.error = (RunState.WAITING, None) if going else (after.state, after.error)
        if progress.state is RunState.WAITING and not self.interrupts:
            waiting.insert(0, progress)

    def end(self) -> None:
        """An error of our own must not leave processes behind that nobody watches: each may write a checkpoint, then it
        is killed."""
        ours = [job.process for job in self.jobs if job.process]
        for process in ours:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        until = time.monotonic() + LAST_WORD
        for process in ours:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            _signal_group(process, signal.SIGKILL)

    def changed(self, progress: RunProgress, records: Sequence[dict[str, Any]] = ()) -> None:
        with _unless_full():
            self.watcher.changed(progress, records)

    def warn(self, text: str) -> None:
        with _unless_full():
            self.watcher.warning(text)

    def obey(self, waiting: list[RunProgress]) -> None:
        """Pass on the Ctrl-Cs that have come since."""
        while self.obeyed < self.interrupts:
            self.obeyed += 1
            waiting.clear()
            ours = [job.process for job in self.jobs if job.process]
            if self.obeyed == 1:
                if ours:
                    self.warn(
                        f"stopping: {len(ours)} running, each writes a checkpoint first; press Ctrl-C again to kill "
                        "them"
                    )
                if others := [job.progress.run.name for job in self.jobs if not job.process]:
                    self.warn(f"{' and '.join(others)}: running elsewhere, and not stopped")
                for process in ours:
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGINT)
            else:
                for process in ours:
                    _signal_group(process, signal.SIGKILL)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(number: int, frame: Any) -> None:
            self.interrupts += 1

        wanted = [signal.SIGINT, signal.SIGTERM]
        if (
            hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        ):  # the terminal is gone; nohup ignores that
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


def _in_use(folder: Path) -> bool:
    """True while a process runs the run of this folder: it holds the lock until it ends, however it ends."""
    try:
        with (folder / ".lock").open("rb") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder, no lock
        pass
    return False


@contextmanager
def _unless_full() -> Iterator[None]:
    """The sweep's own lines may be lost on a full disk; the runs may not be."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def _reason(run: PlannedRun, code: int, begun: int) -> str:
    """The last line the process left, or how it ended."""
    path = run.folder / OUTPUT
    try:
        said = path.read_bytes()[begun:].decode("utf-8", "replace")
    except OSError:
        said = ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    return f"{ended}: {last}; see {path}"


def _facts(sweep: Sweep) -> dict[str, Any]:
    """What sweep.json holds."""
    environment = describe_environment(sweep.seeds[0])
    return {
        "file": str(sweep.file),
        "asked": dict(sweep.asked),
        "jobs": sweep.jobs,
        "seeds": list(sweep.seeds),
        "cells": {cell.name: list(cell.overrides) for cell in sweep.every},
        "runs": [
            {"cell": c.name, "seed": s, "folder": f"{c.name}/seed-{s}"}
            for c, s in itertools.product(sweep.every, sweep.seeds)
        ],
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
                raise UserError(
                    f"{folder} is in use by another sweep; wait for it, stop it, or take another --folder"
                ) from error
        yield
