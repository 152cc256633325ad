"""The way of the data: read → unreadable → repeats and conflicts → split → overlap → write. Read `prepare` top to
bottom."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from proxima.data import UserError, require
from proxima.data.random import share_of
from proxima.prepare.atomic_folder import atomic_folder, refuse_existing
from proxima.prepare.catalog import Part
from proxima.prepare.dataset_card import build_card, write_card
from proxima.prepare.decontaminate import EvalSet, OverlapIndex, OverlapMatch
from proxima.prepare.deduplicate import Conflicts, Deduplicator, Question, RowCounts, UniqueQuestion
from proxima.prepare.locate import SourceFiles
from proxima.prepare.normalize import normalize
from proxima.prepare.prompt_template import Template, resolve_template
from proxima.prepare.read_files import InputFile, inspect_file, iter_source_rows
from proxima.prepare.write_files import PreparedRow, TableWriter, write_lines

HELD_OUT = 0.02  # share of the questions for testing, where a source has no test side
_EVERY = 4096  # rows between two calls of the observer
_SIDE = "its own test side"  # among the evaluation sets

ProgressCallback = Callable[[str, int, int | None], None]
"""`observe(stage, rows done, rows in all or None)`."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What a user may choose.

    Args:
        template: preset, text or `@file`; None: the part's.
        system: system prompt; empty: none; None: the preset's.
        held_out: share of the questions for testing, by a hash of the question, in [0, 1); None: .02 where the source
            has no test side.
        words: length of a run of words that shows contamination; 0: whole texts only.
        common: training questions above which a run is a phrase that shows nothing; 0: none is.
        conflicts: what to do with a question that has several answers: `drop`, `first` or `majority`.
        max_unreadable: share of distinct questions without a readable answer above which nothing is made, in [0, 1].
    """

    template: str | None = None
    system: str | None = None
    held_out: float | None = None
    words: int = 13
    common: int = 10
    conflicts: Conflicts = "drop"
    max_unreadable: float = 0.01

    def __post_init__(self) -> None:
        require(self.held_out is None or 0 <= self.held_out < 1, "held_out", self.held_out, "must be in [0, 1)")
        require(self.words >= 0, "words", self.words, "must be >= 0; 0 compares whole texts only")
        require(self.common >= 0, "common", self.common, "must be >= 0; 0 takes no run for a phrase")
        require(
            self.conflicts in get_args(Conflicts),
            "conflicts",
            self.conflicts,
            f"must be one of {', '.join(get_args(Conflicts))}",
        )
        require(0 <= self.max_unreadable <= 1, "max_unreadable", self.max_unreadable, "must be in [0, 1]")


@dataclass(frozen=True)
class PreparedFolder:
    """What was made.

    Args:
        folder: where it is, or would be.
        card: the content of `card.json`.
        test: its test questions, for the check of another part; None: it has none.
        notes: lines that a user should read.
    """

    folder: Path
    card: dict[str, Any]
    test: EvalSet | None
    notes: tuple[str, ...]


@dataclass
class _SplitData:
    """A side while it is read: its files and what became of their rows."""

    inputs: tuple[InputFile, ...]
    distinct: Deduplicator


def prepare(
    part: Part,
    origin: SourceFiles,
    out: Path,
    options: PrepareOptions,
    *,
    against: Sequence[EvalSet] = (),
    command: str = "",
    overwrite: bool = False,
    dry_run: bool = False,
    observe: ProgressCallback = lambda stage, done, total: None,
) -> PreparedFolder:
    """Make one folder: `train.parquet`, `test.parquet`, `card.json`, `README.md` and the lists of what was left out.

    The same files and options give the same bytes, wherever they lie and whenever it is done; the order is that of the
    source.

    Args:
        part: what it is.
        origin: its files.
        out: the folder to make.
        options: the user's choices.
        against: evaluation sets that must not be trained on; the part's own test side is added by itself.
        command: for the card.
        overwrite: replace a prepared folder.
        dry_run: count everything, write nothing.
        observe: told how far it is.
    Raises:
        ValueError: damaged files, too many unreadable answers, nothing left, `out` taken; one line with the remedy.
            Nothing is left behind.
    """
    template = resolve_template(options.template if options.template is not None else part.template, options.system)
    held_out = _held_out(part, origin, options)
    if not dry_run:
        refuse_existing(out, overwrite=overwrite)
    with ExitStack() as stack:
        folder = stack.enter_context(_temporary_folder() if dry_run else atomic_folder(out, overwrite=overwrite))
        sides = {side: _read(part, side, origin, folder, options, stack, observe) for side in sorted(origin.sides)}
        own, kept_test = _own_test(sides, options, held_out)
        overlap = OverlapIndex(options.words, options.common)
        for known in (*against, *([own] if own else ())):
            overlap.learn(known)
        writer = _SplitWriter(folder, part, template, {side: sides[side].inputs for side in sides}, out.name)
        if "test" in sides:
            writer.write("test", kept_test)
        left_out = _ExclusionLists(sides, options)
        if "train" in sides:
            _split(sides["train"].distinct, overlap, held_out, options, writer, left_out, observe)
        files = writer.close() | left_out.write(folder)
        for side in sides:
            (folder / f".{side}.spool").unlink()
        _refuse_empty(part, sides, files)
        card = build_card(
            part,
            origin,
            template,
            options,
            held_out,
            command,
            inputs={side: found.inputs for side, found in sides.items()},
            tallies={side: found.distinct.tally for side, found in sides.items()},
            against=(*against, *([own] if own else ())),
            overlap=overlap,
            left_out=left_out,
            files=files,
        )
        write_card(folder, card)
        written = card["outputs"].get("test.parquet")
        test = None if written is None else EvalSet(out.name, writer.test_questions, written["sha256"])
    return PreparedFolder(out, card, test, tuple(_notes(part, origin, card)))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="proxima-data-") as folder:
        yield Path(folder)


def _held_out(part: Part, origin: SourceFiles, options: PrepareOptions) -> float | None:
    """The share that is split off; None where the source has a test side or is one."""
    if part.side == "test" or "test" in origin.sides:
        if options.held_out:
            raise UserError(
                f"held_out={options.held_out:g}: {part.name} from {origin.name} has a test side of its own; leave "
                "it out"
            )
        return None
    return HELD_OUT if options.held_out is None else options.held_out


def _read(
    part: Part,
    side: str,
    origin: SourceFiles,
    folder: Path,
    options: PrepareOptions,
    stack: ExitStack,
    observe: ProgressCallback,
) -> _SplitData:
    """All rows of a side through `Deduplicator`."""
    inputs = []
    for path, name in origin.sides[side]:
        inputs.append(inspect_file(path, name))
        observe(f"hash {side}", len(inputs), len(origin.sides[side]))
    total = sum(one.rows or 0 for one in inputs) if all(one.rows is not None for one in inputs) else None
    spool = stack.enter_context((folder / f".{side}.spool").open("w+", encoding="utf-8"))
    distinct = Deduplicator(part.answer, spool)
    done = 0
    for done, placed in enumerate(iter_source_rows(tuple(inputs)), 1):
        distinct.add(placed)
        if done % _EVERY == 0:
            observe(f"read {side}", done, total)
    observe(f"read {side}", done, done)
    distinct.close()
    _refuse_unreadable(part, side, inputs, distinct, options)
    return _SplitData(tuple(inputs), distinct)


def _refuse_unreadable(
    part: Part, side: str, inputs: Sequence[InputFile], distinct: Deduplicator, options: PrepareOptions
) -> None:
    tally = distinct.tally
    share = tally.unreadable / max(tally.unreadable + tally.questions, 1)
    if tally.unreadable and share > options.max_unreadable:
        worst = distinct.unreadable[0]
        count = f"{tally.unreadable:,} of {tally.unreadable + tally.questions:,} {side} questions ({share:.1%})"
        raise UserError(
            f"{part.name}: {count} can't be used; the first, {inputs[worst['file']].path} row {worst['row']}, "
            f"{worst['reason']}: "
            f"{worst['answer']!r:.60}; give the right data, or raise --max-unreadable {options.max_unreadable:g}"
        )


def _own_test(
    sides: dict[str, _SplitData], options: PrepareOptions, held_out: float | None
) -> tuple[EvalSet | None, list[tuple[Question, int]]]:
    """The test side as an evaluation set, and the rows to write of it where the source has one."""
    if "test" in sides:
        rows = [
            (entry.item, entry.repeats) for entry in sides["test"].distinct.entries(options.conflicts) if entry.item
        ]
        return EvalSet(_SIDE, [item.question for item, _ in rows]), rows
    if not held_out:
        return None, []
    entries = sides["train"].distinct.entries(options.conflicts)
    return EvalSet(_SIDE, [e.item.question for e in entries if e.item and _is_held_out(e.item, held_out)]), []


def _is_held_out(item: Question, share: float) -> bool:
    """By a hash of the question alone: more data, another order or another file leave a question on its side."""
    return share_of(f"held out: {normalize(item.question)}") < share


def _split(
    distinct: Deduplicator,
    overlap: OverlapIndex,
    held_out: float | None,
    options: PrepareOptions,
    writer: "_SplitWriter",
    left_out: "_ExclusionLists",
    observe: ProgressCallback,
) -> None:
    """Training questions to their sides; those that meet an evaluation question are listed instead.

    Twice over the spool: how many training questions hold a run of words is known after the first.
    """
    total = distinct.tally.questions
    suspects: dict[int, list[OverlapMatch]] = {}
    for number, entry in _watched(distinct.entries(options.conflicts), "compare", total, observe):
        if entry.item:
            asked = bool(held_out) and _is_held_out(entry.item, held_out or 0)
            if hits := overlap.look(entry.item.question, count=not asked):
                suspects[number] = hits
    for number, entry in _watched(distinct.entries(options.conflicts), "write", total, observe):
        if entry.item is None:
            continue
        asked = bool(held_out) and _is_held_out(entry.item, held_out or 0)
        if found := overlap.contaminated(suspects.get(number, ()), _SIDE if asked else None):
            left_out.contaminated(entry.item, found)
        else:
            writer.write("test" if asked else "train", [(entry.item, entry.repeats)])


def _watched(
    entries: Iterator[UniqueQuestion], stage: str, total: int, observe: ProgressCallback
) -> Iterator[tuple[int, UniqueQuestion]]:
    for number, entry in enumerate(entries):
        yield number, entry
        if (number + 1) % _EVERY == 0:
            observe(stage, number + 1, total)
    observe(stage, total, total)


class _SplitWriter:
    """The tables of the two sides, opened when their first row comes."""

    def __init__(
        self, folder: Path, part: Part, template: Template, inputs: dict[str, tuple[InputFile, ...]], name: str
    ) -> None:
        self.test_questions: list[str] = []
        self._folder, self._template, self._inputs, self._name = folder, template, inputs, name
        self._tables: dict[str, TableWriter] = {}

    def write(self, side: str, rows: Sequence[tuple[Question, int]]) -> None:
        names = self._inputs.get(side) or self._inputs["train"]
        for item, repeats in rows:
            if side not in self._tables:
                self._tables[side] = TableWriter(self._folder / f"{side}.parquet")
            self._tables[side].add(PreparedRow.of(item, repeats, names[item.file].name, self._template))
            if side == "test":
                self.test_questions.append(item.question)

    def close(self) -> dict[str, int]:
        """File → rows."""
        return {f"{side}.parquet": table.close() for side, table in sorted(self._tables.items())}


class _ExclusionLists:
    """What was left out, and why: `unreadable.jsonl`, `conflicts.jsonl`, `contaminated.jsonl`."""

    def __init__(self, sides: dict[str, _SplitData], options: PrepareOptions) -> None:
        self._sides, self._options = sides, options
        self._contaminated: list[dict[str, Any]] = []
        self.dropped: dict[str, int] = {}
        self.same: dict[str, int] = {}
        self.conflicts_dropped = dict.fromkeys(sides, 0)

    @property
    def contaminated_questions(self) -> int:
        return len(self._contaminated)

    def contaminated(self, item: Question, hits: Sequence[OverlapMatch]) -> None:
        for name in dict.fromkeys(hit.where[0] for hit in hits):
            self.dropped[name] = self.dropped.get(name, 0) + 1
            self.same[name] = self.same.get(name, 0) + any(hit.where[0] == name and not hit.grams for hit in hits)
        met = [
            {"set": hit.where[0], "row": hit.where[1], "same": not hit.grams, "run": next(iter(hit.grams), None)}
            for hit in hits[:8]
        ]
        self._contaminated.append({"question": item.question, "answer": item.answer, "row": item.row, "meets": met})

    def write(self, folder: Path) -> dict[str, int]:
        """File → lines, of the lists that are not empty."""
        unreadable, conflicts = [], []
        for side, found in self._sides.items():
            names = [one.name for one in found.inputs]
            unreadable += [{"side": side, **one, "file": names[one["file"]]} for one in found.distinct.unreadable]
            if not found.distinct.tally.conflicts:
                continue
            for entry in found.distinct.entries(self._options.conflicts):
                if len(entry.answers) > 1:
                    self.conflicts_dropped[side] += entry.item is None
                    kept = None if entry.item is None else entry.item.answer
                    conflicts.append({"side": side, "question": entry.question, "answers": entry.answers, "kept": kept})
        lists = {"conflicts.jsonl": conflicts, "contaminated.jsonl": self._contaminated, "unreadable.jsonl": unreadable}
        return {name: write_lines(folder / name, rows) for name, rows in lists.items() if rows}


def _refuse_empty(part: Part, sides: dict[str, _SplitData], files: dict[str, int]) -> None:
    if f"{part.side}.parquet" in files:
        return
    tally: RowCounts = sides[part.side].distinct.tally
    lists = ", ".join(f"{count} in {name}" for name, count in files.items() if name.endswith(".jsonl")) or "no rows"
    raise UserError(
        f"{part.name}: no {part.side} question is left of {tally.rows:,} rows ({lists}); change --conflicts, "
        "--against or --words"
    )


def _notes(part: Part, origin: SourceFiles, card: dict[str, Any]) -> Iterator[str]:
    if part.side == "train" and "test" in part.published and "test" not in origin.sides:
        share = card["split"]["held_out"]
        yield (
            f"{part.name}: {origin.name} holds no test side; {share:.0%} of the questions are held out, a test "
            "that nobody else has"
        )
    for side, count in part.published.items():
        found = card["counts"].get(side, {}).get("questions", count)
        if found != count:
            yield f"{part.name}: {found:,} distinct {side} questions, {count:,} are published; is the source whole?"


def sha256_of(inputs: Sequence[InputFile]) -> str:
    """One hash for several files: of one file its own."""
    if len(inputs) == 1:
        return inputs[0].sha256
    return hashlib.sha256("".join(f"{one.sha256} {one.name}\n" for one in inputs).encode()).hexdigest()
