"""Merges the output of the ranks into one text: rank 0's lines unchanged, those of the others with their rank, equal
lines folded into one. A file receives all lines."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from proxima.runtime.placement.rank_messages import span_of

FOLD_SECONDS = 0.5  # in which other ranks may print the same line


@dataclass
class FoldedLine:
    """A line that is not shown yet, with the ranks that printed it, each as often as it printed the line."""

    text: str
    since: float
    ranks: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        ranks = sorted(set(self.ranks))
        times = len(self.ranks) // len(ranks)
        return f"[{span_of(ranks)}] {self.text}" + (f" (× {times})" if times > 1 else "")


class RankLines:
    """Prints the lines of a group of ranks.

    Args:
        out, err: receive rank 0's streams, and `err` also the lines of the other ranks; None: those of this process.
        log: file that receives the lines of all ranks, each with its rank, once its folder exists.
    """

    def __init__(
        self,
        log: Path | None = None,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out, self.err, self.log, self.clock = out or sys.stdout, err or sys.stderr, log, clock
        self.last: dict[int, str] = {}  # rank → the last line of its standard error
        self._waiting: dict[str, FoldedLine] = {}
        self._unlogged: list[str] = []

    def add(self, rank: int, stream: int, line: str) -> None:
        """Add a line that a rank printed to its stream, 1 or 2."""
        self._unlogged.append(f"[rank {rank}] {line}")
        if stream == 2 and line.strip():
            self.last[rank] = line.strip()
        if rank == 0:
            print(line, file=self.out if stream == 1 else self.err, flush=True)
        elif line.strip():
            self._waiting.setdefault(line, FoldedLine(line, self.clock())).ranks.append(rank)

    def say(self, line: str) -> None:
        """Print a line of the supervisor."""
        self.flush(at_once=True)
        print(line, file=self.err, flush=True)
        self._unlogged.append(line)
        self._write()

    def flush(self, *, at_once: bool = False) -> None:
        """Print the lines that have waited for other ranks, and write the file."""
        now = self.clock()
        for text, folded in list(self._waiting.items()):
            if at_once or now - folded.since >= FOLD_SECONDS:
                print(folded, file=self.err, flush=True)
                del self._waiting[text]
        self._write()

    def _write(self) -> None:
        if self.log is None or not self._unlogged or not self.log.parent.is_dir():
            return
        with self.log.open("a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in self._unlogged)
        self._unlogged.clear()
