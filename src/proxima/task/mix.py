"""Several data sets combined into one, each with its share of the rows."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from proxima.data import FieldError, require
from proxima.data.errors import counted
from proxima.data.kinds import Kinds, Slot
from proxima.data.random import MIX_REST, sample_without_replacement
from proxima.task.held_out_part import Part
from proxima.task.opening import open_tasks
from proxima.task.overlaps import left_out, notes_of_rows, notes_of_sources
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, about_rows, is_played, row_sources, unusable_rows

MOST_ROWS = 20_000_000  # of a mix; each takes sixteen bytes of memory


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Base of the fields of a source that replace those of a section; null keeps the section's value."""

    def changed(self) -> dict[str, Any]:
        """The fields that are set, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SourceSampling(Changes):
    """How the completions of a source are sampled, where it differs from the run's `sampling`."""

    temperature: Annotated[float | None, "null: that of the run"] = None
    top_k: Annotated[int | None, "null: that of the run"] = None
    top_p: Annotated[float | None, "null: that of the run"] = None
    min_p: Annotated[float | None, "null: that of the run"] = None
    max_tokens: Annotated[int | None, "new tokens of a completion, or of a turn; null: that of the run"] = None
    stop: Annotated[tuple[str, ...] | None, "null: those of the run"] = None


@dataclass(frozen=True, kw_only=True)
class SourceEpisode(Changes):
    """Limits of the episodes of a source, where they differ from the run's `episode`."""

    turns: Annotated[int | None, "messages of the model at most; null: as the run"] = None
    tokens: Annotated[int | None, "tokens after the prompt at most; null: as the run"] = None
    call_seconds: Annotated[float | None, "that a call may take; null: as the run"] = None
    seconds: Annotated[float | None, "of its own that an episode may take; null: as the run"] = None
    retries: Annotated[int | None, "restarts of an episode whose environment failed; null: as the run"] = None
    workers: Annotated[int | None, "processes in which environments run; null: as the run"] = None
    memory_mb: Annotated[int | None, "MiB that such a process may need; null: as the run"] = None


NAME = re.compile(r"[A-Za-z0-9_.+-]+")  # of a source with settings of its own: a part of the names of metrics


@dataclass(frozen=True, kw_only=True)
class WeightedTask:
    """A data set of a mix, with its own environment and tools (those of its task), rewards, limits and sampling."""

    name: Annotated[str, "what rows of this source have in the mix's `column`, and its name in metrics"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "where its rows come from, and what plays them"]
    weight: Annotated[float, "its share of the rows, relative to the other weights; > 0"] = 1.0
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "what scores its answers; none: the run's"] = ()
    episode: Annotated[SourceEpisode | None, "limits of its episodes; null: the run's"] = None
    sampling: Annotated[SourceSampling | None, "how its completions are sampled; null: as the run's"] = None
    learns_from: Annotated[
        Literal["rewards", "teacher"] | None,
        "the loss of its completions: that of rewards, or the divergence from the teacher; null: rewards where another "
        "source names the teacher, else the whole loss of the run",
    ] = None

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "must not be empty")
        known = self.learns_from in (None, "rewards", "teacher")
        require(known, "learns_from", self.learns_from, "must be 'rewards', 'teacher' or null")
        require(0 < self.weight < math.inf, "weight", self.weight, "must be > 0 and finite")


SOURCES = Kinds({"source": "proxima.task.mix:WeightedTask"})


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """What one kind of prompts of a task is played with: all prompts of a task, or those of one source of a mix.

    Args:
        path: the dotted path of its task in the recipe, such as `task` or `task.tasks.2.task`.
        name: that of the source, with the names of the mixes around it before it (`games/guess`); empty for a task
            that is no mix.
        task: where its rows come from.
        labels: the columns, with their values, that rows of this source have.
        play: its environment and tools; those of the mix around it if the source has none.
        play_path: the dotted path of the task that says so.
        reward: its own rewards; empty: the run's. reward_path: their dotted path.
        episode, sampling: fields that replace those of the run, by name.
        learns_from: `rewards` or `teacher`; None: not said.
    """

    path: str
    name: str
    task: Any
    play: Any
    play_path: str
    labels: tuple[tuple[str, str], ...] = ()
    reward: tuple[Any, ...] = ()
    reward_path: str = ""
    episode: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    learns_from: str | None = None

    @property
    def place(self) -> str:
        """The dotted path of the source in the recipe, above its task."""
        return self.path.removesuffix(".task")

    @property
    def world_path(self) -> str:
        """The path of what plays it; sources without limits of their own share that of the mix."""
        return self.path if self.episode else self.play_path

    @property
    def played(self) -> bool:
        """True if it has an environment or tools."""
        return is_played(self.play)

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        """True for the columns of a row of this source."""
        return all(metadata.get(column) == name for column, name in self.labels)


def sources_of(task: Any, path: str = "task", outer: TaskSource | None = None) -> list[TaskSource]:
    """The sources of a task, those of mixes within a mix too; a task that is no mix is one source."""
    outer = outer or TaskSource(path=path, name="", task=task, play=task, play_path=path)
    if not isinstance(task, Mix):
        return [outer]
    found = []
    for i, source in task.sources.items():
        inner = _inner(source, f"{path}.tasks.{i}", task, outer)
        found += sources_of(source.task, inner.path, inner)
    return found


def _inner(source: WeightedTask, place: str, mix: "Mix", outer: TaskSource) -> TaskSource:
    """A source of a mix, with what it takes over from the mix; `place` is its dotted path."""
    inner = replace(
        outer,
        path=f"{place}.task",
        name=f"{outer.name}/{source.name}".removeprefix("/"),
        task=source.task,
        labels=(*outer.labels, (mix.column, source.name)),
    )
    if is_played(source.task):
        inner = replace(inner, play=source.task, play_path=inner.path)
    if source.reward:
        inner = replace(inner, reward=tuple(source.reward), reward_path=f"{place}.reward")
    if source.episode:
        inner = replace(inner, episode={**outer.episode, **source.episode.changed()})
    if source.sampling:
        inner = replace(inner, sampling={**outer.sampling, **source.sampling.changed()})
    if source.learns_from:
        inner = replace(inner, learns_from=source.learns_from)
    return inner


def source_of(sources: Sequence[TaskSource], metadata: Mapping[str, Any]) -> TaskSource:
    """The source that a row with these columns is of."""
    return next(source for source in sources if source.holds(metadata))


@dataclass(frozen=True, kw_only=True)
class Mix(PlayedTask):
    """Rows of several tasks, each with a share according to its weight, and with its own way of being played.

    A source may have its own environment and tools (in its `task`), rewards, limits of episodes and sampling; where it
    has none, those of the mix or of the run apply.

    The mix is a data set of `size` rows. A source has `size x weight / sum of the weights` of them, rounded so that the
    numbers add up: all its rows as often as they fit, and for the rest some of them, drawn by the run's seed. Sources
    alternate evenly, and `data.shuffle` shuffles each epoch of the mix like that of any data set. Prompts, uids and
    resumes work as for a single data set.

    The held-out part of a mix has that of every source with `held_out`, each row once, whatever weights and size. A
    warning names sources that train on questions of that part.

    Args:
        tasks: the sources, each `{name, weight, task}`, and `reward`, `episode`, `sampling` where they are its own.
        weights: what the weights are relative to: `share`, of the mix's rows, or `row`, each row of a source, so that
            equal weights give every row of every source equally often.
        size: rows of the mix; null: the smallest number with every row of every source.
        column: a column added to each row with the name of its source, which a reward function can request.
        part: the rows: `train`, or those that the sources have `held_out`.
    Raises: FieldError if a row already has that column, if a weight or `size` leaves a source without rows, or if the
        mix would have more than 20 million rows.
    """

    tasks: Annotated[tuple[Any, ...], Slot("proxima.task.mix:SOURCES", many=True, default="source"), "the sources"]
    size: int | None = None
    column: str = "source"
    weights: Literal["share", "row"] = "share"
    part: Part = "train"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        names = [source.name for source in self.tasks]
        require(len(names) > 0, "tasks", names, "must name at least one source")
        require(len(set(names)) == len(names), "tasks", names, "must have different names")
        require(self.size is None or self.size >= 1, "size", self.size, "must be >= 1")
        require(self.weights in ("share", "row"), "weights", self.weights, "must be 'share' or 'row'")
        for i, source in enumerate(self.tasks):
            bound = "must be letters, digits and _ . + -, because its figures are named after it"
            settings = [source.reward, source.episode, source.sampling, source.learns_from]
            has_own = any(settings) or is_played(source.task)
            require(not has_own or bool(NAME.fullmatch(source.name)), f"tasks.{i}.name", source.name, bound)
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
        counts = [len(rows) for rows in parts]
        if self.part == "train":
            counts = self.counts(counts)
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = np.argsort(places, kind="stable")
        source = np.repeat(np.arange(len(parts)), counts)[order]
        index = np.concatenate([_uses(len(rows), counts[i], seed, i) for i, rows in enumerate(parts)])[order]
        names = [source.name for source in self.sources.values()]
        return MappedRows(
            np.stack([source, index], axis=1),
            partial(self._row, parts, names),
            tuple(chain.from_iterable(map(unusable_rows, parts))),
            about=self._about(parts, counts),
            left_out=tuple(chain.from_iterable(map(left_out, parts))),
            notes=self._notes(names, parts),
            sources=_leaves(source, index, parts),
        )

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of rows in the mix from each source; `sizes` are the sources' own numbers of rows."""
        weights = [source.weight for source in self.tasks]
        if self.weights == "row":
            weights = [weight * rows for weight, rows in zip(weights, sizes, strict=True)]
        total = sum(weights)
        shares = [weight / total for weight in weights]
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
            field = f"tasks.{at}.weight"
            weight = self.tasks[at].weight
            bound = f"leaves this source none of {counted(size, 'row')}"
            raise FieldError(field, weight, bound, remedy="raise it, or size")
        return counts

    def _about(self, parts: Sequence[Rows], counts: Sequence[int]) -> str:
        """Describe the share of each source in the mix, or the rows of each that are held out."""
        shares = []
        total = sum(counts)
        for source, count, rows in zip(self.sources.values(), counts, parts, strict=True):
            read = about_rows(rows) or f"its {counted(len(rows), 'row')}"
            if self.part == "train":
                shares.append(f"{source.name} {count / total:.1%} ({count / len(rows):.3g} x {read})")
            else:
                shares.append(f"{source.name} ({read})")
        named = "an epoch of the mix" if self.part == "train" else "the held-out part of the mix"
        return f"{named} has {counted(total, 'row')}: {', '.join(shares)}"

    def _notes(self, names: Sequence[str], parts: Sequence[Rows]) -> tuple[str, ...]:
        """Those of the sources, and on questions that one source trains on and another one holds out."""
        if self.part == "held_out":
            return ()
        notes: list[str] = []
        for name, rows in zip(names, parts, strict=True):
            notes += [f"{name}: {note}" for note in notes_of_rows(rows)]
        tasks = [source.task for source in self.tasks]
        return (*notes, *notes_of_sources(names, tasks, parts))

    def _opened(self, seed: int) -> list[Rows]:
        tasks = {f"tasks.{i}.task": source.task for i, source in self.sources.items()}
        return list(open_tasks(tasks, seed, may_skip=True).values())

    def _row(self, parts: Sequence[Rows], names: Sequence[str], index: int, place: NDArray[np.int64]) -> Row:
        source, number = map(int, place)
        row = parts[source][number]
        name = names[source]
        remedy = "set the mix's column to another name"
        require(self.column not in row.metadata, "column", self.column, f"is a column of {name} already", remedy=remedy)
        metadata: Mapping[str, Any] = {**row.metadata, self.column: name}
        return replace(row, metadata=metadata)


def _leaves(source: NDArray[np.int64], index: NDArray[np.int64], parts: Sequence[Rows]) -> NDArray[np.int64]:
    """[rows] a number for the source of each row: rows of one source, and of one source of a mix within it, have the
    same."""
    numbers = np.zeros(len(source), np.int64)
    first = 0
    for i, rows in enumerate(parts):
        own = source == i
        inner = row_sources(rows)
        if inner is None:
            inner = np.zeros(len(rows), np.int64)
        numbers[own] = first + inner[index[own]]
        first += int(inner.max(initial=0)) + 1
    return numbers


def first_of_each(sources: NDArray[np.int64], most: int) -> list[int]:
    """The numbers of the first rows of each source of a mix, at most `most` of each; `sources` as in `MappedRows`."""
    rows = [np.flatnonzero(sources == source)[:most] for source in np.unique(sources)]
    return sorted(map(int, np.concatenate(rows)))


def held_out_part(task: Any) -> Any | None:
    """The task that reads the rows that a task holds out; None if it holds none out."""
    if isinstance(task, Mix):
        if all(held_out_part(source.task) is None for source in task.tasks):
            return None
        return replace(task, part="held_out")
    if getattr(task, "held_out", None) is None or not hasattr(task, "part"):
        return None

    return replace(task, part="held_out")


def _uses(rows: int, count: int, seed: int, source: int) -> NDArray[np.int64]:
    """[count] the rows of a source in the mix: all rows, repeated as often as they fit, then some of them in order."""
    whole, rest = divmod(count, rows)
    some = sample_without_replacement(rows, rest, MIX_REST, seed, source)
    return np.concatenate([np.tile(np.arange(rows), whole), some])
