"""All steps of preparation in order: read, deduplicate, split, decontaminate, write. Start at `prepare`."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.random import share_of
from proxima.prepare.atomic_folder import atomic_folder, refuse_existing
from proxima.prepare.catalog import Part
from proxima.prepare.dataset_card import build_card, write_card
from proxima.prepare.decontaminate import EvalSet, OverlapIndex, OverlapMatch
from proxima.prepare.deduplicate import Deduplicator, Question
from proxima.prepare.locate import SourceFiles
from proxima.prepare.normalize import normalize
from proxima.prepare.prepare_options import PrepareOptions
from proxima.prepare.prompt_template import resolve_template
from proxima.prepare.read_files import InputFile, inspect_file, iter_source_rows
from proxima.prepare.write_files import ExclusionLists, SplitData, SplitWriter

HELD_OUT = 0.02  # share of the questions for testing, if a source has no test split
_REPORT_EVERY = 4096  # rows between two calls of the progress callback
_OWN_TEST = "its own test split"  # name among the evaluation sets

ProgressCallback = Callable[[str, int, int | None], None]  # stage, rows done, total rows or None


@dataclass(frozen=True)
class PreparedFolder:
    """A finished folder.

    Args:
        folder: its path; after a dry run, the path that it would have.
        card: the content of `card.json`.
        test: its test questions, against which another part is checked; None if it has none.
        notes: lines that a user should read.
    """

    folder: Path
    card: dict[str, Any]
    test: EvalSet | None
    notes: tuple[str, ...]


def prepare(
    part: Part,
    source: SourceFiles,
    out: Path,
    options: PrepareOptions,
    *,
    eval_sets: Sequence[EvalSet] = (),
    command: str = "",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> PreparedFolder:
    """Write one folder: `train.parquet`, `test.parquet`, `card.json`, `README.md` and the lists of excluded rows.

    The same files and options give the same bytes, on any machine at any time; rows keep the order of the source.

    Args:
        part: the part to prepare.
        source: its files.
        out: the folder to write.
        options: the user's options.
        eval_sets: evaluation sets that must not be trained on; the part's own test split is always one.
        command: for the card.
        overwrite: replace a prepared folder.
        dry_run: count everything, write nothing.
        progress: called periodically; None: never.
    Raises:
        UserError: damaged files, too many unreadable answers, no rows left, `out` exists. Nothing is written then.
    """
    template = resolve_template(options.template if options.template is not None else part.template, options.system)
    held_out = _held_out_share(part, source, options)
    progress = progress or (lambda stage, done, total: None)
    if not dry_run:
        refuse_existing(out, overwrite=overwrite)
    with ExitStack() as stack:
        if dry_run:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxima-data-")))
        else:
            folder = stack.enter_context(atomic_folder(out, overwrite=overwrite))
        sides = {}
        for side in sorted(source.sides):
            spool = stack.enter_context((folder / f".{side}.spool").open("w+", encoding="utf-8"))
            sides[side] = _read(part, side, source, Deduplicator(part.answer, spool, options.conflicts), progress)
            _refuse_unreadable(part, side, sides[side], options)
        compared = (*eval_sets, *_own_test(sides, held_out))
        overlap = OverlapIndex(options.words, options.common)
        for eval_set in compared:
            overlap.add(eval_set)
        writer, excluded = SplitWriter(folder, template, sides), ExclusionLists(sides)
        for entry in sides["test"].distinct.questions() if "test" in sides else ():
            if entry.kept:
                writer.write("test", entry.kept, entry.repeats)
        if "train" in sides:
            _split(sides["train"].distinct, overlap, held_out, writer, excluded, progress)
        files = writer.close() | excluded.write(folder)
        for side in sides:
            (folder / f".{side}.spool").unlink()
        _refuse_empty(part, sides, files)
        card = build_card(part, source, template, options, held_out, command, sides, compared, overlap, excluded, files)
        write_card(folder, card)
        written = card["outputs"].get("test.parquet")
        test = None if written is None else EvalSet(out.name, writer.test_questions, written["sha256"])
    return PreparedFolder(out, card, test, tuple(_notes(part, source, card)))


def _held_out_share(part: Part, source: SourceFiles, options: PrepareOptions) -> float | None:
    """Return the share to split off; None if the source has a test split or is one."""
    if part.side == "test" or "test" in source.sides:
        if options.held_out:
            message = f"held_out={options.held_out:g}: {part.name} from {source.name} has its own test split"
            raise UserError(message, remedy="leave it out")
        return None
    return HELD_OUT if options.held_out is None else options.held_out


def _read(part: Part, side: str, source: SourceFiles, distinct: Deduplicator, progress: ProgressCallback) -> SplitData:
    """Deduplicate all rows of a side."""
    inputs: list[InputFile] = []
    for path, name in source.sides[side]:
        inputs.append(inspect_file(path, name))
        progress(f"hash {side}", len(inputs), len(source.sides[side]))
    counts = [file.rows for file in inputs if file.rows is not None]
    total = sum(counts) if len(counts) == len(inputs) else None
    done = 0
    for done, row in enumerate(iter_source_rows(tuple(inputs)), 1):
        distinct.add(row)
        if done % _REPORT_EVERY == 0:
            progress(f"read {side}", done, total)
    progress(f"read {side}", done, done)
    distinct.close()
    return SplitData(tuple(inputs), distinct)


def _refuse_unreadable(part: Part, side: str, data: SplitData, options: PrepareOptions) -> None:
    counts = data.distinct.counts
    total = counts.unreadable + counts.questions
    share = counts.unreadable / max(total, 1)
    if counts.unreadable and share > options.max_unreadable:
        first = data.distinct.unreadable[0]
        place = f"{data.inputs[first['file']].path} row {first['row']}"
        raise UserError(
            f"{part.name}: {counts.unreadable:,} of {total:,} {side} questions ({share:.1%}) can't be used; the first, "
            f"{place}, {first['reason']}: {first['answer']!r:.60}",
            remedy=f"give the right data, or raise --max-unreadable {options.max_unreadable:g}",
        )


def _own_test(sides: dict[str, SplitData], held_out: float | None) -> tuple[EvalSet, ...]:
    """Return the part's own test questions as an evaluation set."""
    if "test" not in sides and not held_out:
        return ()
    entries = sides["test" if "test" in sides else "train"].distinct.questions()
    kept = [entry.kept for entry in entries if entry.kept]
    return (EvalSet(_OWN_TEST, [item.question for item in kept if "test" in sides or _is_held_out(item, held_out)]),)


def _is_held_out(item: Question, share: float | None) -> bool:
    """Decide by a hash of the question alone, so that more data, another order or another file change nothing."""
    return bool(share) and share_of(f"held out: {normalize(item.question)}") < (share or 0)


def _split(
    distinct: Deduplicator,
    overlap: OverlapIndex,
    held_out: float | None,
    writer: SplitWriter,
    excluded: ExclusionLists,
    progress: ProgressCallback,
) -> None:
    """Write training questions to their side, and list those that overlap with an evaluation question.

    Reads the spool twice: the number of training questions with an n-gram is known only after the first pass.
    """
    suspects: dict[int, list[OverlapMatch]] = {}
    for number, item, _ in _kept(distinct, "compare", progress):
        if matches := overlap.find(item.question, count=not _is_held_out(item, held_out)):
            suspects[number] = matches
    for number, item, repeats in _kept(distinct, "write", progress):
        test = _is_held_out(item, held_out)
        if matches := overlap.contaminated(suspects.get(number, ()), _OWN_TEST if test else None):
            excluded.add_contaminated(item, matches)
        else:
            writer.write("test" if test else "train", item, repeats)


def _kept(distinct: Deduplicator, stage: str, progress: ProgressCallback) -> Iterator[tuple[int, Question, int]]:
    """Yield number, question and repeats of the questions that are not dropped because of a conflict."""
    total = distinct.counts.questions
    for number, entry in enumerate(distinct.questions()):
        if entry.kept:
            yield number, entry.kept, entry.repeats
        if (number + 1) % _REPORT_EVERY == 0:
            progress(stage, number + 1, total)
    progress(stage, total, total)


def _refuse_empty(part: Part, sides: dict[str, SplitData], files: dict[str, int]) -> None:
    if f"{part.side}.parquet" in files:
        return
    rows = sides[part.side].distinct.counts.rows
    lists = ", ".join(f"{count} in {name}" for name, count in files.items() if name.endswith(".jsonl")) or "no rows"
    message = f"{part.name}: no {part.side} question is left of {rows:,} rows ({lists})"
    raise UserError(message, remedy="change --conflicts, --against or --words")


def _notes(part: Part, source: SourceFiles, card: dict[str, Any]) -> Iterator[str]:
    if part.side == "train" and "test" in part.published and "test" not in source.sides:
        share = f"{card['split']['held_out']:.0%} of the questions are held out"
        yield f"{part.name}: {source.name} has no test split; {share}, a split that no other work reports"
    for side, count in part.published.items():
        distinct = card["counts"].get(side, {}).get("questions", count)
        if distinct != count:
            yield f"{part.name}: {distinct:,} distinct {side} questions, {count:,} are published; is the source whole?"
