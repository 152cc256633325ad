"""Processes of this machine, as /proc shows them, and waiting for a condition."""

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie; one that ends while its state is read does not run."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def with_word(file: str, word: str) -> list[int]:
    """The processes, but for this one, that have a word in their `cmdline`, or a variable in their `environ`."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (place / file).read_bytes().split(b"\0") and int(place.name) != os.getpid():
                pids.append(int(place.name))
    return pids


def family(pid: int) -> list[int]:
    """A process and all that are below it."""
    below: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            below += map(int, (task / "children").read_text().split())
    return [pid, *(each for child in below for each in family(child))]


def eventually(condition: Callable[[], Any], what: Any = "") -> Any:
    """What the condition says once it is true; a hang is an AssertionError after minutes, with the end of a log if
    `what` is its path."""
    pauses = _pauses(condition, what, 0.005, 0.05)
    while True:
        try:
            time.sleep(next(pauses))
        except StopIteration as end:
            return end.value


async def until(condition: Callable[[], Any]) -> None:
    """`eventually`, while the event loop runs."""
    for pause in _pauses(condition, "", 0.002, 0.002):
        await asyncio.sleep(pause)


def _pauses(condition: Callable[[], Any], what: Any, pause: float, most: float) -> Generator[float, None, Any]:
    deadline = time.monotonic() + 600
    while not (said := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(what.read_text(errors="replace")[-6000:] if isinstance(what, Path) else what)
        yield pause
        pause = min(2 * pause, most)
    return said


def assert_all_end(pids: Iterable[int]) -> None:
    """Return once none of them runs."""
    pids = list(pids)
    eventually(lambda: not any(map(is_running, pids)), pids)
