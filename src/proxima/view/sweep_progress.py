"""Progress of a sweep: a table on a terminal, otherwise lines, as in the sweep's log.txt; and the final table."""

import atexit
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxima.evaluate.headline import Headline
from proxima.experiments.metrics_follower import RunProgress, RunState
from proxima.experiments.seed_statistics import mean_over_seeds
from proxima.experiments.sweep_plan import Sweep
from proxima.runtime.watch.clock import Clock, SystemClock
from proxima.runtime.watch.observer import Record
from proxima.view.formatting import PATIENCE, duration, fixed, plus_minus, printable, write_safely
from proxima.view.log_lines import time_of_day
from proxima.view.terminal import table_of_rows

STYLES = {
    RunState.DONE: "green",
    RunState.RUNNING: "cyan",
    RunState.FAILED: "red",
    RunState.STOPPED: "yellow",
    RunState.WAITING: "dim",
}


class SweepLines:
    """Writes a line per event, and one per minute, with the local time of day."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream, self._clock = stream, clock or SystemClock()
        self._progresses: Sequence[RunProgress] = ()
        self._jobs, self._last = 1, self._clock.now()

    def started(self, sweep: Sweep, progresses: Sequence[RunProgress]) -> None:
        self._progresses, self._jobs = progresses, sweep.jobs
        self._line(opening(sweep, progresses))
        for progress in progresses:
            if progress.state is RunState.FAILED:
                self._line(f"failed before  {progress.run.name}  {printable(progress.error or '', 300)}")

    def changed(self, progress: RunProgress, records: Sequence[Record]) -> None:
        headline = progress.metrics.headline
        for record in records:
            if record.get("kind") == "eval" and (value := headline.value(record)) is not None:
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


class SweepTable:
    """Draws the state of each run on a terminal, twice a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progresses: Sequence[RunProgress] = ()
        self._jobs = 1
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop", get_renderable=self._view)

    def started(self, sweep: Sweep, progresses: Sequence[RunProgress]) -> None:
        self._progresses, self._jobs = progresses, sweep.jobs
        self._console.print(opening(sweep, progresses), highlight=False, markup=False)
        self._live.start()
        atexit.register(self._live.stop)

    def changed(self, progress: RunProgress, records: Sequence[Record]) -> None:
        if progress.state is RunState.FAILED:
            self.warning(f"{progress.run.name}: {progress.error}")

    def tick(self) -> None:
        self._live.refresh()

    def warning(self, text: str) -> None:
        self._live.console.print(Text(f"WARNING {printable(text)}", style="yellow"))

    def finished(self, progresses: Sequence[RunProgress]) -> None:
        self._live.refresh()
        self._live.stop()

    def _view(self) -> Table:
        shown = most_relevant(self._progresses, max(self._console.height - 4, 4))
        rows: list[dict[str, str | Text]] = [
            {
                "cell": s.run.cell,
                "seed": str(s.run.seed),
                "state": Text(s.state.value, style=STYLES[s.state]),
                "step": f"{s.step}/{s.run.steps}",
                "reward": fixed(s.reward, 3),
                **({"turns": fixed(s.turns, 1)} if played(self._progresses) else {}),
                f"held-out {headline_of(self._progresses).name}": fixed(s.held_out, 3),
                "eta": duration(s.remaining) if s.state is RunState.RUNNING and s.remaining is not None else "",
            }
            for s in shown
        ]
        caption = tally(self._progresses, self._jobs)
        table = table_of_rows(rows, left=["state"], caption=caption, caption_justify="left")
        if len(shown) < len(self._progresses):
            table.add_row(Text(f"… and {len(self._progresses) - len(shown)} more", style="dim"))
        return table


def most_relevant(progresses: Sequence[RunProgress], room: int) -> list[RunProgress]:
    """Select as many runs as fit, in order, by priority: running, failed, stopped, waiting, last finished."""
    if len(progresses) <= room:
        return list(progresses)
    rank = [RunState.RUNNING, RunState.FAILED, RunState.STOPPED, RunState.WAITING, RunState.DONE]
    states = [progress.state for progress in progresses]
    order = sorted(range(len(states)), key=lambda i: (rank.index(states[i]), -i if states[i] is RunState.DONE else i))
    return [progresses[i] for i in sorted(order[: room - 1])]


def opening(sweep: Sweep, progresses: Sequence[RunProgress]) -> str:
    """`sweep trust_regions  4 cells × 3 seeds = 12 runs, 2 side by side  5 done before      runs/trust_regions`."""
    before = sum(s.before and s.state is RunState.DONE for s in progresses)
    side = f", {sweep.jobs} side by side" if sweep.jobs > 1 else ""
    names = (sweep.file.stem, sweep.folder.resolve().name, sweep.file.resolve().parent.name)
    name = next((name for name in names if name != "sweep"), "")
    return f"sweep {name}  {size_of(sweep)}{side}{f'  {before} done before' if before else ''}  {sweep.folder}"


def size_of(sweep: Sweep) -> str:
    """`4 cells × 3 seeds = 12 runs`."""
    cells, seeds = len(sweep.cells), len(sweep.seeds)
    runs = cells * seeds
    return f"{cells} cell{'s' * (cells != 1)} × {seeds} seed{'s' * (seeds != 1)} = {runs} run{'s' * (runs != 1)}"


def tally(progresses: Sequence[RunProgress], jobs: int) -> str:
    """`5/12 done, 2 running, 5 waiting   eta 1h 12m`."""
    counts = Counter(s.state for s in progresses)
    done = f"{counts[RunState.DONE]}/{len(progresses)} done"
    rest = (RunState.RUNNING, RunState.WAITING, RunState.FAILED, RunState.STOPPED)
    others = [f"{counts[state]} {state.value}" for state in rest if counts[state]]
    left = time_left(progresses, jobs) if counts[RunState.RUNNING] else None
    return ", ".join([done, *others]) + (f"   eta {duration(left)}" if left else "")


def time_left(progresses: Sequence[RunProgress], jobs: int) -> float | None:
    """Estimate the seconds of training left; unstarted runs count as the mean of the others. None before any step."""
    whole = [s.seconds + s.remaining for s in progresses if s.remaining is not None and s.step]
    if not whole:
        return None
    running = [s.remaining for s in progresses if s.state is RunState.RUNNING]
    waiting = sum(s.state is RunState.WAITING for s in progresses) + running.count(None)
    left = [seconds for seconds in running if seconds is not None]
    total = sum(left) + waiting * sum(whole) / len(whole)
    return max(total / jobs, max(left, default=0.0))


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


def headline_of(progresses: Sequence[RunProgress]) -> Headline:
    """Return the headline figure of the sweep's evaluations."""
    return Headline.of([record for progress in progresses for record in progress.metrics.evals])


def played(progresses: Sequence[RunProgress]) -> bool:
    """Return True if some run has episodes."""
    return any(progress.turns is not None for progress in progresses)


def outcome_rows(progresses: Sequence[RunProgress]) -> list[dict[str, str]]:
    """Return a row per cell: finished seeds, held-out figure before and after, reward of the last step, seconds; each
    as mean ± half the interval."""
    figure = headline_of(progresses).name
    cells: dict[str, list[RunProgress]] = {}
    for progress in progresses:
        cells.setdefault(progress.run.cell, []).append(progress)
    rows = []
    for name, runs in cells.items():
        done = [s for s in runs if s.state is RunState.DONE]
        measures: dict[str, Sequence[float | None]] = {
            f"{figure} before": [before for s in done if (before := dict(s.evaluated).get(0.0)) is not None],
            f"{figure} after": [s.held_out for s in done if s.evaluated and s.evaluated[-1][0] == s.step],
            "training reward": [s.reward for s in done],
            **({"turns": [s.turns for s in done]} if played(progresses) else {}),
            "seconds": [s.seconds for s in done],
        }
        texts = {key: plus_minus(mean_over_seeds(v), 0 if key == "seconds" else 3) for key, v in measures.items()}
        rows.append({"cell": name, "done": f"{len(done)}/{len(runs)}", **texts})
    return rows
