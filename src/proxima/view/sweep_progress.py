"""A sweep while it goes: a table on a terminal, lines elsewhere and in the sweep's log.txt; and the table at its
end."""

import atexit
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxima.lab.metrics_follower import Standing, State
from proxima.lab.seed_statistics import estimate
from proxima.lab.sweep_plan import Sweep
from proxima.lab.sweep_runner import Watcher
from proxima.runtime.clock import Clock, SystemClock
from proxima.view.comparison_page import plus_minus
from proxima.view.formatting import duration, fixed, printable
from proxima.view.log_lines import time_of_day

Record = Mapping[str, Any]
PATIENCE = 60.0  # seconds without a line before one says where things stand
STYLES = {
    State.DONE: "green",
    State.RUNNING: "cyan",
    State.FAILED: "red",
    State.STOPPED: "yellow",
    State.WAITING: "dim",
}


class SweepLines:
    """One line an event, and one a minute, to a stream; flushed one by one.

    Args:
        stream: a pipe, a file, or log.txt of the sweep.
        clock: stamps the lines with the local time of day.
    """

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream, self._clock = stream, clock or SystemClock()
        self._standings: Sequence[Standing] = ()
        self._jobs, self._last = 1, self._clock.now()

    def started(self, sweep: Sweep, standings: Sequence[Standing]) -> None:
        self._standings, self._jobs = standings, sweep.jobs
        self._line(opening(sweep, standings))
        for standing in standings:
            if standing.state is State.FAILED:
                self._line(f"failed before  {standing.run.name}  {printable(standing.error or '', 300)}")

    def changed(self, standing: Standing, records: Sequence[Record]) -> None:
        for record in records:
            if record.get("kind") == "eval" and record.get("accuracy") is not None:
                accuracy = f"accuracy {fixed(record['accuracy'], 3)}"
                self._line(f"eval     {standing.run.name}  step {record['step']}/{standing.run.steps}  {accuracy}")
        if records and standing.state is State.RUNNING:
            return
        self._line(f"{standing.state.value:<8} {standing.run.name}  {so_far(standing)}".rstrip())

    def tick(self) -> None:
        if self._clock.now() - self._last < PATIENCE:
            return
        running = [f"{s.run.name} step {s.step}/{s.run.steps}" for s in self._standings if s.state is State.RUNNING]
        self._line(f"{tally(self._standings, self._jobs)}   {'; '.join(running)}")

    def warning(self, text: str) -> None:
        self._line(f"WARNING  {printable(text)}")

    def finished(self, standings: Sequence[Standing]) -> None:
        self._line(tally(standings, self._jobs))

    def _line(self, text: str) -> None:
        self._last = self._clock.now()
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = f"{time_of_day(self._clock.wall())}  {text}"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class SweepTable:
    """Draws where each run stands on a terminal, twice a second.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._standings: Sequence[Standing] = ()
        self._jobs, self._notes = 1, list[str]()
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop", get_renderable=self._view)

    def started(self, sweep: Sweep, standings: Sequence[Standing]) -> None:
        self._standings, self._jobs = standings, sweep.jobs
        self._console.print(opening(sweep, standings), highlight=False, markup=False)
        self._live.start()
        atexit.register(self._live.stop)

    def changed(self, standing: Standing, records: Sequence[Record]) -> None:
        if standing.state is State.FAILED:
            self.warning(f"{standing.run.name}: {standing.error}")

    def tick(self) -> None:
        self._live.refresh()

    def warning(self, text: str) -> None:
        self._live.console.print(Text(f"WARNING {printable(text)}", style="yellow"))

    def finished(self, standings: Sequence[Standing]) -> None:
        self._live.refresh()
        self._live.stop()

    def _view(self) -> Table:
        table = Table(
            box=None,
            padding=(0, 2, 0, 0),
            header_style="dim",
            caption=tally(self._standings, self._jobs),
            caption_justify="left",
        )
        table.add_column("cell", overflow="fold")
        for name in ("seed", "state", "step", "reward", "accuracy", "eta"):
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        room = max(self._console.height - 4, 4)
        shown = foremost(self._standings, room)
        for s in shown:
            state = Text(s.state.value, style=STYLES[s.state])
            eta = duration(s.left) if s.state is State.RUNNING and s.left is not None else ""
            table.add_row(
                s.run.cell,
                str(s.run.seed),
                state,
                f"{s.step}/{s.run.steps}",
                fixed(s.reward, 3),
                fixed(s.accuracy, 3),
                eta,
            )
        if len(shown) < len(self._standings):
            table.add_row(Text(f"… and {len(self._standings) - len(shown)} more", style="dim"))
        return table


def foremost(standings: Sequence[Standing], room: int) -> list[Standing]:
    """As many as there is room for, in their order: the running ones, then the failed, the waiting, and the done from
    the last."""
    if len(standings) <= room:
        return list(standings)
    rank = [State.RUNNING, State.FAILED, State.STOPPED, State.WAITING, State.DONE]
    order = sorted(
        range(len(standings)),
        key=lambda i: (rank.index(standings[i].state), -i if standings[i].state is State.DONE else i),
    )
    return [standings[i] for i in sorted(order[: room - 1])]


def opening(sweep: Sweep, standings: Sequence[Standing]) -> str:
    """`sweep trust_regions  4 cells × 3 seeds = 12 runs, 2 side by side  5 done before      runs/trust_regions`."""
    before = sum(s.before and s.state is State.DONE for s in standings)
    side = f", {sweep.jobs} side by side" if sweep.jobs > 1 else ""
    names = (sweep.file.stem, sweep.folder.resolve().name, sweep.file.resolve().parent.name)
    name = next((name for name in names if name != "sweep"), "")  # `sweep sweep` says nothing
    return f"sweep {name}  {size_of(sweep)}{side}{f'  {before} done before' if before else ''}  {sweep.folder}"


def size_of(sweep: Sweep) -> str:
    """`4 cells × 3 seeds = 12 runs`."""
    cells, seeds = len(sweep.cells), len(sweep.seeds)
    runs = cells * seeds
    return f"{cells} cell{'s' * (cells != 1)} × {seeds} seed{'s' * (seeds != 1)} = {runs} run{'s' * (runs != 1)}"


def tally(standings: Sequence[Standing], jobs: int) -> str:
    """`5/12 done, 2 running, 5 waiting   eta 1h 12m`."""
    counts = Counter(s.state for s in standings)
    done = f"{counts[State.DONE]}/{len(standings)} done"
    others = [
        f"{counts[state]} {state.value}"
        for state in (State.RUNNING, State.WAITING, State.FAILED, State.STOPPED)
        if counts[state]
    ]
    left = time_left(standings, jobs) if counts[State.RUNNING] else None
    return ", ".join([done, *others]) + (f"   eta {duration(left)}" if left else "")


def time_left(standings: Sequence[Standing], jobs: int) -> float | None:
    """Seconds of training to come: a waiting run takes as long as those that are known do on average. None while
    nothing is known."""
    known = [s.seconds + (s.left or 0.0) for s in standings if s.left is not None and s.step]
    if not known:
        return None
    running = [s.left for s in standings if s.state is State.RUNNING and s.left is not None]
    unknown = sum(s.state is State.WAITING or (s.state is State.RUNNING and s.left is None) for s in standings)
    total = sum(running) + unknown * sum(known) / len(known)
    return max(total / jobs, max(running, default=0.0))


def so_far(standing: Standing) -> str:
    """`step 50/50  reward 0.93  accuracy 0.025 → 0.940  3m 12s`, or why it failed."""
    if standing.error and standing.state is State.FAILED:
        return printable(standing.error, 300)
    if not standing.step and not standing.evaluated:
        return ""
    parts = [f"step {standing.step}/{standing.run.steps}"]
    if standing.reward is not None:
        parts.append(f"reward {fixed(standing.reward, 3)}")
    if standing.evaluated:
        values = [value for _, value in standing.evaluated]
        parts.append(
            f"accuracy {' → '.join(fixed(v, 3) for v in ([values[0], values[-1]] if len(values) > 1 else values))}"
        )
    return "  ".join([*parts, duration(standing.seconds)])


def outcome_table(standings: Sequence[Standing]) -> Table:
    """A row a cell: how many of its seeds are done, accuracy before and after, last reward and seconds, each mean ±
    half its interval."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("cell", overflow="fold")
    for name in ("done", "before", "after", "reward", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    cells: dict[str, list[Standing]] = {}
    for standing in standings:
        cells.setdefault(standing.run.cell, []).append(standing)
    for name, runs in cells.items():
        done = [s for s in runs if s.state is State.DONE]
        before = estimate([s.evaluated[0][1] for s in done if s.evaluated and s.evaluated[0][0] == 0])
        after = estimate([s.accuracy for s in done if s.evaluated and s.evaluated[-1][0] == s.step])
        reward, seconds = estimate([s.reward for s in done]), estimate([s.seconds for s in done])
        table.add_row(
            name,
            f"{len(done)}/{len(runs)}",
            plus_minus(before),
            plus_minus(after),
            plus_minus(reward),
            plus_minus(seconds, 0),
        )
    return table


class Both:
    """Tells two watchers the same."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def started(self, sweep: Sweep, standings: Sequence[Standing]) -> None:
        for watcher in self._watchers:
            watcher.started(sweep, standings)

    def changed(self, standing: Standing, records: Sequence[dict[str, Any]]) -> None:
        for watcher in self._watchers:
            watcher.changed(standing, records)

    def tick(self) -> None:
        for watcher in self._watchers:
            watcher.tick()

    def warning(self, text: str) -> None:
        for watcher in self._watchers:
            watcher.warning(text)

    def finished(self, standings: Sequence[Standing]) -> None:
        for watcher in self._watchers:
            watcher.finished(standings)
