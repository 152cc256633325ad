"""The supervisor of a run's ranks on a Ray cluster: starts them, prints their output, and when one dies, kills the
others and restarts all of them from the last checkpoint."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from proxima.config.sections.ranks_section import RayPlacement
from proxima.runtime.placement.engine_group import EngineGroup, engines_on
from proxima.runtime.placement.engine_host import EnginePlan
from proxima.runtime.placement.rank_group import RankCall, RankGroup, start_group
from proxima.runtime.placement.rank_host import RankReport
from proxima.runtime.placement.rank_lines import RankLines
from proxima.runtime.placement.rank_process import INTERRUPTED, REFUSED
from proxima.runtime.placement.ray_cluster import connected, fitted
from proxima.runtime.watch.interrupt import SIGNALS, signals_restored

POLL_SECONDS = 0.5  # that an actor waits for a line
GRACE_SECONDS = 3.0  # in which the first cause may be noticed after its consequences
CLOSING_SECONDS = 60.0  # that the other ranks may take after rank 0 is done
LEAST_SILENCE = 30.0  # seconds without a report from an actor; on a busy machine, one may take some
FAILED = 1


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of a rank.

    Args:
        exit_code: -N is signal N; None: it is not known, because its actor is gone.
        reason: why the exit code is not known.
    """

    rank: int
    at: float
    exit_code: int | None = None
    reason: str = ""

    @property
    def killed(self) -> bool:
        return self.exit_code is None or self.exit_code < 0


class Interrupts:
    """Counts Ctrl-C and SIGTERM; `signals_restored` puts the handlers back."""

    def __init__(self) -> None:
        self.count = 0
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._add)

    def _add(self, number: int, frame: Any) -> None:
        self.count += 1

    def look(self) -> None:
        """Raise KeyboardInterrupt after the first signal: nothing runs that could write a checkpoint."""
        if self.count:
            raise KeyboardInterrupt


def supervise(
    function: Callable[..., int] | str,
    spec: RayPlacement,
    arguments: Mapping[str, Any],
    *,
    again: Mapping[str, Any] | None = None,
    engines: EnginePlan | None = None,
    log: Path | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Call a function in every rank, each in a separate process with the variables of torchrun; returns the exit code.

    A rank's exit code is what the function returns: 2 after a `UserError`, 130 after Ctrl-C, 70 after any other
    exception. Codes 0, 1, 2 and 130 of rank 0 are those of the run. If a rank is killed or lost, all ranks are killed
    and restarted, at most `spec.restarts` times; a rank that raises ends the run, because it would raise again. The
    first Ctrl-C goes to rank 0 alone, which stops the run; a second one kills all ranks.

    Args:
        function: a function of a module, or "module:name".
        arguments: of the function, by name; JSON values.
        again: arguments that replace these when the ranks are restarted; None: `resume=True`.
        engines: the plan for the servers that `spec.engines` asks for; None: no servers. They start before the ranks
            and run through all restarts of these; rank 0 finds their addresses with `placed_engine`.
        log: file that receives the lines of all ranks.
        out, err: as in `RankLines`.

    Raises:
        FieldError: the cluster can't be reached, or lacks the devices; before anything is started.
        UserError: the ranks can't be started.
        KeyboardInterrupt: Ctrl-C while they are being started.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    lines = RankLines(log, out=out, err=err)
    with connected(spec), signals_restored(), ExitStack() as stack:
        interrupts = Interrupts()
        spec = fitted(spec, lines.say)
        placed = stack.enter_context(engines_on(spec, engines, lines.say, interrupts.look))
        call = RankCall(function=function, arguments=arguments)
        died_at: float | None = None
        for starts in range(spec.restarts + 1):
            group = start_group(spec, call, interrupts.look, placed)
            if died_at is not None:
                lost = time.monotonic() - died_at
                lines.say(
                    f"all {spec.ranks} ranks run again; {lost:.1f} s were lost, and the work since the checkpoint"
                )
            try:
                end = first_cause(watch(group, spec, lines, interrupts, placed))
            finally:
                group.stop()
                lines.flush(at_once=True)
            if interrupts.count or end.exit_code in (0, FAILED, REFUSED, INTERRUPTED):
                return INTERRUPTED if interrupts.count and end.exit_code != 0 else int(end.exit_code or 0)
            if not end.killed:  # an exception, which would be raised again
                if end.rank > 0:
                    lines.say(f"error: {describe_end(end, group, lines)}: the run ends, --resume continues it")
                return int(end.exit_code or FAILED)
            cause, died_at = describe_end(end, group, lines), end.at
            if starts < spec.restarts:
                number = f"restart {starts + 1} of at most {spec.restarts}"
                lines.say(f"{cause}; all ranks restart from the last checkpoint, {number}")
            call = RankCall(function=function, arguments={**arguments, **(again or {"resume": True})})
        given_up = (
            f"after {spec.restarts} restarts (placement.restarts)" if spec.restarts else "placement.restarts is 0"
        )
        lines.say(f"error: {cause}; {given_up}: the run ends, --resume continues it")
        return FAILED


def watch(
    group: RankGroup, spec: RayPlacement, lines: RankLines, interrupts: Interrupts, placed: EngineGroup | None = None
) -> list[RankEnd]:
    """Print the ranks' output until the run is over; returns how they ended, in the order in which it was noticed."""
    import ray

    asked: dict[Any, tuple[int, float]] = {}  # outstanding report → its rank, and when it was requested
    ends: dict[int, RankEnd] = {}
    passed_on = 0

    def ask(rank: int) -> None:
        asked[group.hosts[rank].report.remote(POLL_SECONDS)] = rank, time.monotonic()

    for rank in range(spec.ranks):
        ask(rank)
    while not is_over(ends, spec.ranks, time.monotonic()):
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=POLL_SECONDS)
        for reference in ready:
            rank, _ = asked.pop(reference)
            try:
                report: RankReport = ray.get(reference)
            except Exception as error:  # Ray's errors about an actor are many
                ends[rank] = RankEnd(rank=rank, at=time.monotonic(), reason=_reason(error))
                continue
            for stream, line in report.lines:
                lines.add(rank, stream, line)
            if report.exit_code is None:
                ask(rank)
            else:
                ends[rank] = RankEnd(rank=rank, at=time.monotonic(), exit_code=report.exit_code)
        now, silence = time.monotonic(), max(LEAST_SILENCE, 3 * spec.heartbeat)
        for reference, (rank, since) in list(asked.items()):
            if spec.heartbeat and now - since > silence:
                del asked[reference]
                ends[rank] = RankEnd(rank=rank, at=now, reason=f"has not responded for {silence:g} s")
        lines.flush()
        if placed is not None:
            placed.poll()
        if interrupts.count > passed_on:
            passed_on = interrupts.count
            if passed_on > 1 or 0 in ends:
                break
            lines.say("stopping: rank 0 writes a checkpoint first; press Ctrl-C again to kill all ranks")
            group.hosts[0].interrupt.remote()
    return list(ends.values()) or [RankEnd(rank=0, at=time.monotonic(), exit_code=INTERRUPTED)]


def is_over(ends: Mapping[int, RankEnd], ranks: int, now: float) -> bool:
    """True if there is nothing left to wait for: all ranks have ended, or rank 0 has and the others had time to, or a
    rank has failed and there was time to notice the cause."""
    if len(ends) == ranks:
        return True
    failed = [end.at for end in ends.values() if end.exit_code != 0]
    if failed:
        return now - min(failed) > GRACE_SECONDS
    return 0 in ends and now - ends[0].at > CLOSING_SECONDS


def first_cause(ends: list[RankEnd]) -> RankEnd:
    """The end that caused the others. A rank that was killed or lost breaks the collectives of the others, which then
    raise or exit, and rank 0 reports that and fails; without such a rank, rank 0's own end is the run's."""
    zero = next((index for index, end in enumerate(ends) if end.rank == 0), len(ends))
    # torch aborts a rank whose peers are gone: after rank 0's own end, an abort is not the cause
    killed = [end for i, end in enumerate(ends) if end.killed and (i <= zero or end.exit_code != -signal.SIGABRT)]
    code = ends[zero].exit_code if zero < len(ends) else None
    if code in (0, INTERRUPTED) or (not killed and code in (FAILED, REFUSED)):
        return ends[zero]
    if killed:
        return killed[0]
    failed = [end for end in ends if end.exit_code != 0]
    return next((end for end in failed if end.exit_code == REFUSED), (failed or ends)[0])


def describe_end(end: RankEnd, group: RankGroup, lines: RankLines) -> str:
    """`rank 2 on NODE died: killed by signal 9 (SIGKILL)`."""
    name = group.name_of(end.rank)
    if end.exit_code is None:
        return f"{name} died: {_lost(end, group)}"
    last = f"; its last line: {lines.last[end.rank]}" if end.rank in lines.last else ""
    if end.exit_code < 0:
        return f"{name} died: killed by signal {-end.exit_code} ({signal.Signals(-end.exit_code).name}){last}"
    return f"{name} ended with exit code {end.exit_code}{last}"


def _lost(end: RankEnd, group: RankGroup) -> str:
    import ray

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return end.reason if group.places[end.rank].node in alive else "its node was lost"


def _reason(error: Exception) -> str:
    from ray.exceptions import ActorUnavailableError, OutOfMemoryError

    if isinstance(error, OutOfMemoryError) or "memory pressure" in str(error):
        return "Ray killed its actor because the node ran out of memory"
    return "its node does not answer" if isinstance(error, ActorUnavailableError) else "its actor was killed"
