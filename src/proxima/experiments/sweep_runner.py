"""Runs a sweep: each run in its own process, so that one crash does not stop the others. The same command resumes it.

Finished runs stay finished, interrupted ones resume from their last checkpoint (`proxima train … --resume`), and failed
ones wait for `retry_failed`. A run that outlived its killed sweep is followed until it ends, never started twice.
The sweep's folder gets sweep.json (settings, versions, machine). Each run's folder gets planned.yaml (the config it was
planned with; later edits of the recipe do not matter) and output.txt (the output of its processes).
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from proxima.config.resolved import dump
from proxima.data import UserError
from proxima.experiments.run_progress import RunProgress, RunState
from proxima.experiments.run_reader import read_summary
from proxima.experiments.sweep_plan import PlannedRun, Sweep
from proxima.process.children import kill_group, wait_or_kill
from proxima.process.exit_status import describe_exit
from proxima.runtime.state.folder import FolderLock, RunFolder
from proxima.runtime.watch.interrupt import signals_handled
from proxima.runtime.watch.observer import Record
from proxima.system.atomic_files import write_atomic
from proxima.system.full_disk import is_disk_full
from proxima.system.jsonl import dumps
from proxima.system.locks import is_held
from proxima.system.machine import describe_environment

POLL = 0.5  # seconds between two polls of the runs
SHUTDOWN_TIMEOUT = 60.0  # seconds for a checkpoint when the sweep itself fails
OUTPUT = "output.txt"
USER_ERROR = 2  # exit code
INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM)

Command = Callable[[PlannedRun], Sequence[str]]


class SweepObserver(Protocol):
    """Receives the events of a sweep, in order."""

    def started(self, sweep: Sweep, progresses: Sequence[RunProgress]) -> None:
        """Called when the states are known, before any run is started."""

    def changed(self, progress: RunProgress, records: Sequence[Record]) -> None:
        """Called when a run has changed its state or recorded metrics."""

    def tick(self) -> None:
        """Called after each poll."""

    def warning(self, text: str) -> None:
        """Called with a warning for the user."""

    def finished(self, progresses: Sequence[RunProgress]) -> None:
        """Called when no run is running any more."""


def train_command(run: PlannedRun) -> list[str]:
    """The command of a run, with its config as planned. A user would type the recipe and `overrides` instead."""
    return [sys.executable, "-m", "proxima.cli.main", "train", str(run.file), "--resume", "--quiet"]


def run_sweep(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    *observers: SweepObserver,
    retry_failed: bool = False,
    command: Command = train_command,
    poll: float = POLL,
) -> list[RunProgress]:
    """Run all unfinished runs, `sweep.jobs` at a time, and return the final state of every run.

    Ctrl-C (or SIGTERM, or a closed terminal) asks the running processes to write a checkpoint and exit, and no other
    run is started; a second one kills them. Either way the same command resumes the sweep.

    Args:
        runs: of `plan_runs`.
        observers: notified of each event, in this order.
        retry_failed: also resume failed runs, from their last checkpoint.
        command: the command of a run; tests pass their own.
    Raises: UserError if another sweep is using the folder.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.callback(_folder_lock(sweep.folder).release)
        progresses = [read_progress(run, retry_failed) for run in runs]
        write_atomic(sweep.folder / "sweep.json", dumps(_facts(sweep), indent=2) + "\n")
        loop = _SweepLoop(sweep, progresses, observers, command, poll)
        loop.notify(lambda observer: observer.started(sweep, progresses))
        with signals_handled(loop.count_interrupt):
            loop.run()
        loop.notify(lambda observer: observer.finished(progresses))
    return progresses


def read_progress(run: PlannedRun, retry_failed: bool = False) -> RunProgress:
    """Read the state of a run from its folder: done, failed, or waiting to be started or resumed."""
    progress = RunProgress(run)
    progress.poll()
    summary = read_summary(RunFolder(run.folder))
    status = summary.get("status")
    if status == "done":
        progress.state = RunState.DONE
        progress.before = True
    elif status in ("failed", "untrained") and not retry_failed:
        progress.state = RunState.FAILED
        progress.before = True
        progress.error = f"{summary.get('error') or 'failed'}; run it again with --retry-failed"
    return progress


@dataclass
class _RunningJob:
    """An active run. `process` is None if another process runs it; the output of ours starts at `offset`."""

    progress: RunProgress
    process: "subprocess.Popen[bytes] | None" = None
    offset: int = 0


@dataclass
class _SweepLoop:
    sweep: Sweep
    progresses: Sequence[RunProgress]
    observers: Sequence[SweepObserver]
    command: Command
    poll: float
    jobs: list[_RunningJob] = field(default_factory=list)
    interrupts: int = 0
    forwarded: int = 0

    def run(self) -> None:
        waiting = [progress for progress in self.progresses if progress.state is RunState.WAITING]
        try:
            while waiting or self.jobs:
                self.forward_interrupts(waiting)
                while waiting and len(self.jobs) < self.sweep.jobs and not self.interrupts:
                    progress = waiting.pop(0)
                    try:
                        self.start(progress)
                    except OSError as error:  # a full disk, too many processes: fails this run only
                        progress.state = RunState.FAILED
                        progress.error = f"could not start: {error}"
                        self.changed(progress)
                time.sleep(self.poll)
                for job in list(self.jobs):
                    self.check(job, waiting)
                self.notify(lambda observer: observer.tick())
        finally:
            self.terminate()

    def start(self, progress: RunProgress) -> None:
        """Start a run; follow it instead if another process has locked its folder."""
        run = progress.run
        if is_held(run.folder / ".lock"):  # by a process that runs this run, until it ends
            self.follow(progress)
            return
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(run.file, dump(run.resolved))
        environment = dict(os.environ)
        if run.threads:
            environment.setdefault("OMP_NUM_THREADS", str(run.threads))
        with (run.folder / OUTPUT).open("ab") as output:
            offset = output.seek(0, os.SEEK_END)
            # in its own session: the terminal's Ctrl-C reaches only this process, which forwards it once
            process = subprocess.Popen(
                list(self.command(run)),
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        progress.state = RunState.RUNNING
        self.jobs.append(_RunningJob(progress, process, offset))
        self.changed(progress)

    def follow(self, progress: RunProgress) -> None:
        progress.state = RunState.RUNNING
        self.jobs.append(_RunningJob(progress))
        self.warn(f"{progress.run.name}: another process runs it, perhaps one of a killed sweep; waiting until it ends")
        self.changed(progress)

    def check(self, job: _RunningJob, waiting: list[RunProgress]) -> None:
        """Report new metrics of a job, and its end."""
        progress = job.progress
        code = job.process.poll() if job.process else None  # before the metrics: nothing is written after the end
        if job.process:
            running = code is None
        else:
            running = is_held(progress.run.folder / ".lock")
        records = progress.poll()
        if running and (job.process or not self.interrupts):
            if records:
                self.changed(progress, records)
            return
        self.jobs.remove(job)
        if code is None:
            self.release(progress, running, waiting)
        elif code == 0 and read_summary(RunFolder(progress.run.folder)).get("status") == "done":
            progress.state = RunState.DONE
        elif self.interrupts or code in INTERRUPTED:
            progress.state = RunState.STOPPED
        elif code == USER_ERROR and is_held(progress.run.folder / ".lock"):  # by another process, after our check
            return self.follow(progress)
        else:
            progress.state = RunState.FAILED
            progress.error = _reason(progress.run, code, job.offset)
        self.changed(progress, records)
        warnings = read_summary(RunFolder(progress.run.folder)).get("warnings")
        if warnings:
            if len(warnings) > 1:
                many = f"{len(warnings)} warnings, the first"
            else:
                many = "1 warning"
            report = progress.run.folder / "report.html"
            self.warn(f"{progress.run.name}: {many}: {warnings[0]['text']}; see {report}")

    def release(self, progress: RunProgress, running: bool, waiting: list[RunProgress]) -> None:
        """Handle the end of a run of another process, or of this sweep before that run: read its state from its folder,
        and run it here if it is not finished."""
        after = read_progress(progress.run)
        if running:
            progress.state = RunState.WAITING
            progress.error = None
        else:
            progress.state = after.state
            progress.error = after.error
        if progress.state is RunState.WAITING and not self.interrupts:
            waiting.insert(0, progress)

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        return [job.process for job in self.jobs if job.process]

    def terminate(self) -> None:
        """Leave no process behind: interrupt each for a last checkpoint, then kill it."""
        for process in self.processes:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        for process in self.processes:
            wait_or_kill(process, max(0.0, deadline - time.monotonic()))

    def changed(self, progress: RunProgress, records: Sequence[Record] = ()) -> None:
        self.notify(lambda observer: observer.changed(progress, records))

    def warn(self, text: str) -> None:
        self.notify(lambda observer: observer.warning(text))

    def notify(self, event: Callable[[SweepObserver], None]) -> None:
        """Notify every observer; on a full disk the sweep's own log may be lost, but not the runs."""
        for observer in self.observers:
            try:
                event(observer)
            except OSError as error:
                if not is_disk_full(error):
                    raise

    def forward_interrupts(self, waiting: list[RunProgress]) -> None:
        """Forward new Ctrl-Cs: the first interrupts the processes, the second kills them."""
        while self.forwarded < self.interrupts:
            self.forwarded += 1
            waiting.clear()
            if self.forwarded > 1:
                for process in self.processes:
                    kill_group(process.pid)
                continue
            n = len(self.processes)
            if n:
                runs = "run" if n == 1 else "runs"
                self.warn(f"stopping {n} {runs} after a checkpoint each; press Ctrl-C again to kill them")
            others = [job.progress.run.name for job in self.jobs if not job.process]
            if others:
                self.warn(f"not stopped, because another process runs it: {', '.join(others)}")
            for process in self.processes:
                process.send_signal(signal.SIGINT)

    def count_interrupt(self, number: int, frame: Any) -> None:
        self.interrupts += 1


def _reason(run: PlannedRun, code: int, offset: int) -> str:
    """Return the exit code, and the last line that the process printed."""
    path = run.folder / OUTPUT
    try:
        output = path.read_bytes()[offset:].decode("utf-8", "replace")
    except OSError:
        output = ""
    last, *_ = output.strip().splitlines()[-1:] or ["no output"]
    return f"{describe_exit(code, last.strip().removeprefix('error: '))}; see {path}"


def _facts(sweep: Sweep) -> dict[str, Any]:
    """The contents of sweep.json."""
    environment = describe_environment(sweep.seeds[0])
    runs = [(cell.name, seed) for cell, seed in itertools.product(sweep.all_cells, sweep.seeds)]
    return {
        "file": str(sweep.file),
        "settings": dict(sweep.settings),
        "jobs": sweep.jobs,
        "seeds": list(sweep.seeds),
        "cells": {cell.name: list(cell.overrides) for cell in sweep.all_cells},
        "runs": [{"cell": cell, "seed": seed, "folder": f"{cell}/seed-{seed}"} for cell, seed in runs],
        **{key: environment[key] for key in ("proxima", "python", "packages", "machine")},
    }


def _folder_lock(folder: Path) -> FolderLock:
    """Lock the folder for one sweep at a time."""
    try:
        return FolderLock(folder / ".lock")
    except UserError as error:
        remedy = "wait for it, stop it, or use another --folder"
        raise UserError(f"another sweep is using {folder}", remedy=remedy) from error
