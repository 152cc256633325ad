"""The current activity of a rank, for a watcher in another thread."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any


class RankStatus:
    """Written by the thread that computes.

    Args:
        issued: counts the collectives that this process has begun, over all its groups; ranks that wait for one another
            differ in it.
    """

    def __init__(self, issued: Callable[[], int] = int) -> None:
        self._issued, self._last = issued, 0
        self.call = self.part = self.collective = ""
        self.waits = False  # it is in that collective; otherwise that was the last one
        self.moved_at = time.monotonic()

    def begin(self, call: str) -> None:
        """Note the start of a call of rank 0; empty: the rank waits for the next one."""
        self.call, self.part, self.moved_at = call, "", time.monotonic()

    def at(self, part: str) -> None:
        """Note the part of the call that comes next."""
        self.part, self.moved_at = part, time.monotonic()

    @contextmanager
    def within(self, collective: str) -> Iterator[None]:
        """Note that this rank waits for the others within the block."""
        self.collective, self.waits, self.moved_at = collective, True, time.monotonic()
        try:
            yield
        finally:
            self.waits, self.moved_at = False, time.monotonic()

    def beat(self) -> dict[str, Any]:
        """The status to report; `still` is the number of seconds since the last progress."""
        issued = self._last
        with suppress(Exception):  # a group that is being created or destroyed
            issued = self._issued()
        if issued != self._last:
            self._last, self.moved_at = issued, time.monotonic()
        return {
            "call": self.call,
            "part": self.part,
            "collective": self.collective,
            "waits": self.waits,
            "issued": issued,
            "still": time.monotonic() - self.moved_at,
        }


def place_of(beat: Mapping[str, Any]) -> str:
    """`update of policy, micro-batch 3 of 8, after gather (collective 41)`."""
    place = ", ".join(filter(None, (beat["call"] or "no call", beat["part"])))
    if not beat["collective"]:
        return place
    return f"{place}, {'in' if beat['waits'] else 'after'} {beat['collective']} (collective {beat['issued']})"
