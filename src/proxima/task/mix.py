"""Several data sets combined into one, each with its share of the rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from proxima.data import FieldError, require
from proxima.data.errors import counted
from proxima.data.kinds import Kinds, Slot
from proxima.data.random import MIX_REST, sample_without_replacement
from proxima.task.held_out_part import Part
from proxima.task.opening import open_tasks
from proxima.task.overlaps import left_out, notes_of_rows, notes_of_sources
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, about_rows, play_of, unusable_rows

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

    The held-out part of a mix has that of every source with `held_out`, each row once, whatever weights and size. A
    warning names sources that train on questions of that part.

    Args:
        tasks: the sources, each `{name, weight, task}`.
        size: rows of the mix; null: the smallest number with every row of every source.
        column: a column added to each row with the name of its source, which a reward function can request.
        part: the rows: `train`, or those that the sources have `held_out`.
    Raises: FieldError if a row already has that column, if a weight or `size` leaves a source without rows, or if the
        mix would have more than 20 million rows.
    """

    tasks: Annotated[tuple[Any, ...], Slot("proxima.task.mix:SOURCES", many=True, default="source"), "the sources"]
    size: int | None = None
    column: str = "source"
    part: Part = "train"

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
        require(self.part in ("train", "held_out"), "part", self.part, "must be 'train' or 'held_out'")
        if self.part == "held_out":
            remedy = "set held_out of a source to the share of its questions, such as 0.1"
            require(bool(self.sources), "part", self.part, "needs a source with a part that is held out", remedy=remedy)

    @property
    def sources(self) -> dict[int, WeightedTask]:
        """The sources of the mix's part, by their number in `tasks`."""
        if self.part == "train":
            return dict(enumerate(self.tasks))

        parts = {i: held_out_part(source.task) for i, source in enumerate(self.tasks)}
        return {i: replace(self.tasks[i], task=task) for i, task in parts.items() if task is not None}

    def rows(self, seed: int) -> Rows:
        """Return the rows of the mix, with the sources interleaved."""
        parts = self._opened(seed)
        sizes = [len(rows) for rows in parts]
        counts = self.counts(sizes) if self.part == "train" else sizes
        order = np.argsort(np.concatenate([(np.arange(count) + 0.5) / count for count in counts]), kind="stable")
        source = np.repeat(np.arange(len(parts)), counts)[order]
        index = np.concatenate([_uses(len(rows), counts[i], seed, i) for i, rows in enumerate(parts)])[order]
        unusable = tuple(error for rows in parts for error in unusable_rows(rows))
        names = [source.name for source in self.sources.values()]
        return MappedRows(
            np.stack([source, index], axis=1),
            partial(self._row, parts, names),
            unusable,
            about=self._about(parts, counts),
            left_out=tuple(left for rows in parts for left in left_out(rows)),
            notes=self._notes(names, parts),
        )

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
            bound = f"leaves this source none of {counted(size, 'row')}"
            raise FieldError(field, weight, bound, remedy="raise it, or size")
        return counts

    def _about(self, parts: Sequence[Rows], counts: Sequence[int]) -> str:
        """Describe the share of each source in the mix, or the rows of each that are held out."""
        shares, total = [], sum(counts)
        for source, count, rows in zip(self.sources.values(), counts, parts, strict=True):
            read = about_rows(rows) or f"its {counted(len(rows), 'row')}"
            share = f"{count / total:.1%} ({count / len(rows):.3g} x {read})" if self.part == "train" else f"({read})"
            shares.append(f"{source.name} {share}")
        named = "an epoch of the mix" if self.part == "train" else "the held-out part of the mix"
        return f"{named} has {counted(total, 'row')}: {', '.join(shares)}"

    def _notes(self, names: Sequence[str], parts: Sequence[Rows]) -> tuple[str, ...]:
        """Those of the sources, and on questions that one source trains on and another one holds out."""
        if self.part == "held_out":
            return ()
        inner = [f"{name}: {note}" for name, rows in zip(names, parts, strict=True) for note in notes_of_rows(rows)]
        return (*inner, *notes_of_sources(names, [source.task for source in self.tasks], parts))

    def _opened(self, seed: int) -> list[Rows]:
        tasks = {f"tasks.{i}.task": source.task for i, source in self.sources.items()}
        return list(open_tasks(tasks, seed, may_skip=True).values())

    def _row(self, parts: Sequence[Rows], names: Sequence[str], index: int, place: NDArray[np.int64]) -> Row:
        source, number = map(int, place)
        row, name = parts[source][number], names[source]
        remedy = "set the mix's column to another name"
        require(self.column not in row.metadata, "column", self.column, f"is a column of {name} already", remedy=remedy)
        metadata: Mapping[str, Any] = {**row.metadata, self.column: name}
        return replace(row, metadata=metadata)


def held_out_part(task: Any) -> Any | None:
    """The task that reads the rows that a task holds out; None if it holds none out."""
    if isinstance(task, Mix):
        held_out = any(held_out_part(source.task) is not None for source in task.tasks)
        return replace(task, part="held_out") if held_out else None
    if getattr(task, "held_out", None) is None or not hasattr(task, "part"):
        return None

    return replace(task, part="held_out")


def _uses(rows: int, count: int, seed: int, source: int) -> NDArray[np.int64]:
    """[count] the rows of a source in the mix: all rows, repeated as often as they fit, then some of them in order."""
    whole, rest = divmod(count, rows)
    some = sample_without_replacement(rows, rest, MIX_REST, seed, source)
    return np.concatenate([np.tile(np.arange(rows), whole), some])
