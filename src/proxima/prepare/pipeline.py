"""All steps of preparation in order: read, deduplicate, split, decontaminate, write. Start at `prepare`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from proxima.data import UserError
from proxima.prepare.catalog import Part, PrepareOptions
from proxima.prepare.dataset_card import build_card, read_card, recipe_snippet, write_card
from proxima.prepare.decontaminate import EvalSet, OverlapIndex
from proxima.prepare.deduplicate import Deduplicator
from proxima.prepare.locate import CARD, SourceFiles, locate_files
from proxima.prepare.normalize import question_key
from proxima.prepare.prompt_template import resolve_template
from proxima.prepare.read_files import combined_sha256, inspect_file, iter_source_rows
from proxima.prepare.write_files import SplitData, SplitOutcome, write_lists, write_tables
from proxima.system.atomic_files import atomic_folder
from proxima.system.jsonl import utf8
from proxima.task.held_out_part import is_held_out
from proxima.task.question_text import strip_instructions

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
    asked = part.template if options.template is None else options.template
    template = resolve_template(asked, options.system)
    held_out = _held_out_share(part, source, options)
    check = partial(refuse_existing, overwrite=overwrite)
    if not dry_run:
        check(out)
    sides = {side: _read(part, side, source, options, progress) for side in sorted(source.sides)}
    overlap = OverlapIndex(options.words, options.common)
    for eval_set in eval_sets:
        overlap.add(eval_set)
    outcome = _decontaminated(sides, overlap, held_out)
    folders = TemporaryDirectory(prefix="proxima-data-") if dry_run else atomic_folder(out, check)
    with folders as made:
        folder = Path(made)
        files = write_tables(folder, template, sides, outcome) | write_lists(folder, sides, outcome)
        _refuse_empty(part, sides, files)
        card = build_card(part, source, template, options, held_out, command, sides, overlap, outcome, files)
        write_card(folder, card)
    own_test = None
    written = card["outputs"].get("test.parquet")
    if written is not None:
        questions = [item.question for item, _ in outcome.kept["test"]]
        own_test = EvalSet(out.name, questions, written["sha256"])
    return PreparedFolder(out, card, own_test, tuple(_notes(part, source, card)))


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Raise `UserError` if `target` must not be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    remedy = "give another folder with --out"
    if not (target / CARD).is_file():
        raise UserError(f"{target} exists and is not prepared data (no {CARD} in it)", remedy=remedy)
    if not overwrite:
        raise UserError(f"{target} exists", remedy=f"use --overwrite to replace it, or {remedy}")


def _held_out_share(part: Part, source: SourceFiles, options: PrepareOptions) -> float | None:
    """Return the share to split off; None if the source has a test split or is one."""
    if part.side == "test" or "test" in source.sides:
        if options.held_out:
            message = f"held_out={options.held_out:g}: {part.name} from {source.name} has its own test split"
            raise UserError(message, remedy="leave it out")
        return None
    return HELD_OUT if options.held_out is None else options.held_out


def _read(
    part: Part, side: str, source: SourceFiles, options: PrepareOptions, progress: ProgressCallback | None
) -> SplitData:
    """Deduplicate all rows of a side."""
    inputs = tuple(inspect_file(*pair) for pair in source.sides[side])
    distinct = Deduplicator(part.answer, options.conflicts)
    for done, row in enumerate(iter_source_rows(inputs), 1):
        distinct.add(row)
        if progress is not None and done % _REPORT_EVERY == 0:
            progress(f"read {side}", done, None)
    data = SplitData(inputs, distinct)
    _refuse_unreadable(part, side, data, options)
    return data


def _refuse_unreadable(part: Part, side: str, data: SplitData, options: PrepareOptions) -> None:
    unreadable = data.distinct.counts["unreadable"]
    total = unreadable + data.distinct.counts["questions"]
    if unreadable > options.max_unreadable * total:
        first = data.distinct.unreadable[0]
        place = f"{data.inputs[first['file']].path} row {first['row']}"
        raise UserError(
            f"{part.name}: {unreadable:,} of {total:,} {side} questions ({unreadable / total:.1%}) can't be used; the "
            f"first, {place}, {first['reason']}: {first['answer']!r:.60}",
            remedy=f"give the right data, or raise --max-unreadable {options.max_unreadable:g}",
        )


def _decontaminated(sides: dict[str, SplitData], overlap: OverlapIndex, held_out: float | None) -> SplitOutcome:
    """Sort the questions into the sides that are written and those that overlap with an evaluation question."""
    questions = {
        side: [(entry.kept, entry.repeats) for entry in data.distinct.questions() if entry.kept]
        for side, data in sides.items()
    }
    training = [
        (item, repeats, is_held_out(item.question, held_out or 0)) for item, repeats in questions.get("train", [])
    ]
    outcome = SplitOutcome({"test": questions.get("test", []), "train": []})
    if "test" in sides or held_out:
        test_items = [item for item, _ in outcome.kept["test"]] or [item for item, _, test in training if test]
        overlap.add(EvalSet(_OWN_TEST, [item.question for item in test_items]))
    # the number of training questions with an n-gram is known only after all were compared
    matches_of_rows = [overlap.find(item.question, count=not test) for item, _, test in training]
    for (item, repeats, test), matches in zip(training, matches_of_rows, strict=True):
        own_set = _OWN_TEST if test else None
        evidence = overlap.contaminated(matches, own_set)
        if evidence:
            outcome.contaminated.append((item, evidence))
        elif test:
            outcome.kept["test"].append((item, repeats))
        else:
            outcome.kept["train"].append((item, repeats))
    return outcome


def _refuse_empty(part: Part, sides: dict[str, SplitData], files: dict[str, int]) -> None:
    if f"{part.side}.parquet" in files:
        return
    rows = sides[part.side].distinct.counts["rows"]
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
            yield f"{part.name}: {distinct:,} distinct {side} questions, {count:,} are published; is it complete?"


_ANY = Part("evaluation set", "", (), side="test", answer="expression", template="plain")


def load_eval_set(given: str) -> EvalSet:
    """Load the distinct test questions of a prepared folder, a file, a folder as published, or a data set on the hub;
    UserError if it does not exist, or has no questions."""
    place = Path(given).expanduser()
    path = given
    if (place / "test.parquet").is_file():
        path = str(place / "test.parquet")
    elif (place / CARD).is_file():
        raise UserError(f"against={given!r} has no test.parquet: nothing is evaluated on it; leave it out")
    try:
        files = locate_files(_ANY, path)
        inputs = tuple(inspect_file(*pair) for pair in files.sides["test"])
        questions = {
            question_key(row.content.question): utf8(strip_instructions(row.content.question))
            for row in iter_source_rows(inputs)
            if row.content and row.content.question
        }
    except UserError as error:
        raise UserError(f"against={given!r}: {error}") from None
    if not questions:
        raise UserError(f"against={given!r} has no questions")
    if place.is_dir() or place.stem != "test":
        name = place.name
    else:
        name = place.resolve().parent.name
    return EvalSet(name, list(questions.values()), combined_sha256(inputs))


def sibling_eval_sets(out: Path) -> list[str]:
    """Return the folders next to `out` with a `test.parquet`, except test splits that were split off a training set."""
    if not out.parent.is_dir():
        return []
    siblings = (path for path in sorted(out.parent.iterdir()) if path != out and (path / "test.parquet").is_file())
    return [str(path) for path in siblings if not path.name.startswith(".") and not _is_split_off(path)]


def _is_split_off(folder: Path) -> bool:
    try:
        return bool(read_card(folder)["split"]["held_out"])
    except (UserError, KeyError, TypeError):
        return False


def eval_sets_for(folder: Path, made: Sequence[PreparedFolder], against: Sequence[str] | None) -> list[EvalSet]:
    """The evaluation sets that training questions are compared with: those in `against`, or else those next to the
    folder; and those that this command has prepared."""
    fresh = {done.test.name: done.test for done in made if done.test}
    if against is None:
        named = [load_eval_set(name) for name in sibling_eval_sets(folder) if Path(name).name not in fresh]
    else:
        named = [load_eval_set(name) for name in against]
    return named + [new for name, new in fresh.items() if name not in {eval_set.name for eval_set in named}]


def prepared_lines(done: PreparedFolder, dry_run: bool) -> Iterator[str]:
    """Yield lines with the result of each step."""
    card = done.card
    against = done.card["overlap"]["against"]
    source = card["source"]["name"]
    if card["source"]["revision"]:
        source += f" at {card['source']['revision'][:12]}"
    yield f"{card['name']}  from {source}"
    sets = ", ".join(f"{of['set']} {of['left_out']:,}" for of in against if of["left_out"])
    for side, counts in card["counts"].items():
        explanations = {
            "rows": "",
            "unreadable_rows": f"{counts['unreadable']:,} distinct; unreadable.jsonl",
            "repeats": "of an earlier question",
            "questions": "",
            "conflicts": f"several answers; {counts['conflicts_dropped']:,} left out; conflicts.jsonl",
            "contaminated": f"{sets}; contaminated.jsonl",
        }
        for key, text in explanations.items():
            if counts[key] or key == "rows":
                first = side if key == "rows" else ""
                word = key.removesuffix("_rows")
                yield f"  {first:<5} {counts[key]:>11,} {word:<13}{text}".rstrip()
    if "train" in card["counts"]:
        compared = ", ".join(of["set"] for of in against) or "no evaluation set"
        alone = not any(of["sha256"] for of in against) and card["split"]["held_out"] is not None
        if alone and against:
            compared += " alone"
        if alone:
            compared += "; prepare some first, or name them with --against"
        yield f"  compared with {compared}"
    wrote = "would write" if dry_run else "wrote"
    held_out = card["split"]["held_out"]
    for name, facts in card["outputs"].items():
        if name.endswith(".parquet"):
            line = f"  {wrote} {done.folder / name}  {facts['rows']:,} rows"
            if name == "test.parquet" and held_out:
                line += f"  held out: {held_out:.3g} by hash"
            yield line
    yield from (f"  note: {note}" for note in done.notes)
    if not dry_run:
        yield "  in a recipe: " + recipe_snippet(card, str(done.folder)).replace("\n", "\n               ")
