"""Runs a sweep, with its progress in lines, on the screen and in its log.txt."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from proxima.data.errors import counted
from proxima.experiments.run_progress import RunProgress, RunState
from proxima.experiments.sweep_file import read_sweep
from proxima.experiments.sweep_plan import PlannedRun, Sweep, plan_runs
from proxima.experiments.sweep_runner import run_sweep
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Record
from proxima.system.atomic_files import make_folder
from proxima.view.comparison_files import compare_and_print
from proxima.view.formatting import PATIENCE, duration, fixed, printable, write_safely
from proxima.view.log_lines import time_of_day


class SweepLines:
    """Writes a line per event, and one per minute, with the local time of day."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream = stream
        self._clock = clock or Clock()
        self._progresses: Sequence[RunProgress] = ()
        self._jobs = 1
        self._last = self._clock.now()

    def started(self, sweep: Sweep, progresses: Sequence[RunProgress]) -> None:
        self._progresses = progresses
        self._jobs = sweep.jobs
        self._line(opening(sweep, progresses))
        for progress in progresses:
            if progress.state is RunState.FAILED:
                self._line(f"failed before  {progress.run.name}  {printable(progress.error or '', 300)}")

    def changed(self, progress: RunProgress, records: Sequence[Record]) -> None:
        headline = progress.metrics.headline
        for record in records:
            if record.get("kind") != "eval":
                continue
            value = headline.value(record)
            if value is not None:
                where = f"{progress.run.name}  step {record['step']}/{progress.run.steps}"
                self._line(f"eval     {where}  {headline.name} {fixed(value, 3)}")
        if records and progress.state is RunState.RUNNING:
            return
        self._line(f"{progress.state.value:<8} {progress.run.name}  {progress_text(progress)}".rstrip())

    def tick(self) -> None:
        if self._clock.now() - self._last < PATIENCE:
            return
        running = [f"{s.run.name} step {s.step}/{s.run.steps}" for s in self._progresses if s.state is RunState.RUNNING]
        self._line(f"{tally(self._progresses, self._jobs)}   {'; '.join(running)}")

    def warning(self, text: str) -> None:
        self._line(f"WARNING  {printable(text)}")

    def finished(self, progresses: Sequence[RunProgress]) -> None:
        self._line(tally(progresses, self._jobs))

    def _line(self, text: str) -> None:
        self._last = self._clock.now()
        write_safely(self._stream, f"{time_of_day(self._clock.wall())}  {text}\n")


def opening(sweep: Sweep, progresses: Sequence[RunProgress]) -> str:
    """`sweep trust_regions  4 cells × 3 seeds = 12 runs, 2 side by side  5 done before      runs/trust_regions`."""
    names = (sweep.file.stem, sweep.folder.resolve().name, sweep.file.resolve().parent.name)
    name = next((name for name in names if name != "sweep"), "")
    size = size_of(sweep)
    if sweep.jobs > 1:
        size += f", {sweep.jobs} side by side"
    parts = [f"sweep {name}", size]
    before = sum(progress.before and progress.state is RunState.DONE for progress in progresses)
    if before:
        parts.append(f"{before} done before")
    parts.append(str(sweep.folder))
    return "  ".join(parts)


def size_of(sweep: Sweep) -> str:
    """`4 cells × 3 seeds = 12 runs`."""
    cells = len(sweep.cells)
    seeds = len(sweep.seeds)
    return f"{counted(cells, 'cell')} × {counted(seeds, 'seed')} = {counted(cells * seeds, 'run')}"


def tally(progresses: Sequence[RunProgress], jobs: int) -> str:
    """`5/12 done, 2 running, 5 waiting   eta 1h 12m`."""
    counts = Counter(s.state for s in progresses)
    done = f"{counts[RunState.DONE]}/{len(progresses)} done"
    rest = (RunState.RUNNING, RunState.WAITING, RunState.FAILED, RunState.STOPPED)
    others = [f"{counts[state]} {state.value}" for state in rest if counts[state]]
    text = ", ".join([done, *others])
    seconds = None
    if counts[RunState.RUNNING]:
        seconds = time_left(progresses, jobs)
    return f"{text}   eta {duration(seconds)}" if seconds else text


def time_left(progresses: Sequence[RunProgress], jobs: int) -> float | None:
    """Estimate the seconds of training left; unstarted runs count as the mean of the others. None before any step."""
    totals = [s.seconds + s.remaining for s in progresses if s.remaining is not None and s.step]
    if not totals:
        return None
    running = [s.remaining for s in progresses if s.state is RunState.RUNNING]
    waiting = sum(s.state is RunState.WAITING for s in progresses) + running.count(None)
    remaining = [seconds for seconds in running if seconds is not None]
    total = sum(remaining) + waiting * sum(totals) / len(totals)
    return max(total / jobs, max(remaining, default=0.0))


def progress_text(progress: RunProgress) -> str:
    """`step 50/50  reward 0.93  held-out accuracy 0.025 → 0.940  3m 12s`, or the reason of a failure."""
    if progress.error and progress.state is RunState.FAILED:
        return printable(progress.error, 300)
    if not progress.step and not progress.evaluated:
        return ""
    parts = [f"step {progress.step}/{progress.run.steps}"]
    if progress.reward is not None:
        parts.append(f"reward {fixed(progress.reward, 3)}")
    if progress.evaluated:
        values = [fixed(value, 3) for _, value in (progress.evaluated[0], progress.evaluated[-1])]
        parts.append(f"held-out {progress.metrics.headline.name} {' → '.join(values[: len(progress.evaluated)])}")
    return "  ".join([*parts, duration(progress.seconds)])


def planned_cells(
    file: str, folder: str | None, jobs: int | None, only: Sequence[str], *, import_code: bool
) -> tuple[Sweep, list[PlannedRun]]:
    """The sweep of a file, with these values in place of its own, and its runs."""
    sweep = read_sweep(file, folder=folder, jobs=jobs, only=only)
    return sweep, plan_runs(sweep, import_code=import_code)


def train_cells(sweep: Sweep, runs: list[PlannedRun], *, retry_failed: bool = False) -> int:
    """Run the sweep, show its progress, and compare its runs; return the exit code."""
    make_folder(sweep.folder)
    with (sweep.folder / "log.txt").open("a", encoding="utf-8", errors="replace") as log:
        progresses = run_sweep(sweep, runs, SweepLines(log), SweepLines(sys.stdout), retry_failed=retry_failed)
    states = {progress.state for progress in progresses}
    if RunState.DONE in states:
        print()
        compare_and_print([str(sweep.folder)])
    if RunState.WAITING in states or RunState.STOPPED in states:
        print("stopped; the same command resumes")
        return 130
    return 1 if RunState.FAILED in states else 0


def print_cells(sweep: Sweep, runs: Sequence[PlannedRun]) -> int:
    """Print the commands of the cells; return the exit code."""
    print(f"{size_of(sweep)} in {sweep.folder}, {sweep.jobs} at a time\n")
    for run in runs:
        print(f"{run.name}\n    proxima train {shlex.join([str(run.recipe), *run.overrides])} --resume")
    return 0
