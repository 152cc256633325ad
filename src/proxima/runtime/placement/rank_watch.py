"""Watches the other ranks from rank 0: reports which one differs when the run stalls, and ends the run when one dies.

A dedicated thread listens, because the thread that computes may be inside a collective that never ends. It finds the
first cause among the failures that it hears of, and terminates the process if the run can't end in order.
"""

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

from proxima.config.sections.placement import STARTED_AGAIN, is_supervised
from proxima.data import UserError
from proxima.runtime.placement.rank_listener import RankListener
from proxima.runtime.placement.rank_messages import (
    Channel,
    FoldedLines,
    RankFailure,
    checked_beat,
    follows_from_loss,
    silent_seconds,
    span_of,
)
from proxima.runtime.watch.interrupt import signals_handled
from proxima.training.process_ranks import ProcessRanks, place_of

TICK = 0.2  # seconds between checks
SETTLE = 1.0  # seconds in which the consequences of a cause may be heard before the cause
CLOSING = 20.0  # seconds for the run to end in order; torchrun kills after 30


@dataclass
class HeardRank:
    """Another rank, as observed by rank 0."""

    rank: int
    host: str
    facts: Mapping[str, Any]
    channel: Channel
    heard: float
    beat: Mapping[str, Any] | None = None
    gone: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


class RankWatch:
    """Listens to the lifelines of the other ranks.

    Args:
        timeout: of the placement.
        host: the address to listen on; empty: all of this machine.

    Attributes: `port` and `token`, which the other ranks need.
    """

    def __init__(self, ranks: ProcessRanks, timeout: float, host: str = "") -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.silent = silent_seconds(timeout)
        self.lines = FoldedLines()
        self.peers: dict[int, HeardRank] = {}
        self.failure: RankFailure | None = None
        self._opened = ExitStack()  # the connections
        self._causes: list[RankFailure] = []
        self._failed_at = 0.0  # when the first cause was heard of
        self._closing = CLOSING  # the time to end after it
        self._changed = threading.Condition()
        self._taken = False
        self._closed = False
        self._warn: Callable[[str], object] = lambda text: print(f"WARNING {text}", file=sys.stderr, flush=True)
        self._cancel: Callable[[], object] = lambda: None
        self._warn_after = self.silent
        self._selector = selectors.DefaultSelector()
        self._listener = RankListener(host, self._selector, self._admit, lambda text: self._warn(text))
        self.port = self._listener.port
        self.token = self._listener.token
        threading.Thread(target=self._run, name="proxima-ranks", daemon=True).start()

    # ---- for the thread that computes --------------------------------------------------------------------------------

    def meet(self, seconds: float) -> dict[int, HeardRank]:
        """Wait until all other ranks have connected, and return them.

        Raises:
            UserError: some have not connected in `seconds`, or one has failed since.
        """
        others = set(range(1, self.ranks.size))
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self.peers.keys() >= others, seconds)
        if self.failure is not None:
            raise UserError(self.failure.text)
        missing = others - self.peers.keys()
        if missing:
            where = f"port {self.port} of {socket.gethostname()}"
            late = f"{span_of(missing)} of {self.ranks.size} did not call {where} within {seconds:g} s"
            remedy = "its node has left or can't reach this one: see its own messages, then start all ranks again"
            raise UserError(late, remedy=remedy)
        return self.peers

    @contextmanager
    def attached(self, log: Path, warn: Callable[[str], object], cancel: Callable[[], object]) -> Iterator[None]:
        """Attach a run for the duration of the block: lines go to its `log`, warnings to `warn`, and `cancel` is called
        when a rank fails. Both are called in the monitor's thread. After the block everything of the run is written."""

        def write(text: str) -> None:
            with suppress(OSError), log.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{text}\n")

        before = self._warn, self._cancel
        self.lines.write = write
        self._warn = warn
        self._cancel = cancel
        try:
            yield
        finally:
            self._warn, self._cancel = before
            self._closing = 2 * SETTLE  # the run has ended in order: the process soon does too

    @property
    def losing(self) -> bool:
        """True if a rank has failed, even if it is not known yet which one was first."""
        return bool(self._causes)

    def cause(self, error: BaseException) -> RankFailure | None:
        """The failure that an exception on this rank follows from; None if the exception is this rank's own."""
        if self.losing or follows_from_loss(error):
            with self._changed:
                self._changed.wait_for(lambda: self.failure, 3 * SETTLE)
        return self.failure

    def name(self, rank: int) -> str:
        if rank:
            return self.peers[rank].name
        return f"rank 0 on {socket.gethostname()}"

    def take(self) -> None:
        """Note that the compute thread reports why the run fails, and ends: what the monitor hears from now on follows
        from it."""
        self._taken = True
        self.lines.flush(at_once=True)

    def await_farewells(self) -> None:
        """Wait until the other ranks, which know that the run has ended, are done, and for their last lines."""
        with self._changed:
            self._changed.wait_for(lambda: all(peer.gone for peer in self.peers.values()), CLOSING)
        self.lines.flush(at_once=True)

    def close(self) -> None:
        """End the thread; what it has heard is written by `await_farewells`."""
        self._closed = True

    # ---- the watching thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with closing(self._listener), self._selector, self._opened:
            while not self._closed:
                for key, _ in self._selector.select(TICK):
                    key.data()
                self._listener.tend(time.monotonic())
                self.lines.flush()
                self._judge(time.monotonic())

    def _admit(self, connection: socket.socket) -> None:
        self._opened.enter_context(connection)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, Channel(connection)))

    def _read(self, channel: Channel) -> None:
        messages = channel.receive()
        peer = next((peer for peer in self.peers.values() if peer.channel is channel), None)
        try:
            if peer is None and messages:
                peer = self._meet(messages.pop(0), channel)
            for message in messages or ():
                assert peer is not None
                peer.heard = time.monotonic()
                self._hear(peer, message)
        except (AttributeError, KeyError, TypeError, ValueError):  # not what a rank sends
            messages = None
        if messages is None:
            self._selector.unregister(channel.connection)
            with suppress(OSError):
                channel.connection.shutdown(socket.SHUT_RDWR)
            channel.connection.close()
            if peer is not None and not peer.gone:
                peer.gone = True
                hint = "it was killed, possibly out of memory (see dmesg there), or its node is gone"
                if is_supervised():
                    again = f"; all ranks restart, if {STARTED_AGAIN} allows"
                else:
                    again = ""
                self._add(RankFailure(text=f"{peer.name} died{self._during()}: {hint}{again}"))
        with self._changed:
            self._changed.notify_all()

    def _meet(self, hello: Mapping[str, Any], channel: Channel) -> HeardRank:
        """A rank that has connected; its first message says which one it is."""
        rank, host, facts = hello["hello"], hello["host"], hello["facts"]
        is_awaited = type(rank) is int and 0 < rank < self.ranks.size and rank not in self.peers
        if not (is_awaited and isinstance(host, str) and isinstance(facts, dict)):
            raise ValueError("no rank of this run, or one that is connected already")
        with suppress(OSError):  # a second descriptor: Python closes sockets long before the process is gone
            self._opened.callback(os.close, os.dup(channel.connection.fileno()))
        self.peers[rank] = HeardRank(rank, host, facts, channel, time.monotonic())
        return self.peers[rank]

    def _hear(self, peer: HeardRank, message: Mapping[str, Any]) -> None:
        if "beat" in message:
            peer.beat = checked_beat(message["beat"])
            peer.channel.send(beat=True)
        for line in message.get("lines", ()):
            self.lines.add(peer.rank, line)
        if "error" in message:
            failure = RankFailure(**message["error"])
            for line in failure.trace.splitlines():
                self.lines.add(peer.rank, line)
            self._add(replace(failure, text=f"{peer.name}: {failure.text}"))
        peer.gone = peer.gone or "bye" in message or "error" in message

    def _during(self) -> str:
        place = ", ".join(filter(None, (self.ranks.status.call, self.ranks.status.part)))
        if place and self.ranks.in_call:
            return f" during {place}"
        return ""

    def _add(self, cause: RankFailure) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._causes.append(cause)

    def _judge(self, now: float) -> None:
        """Find the first cause, and end the process if the run has not ended in order after it."""
        if self.failure is None:
            if not self._causes:
                self._check_progress(now)
            first = next((cause for cause in self._causes if not cause.follows), None)
            if first is not None or (self._causes and now - self._failed_at >= SETTLE):
                self._fail(first or self._causes[0])
        elif now > self._failed_at + self._closing:
            self.lines.flush(at_once=True)
            if self._taken:
                return
            if self.failure.refused:
                print(f"error: {last_line(self.failure)}", file=sys.stderr, flush=True)
            exit_code = 2 if self.failure.refused else 1
            os._exit(exit_code)  # the compute thread waits for a rank that will never respond

    def _fail(self, failure: RankFailure) -> None:
        with self._changed:
            self.failure = failure
            self._changed.notify_all()
        if not failure.refused and not self._taken:  # at once: a launcher will print many lines about it
            print(f"error: {last_line(failure)}", file=sys.stderr, flush=True)
        self._cancel()

    def _check_progress(self, now: float) -> None:
        """Warn when the run stalls, and end it after `timeout`."""
        seconds, what = self.late(now) or (0.0, "")
        if seconds >= self.timeout:
            remedy = "if it is only slow, raise placement.timeout"
            self._add(RankFailure(text=f"{what}, longer than placement.timeout={self.timeout:g}; {remedy}"))
        elif seconds >= self._warn_after:
            self._warn_after = 2 * seconds
            self._warn(what)
        elif not what:
            self._warn_after = self.silent

    def late(self, now: float) -> tuple[float, str] | None:
        """Seconds and a sentence about the rank that the others wait for; None if all progress, or all do the same."""
        present = [peer for peer in self.peers.values() if not peer.gone]
        if present:
            silent = min(present, key=attrgetter("heard"))
            seconds = now - silent.heard
            if seconds > self.silent:
                sentence = f"{silent.name} has not responded for {seconds:.0f} s{self._during()}"
                if silent.beat:
                    sentence = f"{sentence}; it was last in {place_of(silent.beat)}"
                return seconds, sentence
        if not self.ranks.in_call:
            return None
        beats = {0: self.ranks.status.beat()}
        for rank, peer in self.peers.items():
            if peer.beat is not None:
                beats[rank] = {**peer.beat, "still": peer.beat["still"] + now - peer.heard}
        seconds = min(beat["still"] for beat in beats.values())
        if seconds <= self.silent:
            return None
        issued = [beat["issued"] for beat in beats.values()]
        least = min(issued)
        most = max(issued)
        if least == most:
            if seconds < self.timeout:
                return None  # a long computation, or a large collective
            return seconds, f"no rank has moved for {seconds:.0f} s; all are in {place_of(beats[0])}"
        behind = [rank for rank, beat in beats.items() if beat["issued"] == least]
        names = span_of(behind) if len(behind) > 1 else self.name(behind[0])
        other = next(beat for beat in beats.values() if beat["issued"] == most)
        return seconds, (
            f"{names} made no progress for {seconds:.0f} s in {place_of(beats[behind[0]])}; the others wait in "
            f"{place_of(other)}"
        )


def last_line(failure: RankFailure) -> str:
    """The last line of a run that ends because a rank has failed."""
    if failure.refused or STARTED_AGAIN in failure.text:
        return failure.text
    where = "; its traceback is in log.txt" if failure.trace else ""
    return f"{failure.text}{where}; resume with --resume"


@contextmanager
def terminated_by_launcher(monitor: RankWatch) -> Iterator[None]:
    """Ignore the launcher's signal if a rank has died: the signal is for all processes, but this one must report
    why."""

    def handle(number: int, frame: FrameType | None) -> None:
        time.sleep(SETTLE / 2)  # the death may not have been heard yet
        if not monitor.losing:
            raise KeyboardInterrupt

    with signals_handled(handle, [signal.SIGTERM]):
        yield
