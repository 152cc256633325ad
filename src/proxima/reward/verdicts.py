"""The verdicts of a judge, each asked for once, and kept in the folder of a run: a resume reads them again."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from proxima.system.jsonl import dumps, read_lines

VERDICTS = "verdicts.jsonl"  # of a run
MOST_KEPT = 1_000_000  # verdicts in memory; the file has all


@dataclass(frozen=True, kw_only=True)
class GivenVerdict:
    """A verdict, and what it cost.

    Args:
        numbers: one for each answer, in the order in which they were shown.
        read, written: tokens, as the server reports them; None: it does not.
        seconds: until it was there, with the attempts that failed.
        attempts: requests that it took.
    """

    numbers: tuple[int, ...]
    read: int | None
    written: int | None
    seconds: float
    attempts: int


class Verdicts:
    """Verdicts by the digest of what was asked. A failure is not kept: it may pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Future[GivenVerdict]] = {}
        self._file: Path | None = None

    def keep_in(self, folder: Path) -> None:
        """Read the verdicts of a run, and write further ones to its folder. What was said before the run, in a trial,
        is forgotten: it is not in the folder."""
        self._file = folder / VERDICTS
        self._known.clear()
        for line in read_lines(self._file):
            known: Future[GivenVerdict] = Future()
            fields = {name: line[name] for name in ("read", "written", "seconds", "attempts")}
            known.set_result(GivenVerdict(numbers=tuple(line["numbers"]), **fields))
            self._remember(line["asked"], known)
        _end_line(self._file)

    async def get(self, asked: str, ask: Callable[[], Awaitable[tuple[GivenVerdict, str]]]) -> GivenVerdict:
        """The verdict on what was asked; `ask` gets it, with the judge's reason, unless it is known or on its way."""
        with self._lock:
            known = self._known.get(asked)
            if known is None:
                mine: Future[GivenVerdict] = Future()
                self._remember(asked, mine)
        if known is not None:
            return await asyncio.shield(asyncio.wrap_future(known))
        try:
            verdict, reason = await ask()
        except BaseException as error:
            with self._lock:
                self._known.pop(asked, None)
            mine.set_exception(error)
            raise
        self._write(asked, verdict, reason)
        mine.set_result(verdict)
        return verdict

    def _remember(self, asked: str, verdict: "Future[GivenVerdict]") -> None:
        if len(self._known) >= MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[asked] = verdict

    def _write(self, asked: str, verdict: GivenVerdict, reason: str) -> None:
        if self._file is None:
            return
        line = dumps({"asked": asked, **asdict(verdict), "reason": reason}) + "\n"
        with self._lock, open(self._file, "a", encoding="utf-8") as file:
            file.write(line)


def _end_line(file: Path) -> None:
    """End a line that a kill has cut off, so that the next one is whole."""
    if not file.exists():
        return
    with open(file, "rb+") as written:
        data = written.read()
        if data and not data.endswith(b"\n"):
            written.truncate(data.rfind(b"\n") + 1)
