"""The disk of a run folder: while it is full, the run waits."""

import asyncio
import shutil
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from proxima.system.full_disk import is_disk_full

T = TypeVar("T")
RETRY_SECONDS = 5.0  # of the event loop's time
RESUMED = "Ctrl-C ends it, and --resume continues from the last checkpoint"


class StoppedWaiting(Exception):
    """The user stopped the run while it waited for space; what waited is not written."""


class Disk:
    """Writes that wait while there is no space: the run pauses, says so, and then continues where it was.

    A call that is retried must have changed nothing when it raised. That is true of the journal's transactions, of
    files that are written aside and renamed, and of an appended line that is removed again. Calls on the event loop
    are made in order: one that waits is made before later ones. `warn` is called once when the run pauses, and once
    when it continues; `stop` ends the waiting, with `StoppedWaiting`.

    Args:
        who: what pauses, for the user.
        interrupted: what Ctrl-C would do, for the user.
    """

    def __init__(
        self, folder: Path, warn: Callable[[str], None], who: str = "the run", interrupted: str = RESUMED
    ) -> None:
        self.folder = folder
        self.warn = warn
        self.who = who
        self.interrupted = interrupted
        self.stop = asyncio.Event()
        self._waiting: deque[Callable[[], object]] = deque()
        self._full = False

    def enqueue(self, call: Callable[..., object], *arguments: object) -> None:
        """Make the call now or, if there is no space, before the next `write`: for callers that can't wait."""
        self._waiting.append(partial(call, *arguments))
        try:
            self._make_calls()
        except OSError as error:
            self._note(error)

    async def write(self, call: Callable[..., T], *arguments: object) -> T:
        """Make a call that writes, after those that wait, as soon as there is space, and return its result."""
        results: list[T] = []
        self._waiting.append(lambda: results.append(call(*arguments)))

        async def attempt() -> None:
            self._make_calls()

        await self.retry_when_full(attempt)
        return results[0]

    async def retry_when_full(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make an attempt, repeat it every few seconds while there is no space, and return its result.

        Raises:
            StoppedWaiting: `stop` was set, and there is still no space.
        """
        while True:
            try:
                result = await attempt()
            except OSError as error:
                self._note(error)
                if self.stop.is_set():
                    self._waiting.clear()
                    self._full = False
                    raise StoppedWaiting(f"{error.filename or self.folder}: {error.strerror}") from error
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), RETRY_SECONDS)
            else:
                if self._full and not self._waiting:
                    self._full = False
                    self.warn(f"disk space is available again: {self.who} continues")
                return result

    def _make_calls(self) -> None:
        while self._waiting:
            try:
                self._waiting[0]()
            except BaseException as error:
                if not is_disk_full(error):
                    self._waiting.popleft()
                raise
            self._waiting.popleft()

    def _note(self, error: OSError) -> None:
        """Warn the user, once; raise any error other than a full disk."""
        if not is_disk_full(error):
            raise error
        if not self._full:
            self._full = True
            free = shutil.disk_usage(self.folder).free / 2**20
            self.warn(
                f"{error.filename or self.folder}: {error.strerror} ({free:,.1f} MiB free): {self.who} waits and "
                f"retries every {RETRY_SECONDS:g} s. Free some space, and it continues; "
                f"{self.interrupted}"
            )
