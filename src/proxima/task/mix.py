"""Several data sets combined into one, each with its share of the rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from proxima.data import FieldError, require
from proxima.data.kinds import Kinds, Slot
from proxima.data.random import MIX_REST, sample_without_replacement
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, open_tasks, play_of, unusable_rows

MOST_ROWS = 20_000_000  # of a mix; each takes sixteen bytes of memory


@dataclass(frozen=True, kw_only=True)
class WeightedTask:
    """A data set of a mix."""

    name: Annotated[str, "what rows of this source have in the mix's `column`"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "where its rows come from"]
    weight: Annotated[float, "its share of the rows, relative to the other weights; > 0"] = 1.0

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "must not be empty")
        require(0 < self.weight < math.inf, "weight", self.weight, "must be > 0 and finite")


SOURCES = Kinds({"source": "proxima.task.mix:WeightedTask"})


@dataclass(frozen=True, kw_only=True)
class Mix(PlayedTask):
    """Rows of several tasks, each with a share according to its weight.

    The mix is a data set of `size` rows. A source has `size x weight / sum of the weights` of them, rounded so that the
    numbers add up: all its rows as often as they fit, and for the rest some of them, drawn by the run's seed. Sources
    alternate evenly, and `data.shuffle` shuffles each epoch of the mix like that of any data set. Prompts, uids and
    resumes work as for a single data set.

    Args:
        tasks: the sources, each `{name, weight, task}`.
        size: rows of the mix; null: the smallest number with every row of every source.
        column: a column added to each row with the name of its source, which a reward function can request.
    Raises: FieldError if a row already has that column, if a weight or `size` leaves a source without rows, or if the
        mix would have more than 20 million rows.
    """

    tasks: Annotated[tuple[Any, ...], Slot("proxima.task.mix:SOURCES", many=True, default="source"), "the sources"]
    size: int | None = None
    column: str = "source"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        names = [source.name for source in self.tasks]
        require(len(names) > 0, "tasks", names, "must name at least one source")
        require(len(set(names)) == len(names), "tasks", names, "must have different names")
        require(self.size is None or self.size >= 1, "size", self.size, "must be >= 1")
        for i, source in enumerate(self.tasks):
            for name, value in vars(play_of(source.task)).items():
                remedy = f"set {name} of the mix"
                require(not value, f"tasks.{i}.task.{name}", value, "is not read in a mix", remedy=remedy)

    def rows(self, seed: int) -> Rows:
        """Return the rows of the mix, with the sources interleaved."""
        parts = self._opened(seed)
        counts = self.counts([len(rows) for rows in parts])
        order = np.argsort(np.concatenate([(np.arange(count) + 0.5) / count for count in counts]), kind="stable")
        source = np.repeat(np.arange(len(parts)), counts)[order]
        index = np.concatenate([_uses(len(rows), counts[i], seed, i) for i, rows in enumerate(parts)])[order]
        unusable = tuple(error for rows in parts for error in unusable_rows(rows))
        return MappedRows(np.stack([source, index], axis=1), partial(self._row, parts), unusable)

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of rows in the mix from each source; `sizes` are the sources' own numbers of rows."""
        total = sum(source.weight for source in self.tasks)
        shares = [source.weight / total for source in self.tasks]
        needed = max(math.ceil(rows / share - 1e-9) for rows, share in zip(sizes, shares, strict=True))
        size = needed if self.size is None else self.size
        if size > MOST_ROWS:
            remedy = "set it, and some rows of the larger sources are left out; or raise the smallest weight"
            raise FieldError("size", self.size, f"would be {size:,}, so that every row is in the mix", remedy=remedy)
        exact = [size * share for share in shares]
        counts = [math.floor(rows + 1e-9) for rows in exact]
        by_rest = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
        for i in by_rest[: size - sum(counts)]:
            counts[i] += 1
        if 0 in counts:
            at = counts.index(0)
            field, weight = f"tasks.{at}.weight", self.tasks[at].weight
            raise FieldError(field, weight, f"leaves this source none of {size:,} rows", remedy="raise it, or size")
        return counts

    def shares(self, seed: int) -> str:
        """Describe the share of each source in the mix, for display."""
        sizes = [len(rows) for rows in self._opened(seed)]
        counts = self.counts(sizes)
        parts = [
            f"{source.name} {count / sum(counts):.1%} ({count / rows:.3g} x its {rows:,} rows)"
            for source, count, rows in zip(self.tasks, counts, sizes, strict=True)
        ]
        return f"an epoch of the mix has {sum(counts):,} rows: {', '.join(parts)}"

    def _opened(self, seed: int) -> list[Rows]:
        tasks = {f"tasks.{i}.task": source.task for i, source in enumerate(self.tasks)}
        return list(open_tasks(tasks, seed, may_skip=True).values())

    def _row(self, parts: Sequence[Rows], index: int, place: NDArray[np.int64]) -> Row:
        source, number = map(int, place)
        row, name = parts[source][number], self.tasks[source].name
        remedy = "set the mix's column to another name"
        require(self.column not in row.metadata, "column", self.column, f"is a column of {name} already", remedy=remedy)
        metadata: Mapping[str, Any] = {**row.metadata, self.column: name}
        return replace(row, metadata=metadata)


def _uses(rows: int, count: int, seed: int, source: int) -> NDArray[np.int64]:
    """[count] the rows of a source in the mix: all rows, repeated as often as they fit, then some of them in order."""
    whole, rest = divmod(count, rows)
    some = sample_without_replacement(rows, rest, MIX_REST, seed, source)
    return np.concatenate([np.tile(np.arange(rows), whole), some])
