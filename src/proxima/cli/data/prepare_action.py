"""`proxima data prepare`: find the parts and files to prepare, and report what happened to the rows."""

import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.output import print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError
from proxima.prepare.catalog import PrepareOptions
from proxima.prepare.deduplicate import Conflicts

if TYPE_CHECKING:
    from proxima.prepare.catalog import Part
    from proxima.prepare.decontaminate import EvalSet
    from proxima.prepare.pipeline import PreparedFolder
    from proxima.view.terminal import StageProgress

DATA = Path("data")
SOURCE = "dapo-math, gsm8k, aime (both years), amc23, math (with math500), or a part: aime24, math500 …"
FROM = "file, folder, pattern ('data/*.parquet') or hub name, once for each part (aime24=…); default: the hub"
SUBSET = "folder inside, or configuration on the hub (DAPO-Math-17k-Processed: en, cn)"
REVISION = "commit, tag or branch on the hub; default: the cached, else the newest"
OUT = "folder to write; data/<name>. math500 goes beside it, the years of aime into it"
AGAINST = "evaluation sets to keep out of the training questions; default: those beside the output; empty: none"
TEMPLATE = "prompt template: plain, dapo, boxed, gsm8k, think_answer, a text with {question}, or @FILE"
HELD_OUT = "share of the questions to split off by hash where the source has no test side; 0.02"
WORDS = "consecutive words that no training and evaluation question may share; 0: compare whole texts only; 13"
COMMON = "ignore consecutive words that occur in more training questions than this; 10"
CONFLICTS = "a question with several answers: drop it, keep the first, or the majority; drop"
UNREADABLE = "refuse if more of the questions have no readable answer; 0.01"


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(PrepareOptions):
    """The options of the command that decide the content."""

    template: Annotated[str | None, Argument(TEMPLATE, "TEXT")] = None
    system: Annotated[str | None, Argument("system prompt; '' for none", "TEXT")] = None
    held_out: Annotated[float | None, Argument(HELD_OUT, "SHARE")] = None
    words: Annotated[int, Argument(WORDS, "N")] = PrepareOptions.words
    common: Annotated[int, Argument(COMMON, "N")] = PrepareOptions.common
    conflicts: Annotated[Conflicts, Argument(CONFLICTS, "RULE", read=str)] = PrepareOptions.conflicts
    max_unreadable: Annotated[float, Argument(UNREADABLE, "SHARE")] = PrepareOptions.max_unreadable


def prepare_source(
    source: Annotated[str, Argument(SOURCE)],
    *,
    places: Annotated[Sequence[str], Argument(FROM, "[PART=]PLACE", flag="--from", words="append")] = (),
    subset: Annotated[str | None, Argument(SUBSET, "NAME")] = None,
    revision: Annotated[str | None, Argument(REVISION, "COMMIT")] = None,
    out: Annotated[Path | None, Argument(OUT, "FOLDER")] = None,
    against: Annotated[Sequence[str] | None, Argument(AGAINST, "FOLDER", words="*")] = None,
    options: PrepareArguments = PrepareArguments(),
    overwrite: Annotated[bool, Argument("replace a prepared folder")] = False,
    dry_run: Annotated[bool, Argument("count everything, write nothing")] = False,
    as_json: Annotated[bool, Argument("print the cards for programs", flag="--json")] = False,
    quiet: Annotated[bool, Argument("no progress")] = False,
) -> None:
    """Prepare a data set without repeats or evaluation questions, with a card.

    Raises:
        UserError: as for `prepare`, or no part could be prepared.
    """
    from proxima.prepare.locate import locate_files
    from proxima.prepare.pipeline import prepare, refuse_existing
    from proxima.prepare.prompt_template import resolve_template

    parts = _parts(source)
    for part in parts:  # before anything is read
        resolve_template(options.template if options.template is not None else part.template, options.system)
    given = dict(_named_place(parts, text) for text in places)
    requests = [(part, folder, part.name in given or not part.optional) for part, folder in _folders(parts, given, out)]
    for _, folder, required in requests:
        if required and not dry_run:
            refuse_existing(folder, overwrite=overwrite)
    command = _command(source, places, subset, revision, options, against)
    made: list[PreparedFolder] = []
    missing: list[str] = []
    for part, folder, required in requests:
        if not required and not overwrite and (folder / "card.json").is_file():
            print(f"{part.name}: {folder} exists and is kept; --overwrite replaces it", file=sys.stderr)
            continue
        try:
            files = locate_files(part, given.get(part.name), subset=subset, revision=revision)
        except UserError as problem:
            if required:
                raise
            missing.append(str(problem))
            continue
        eval_sets = _eval_sets(folder, made, against) if part.side == "train" else ()
        how: dict[str, Any] = {"eval_sets": eval_sets, "command": command, "overwrite": overwrite, "dry_run": dry_run}
        with _progress(folder) as progress:
            made.append(prepare(part, files, folder, options, progress=None if quiet else progress.update, **how))
        if not as_json:
            print("\n".join(report(made[-1], dry_run)), flush=True)
    sys.stderr.writelines(f"not prepared: {line}\n" for line in missing)
    if as_json:
        print_json([prepared.card for prepared in made])
    if not made and missing:
        raise UserError(f"no part of {source} could be prepared, see above")


@contextmanager
def _progress(folder: Path) -> "Iterator[StageProgress]":
    """Show the progress of a preparation; UserError for a full disk, or a folder that is not writable."""
    from proxima.view.terminal import StageProgress

    progress = StageProgress(sys.stderr, patience=10.0)
    try:
        yield progress
    except OSError as problem:
        reason = f"{problem.filename or folder}: {problem.strerror or problem}; nothing was written"
        raise UserError(reason, remedy="free some space, or give another --out") from None
    finally:
        progress.clear()


def report(done: "PreparedFolder", dry_run: bool) -> Iterator[str]:
    """Yield lines with the result of each step."""
    from proxima.prepare.dataset_card import recipe_snippet

    card, against = done.card, done.card["overlap"]["against"]
    at = f" at {card['source']['revision'][:12]}" if card["source"]["revision"] else ""
    yield f"{card['name']}  from {card['source']['name']}{at}"
    sets = ", ".join(f"{of['set']} {of['left_out']:,}" for of in against if of["left_out"])
    for side, counts in card["counts"].items():
        more = {
            "rows": "",
            "unreadable_rows": f"{counts['unreadable']:,} distinct; unreadable.jsonl",
            "repeats": "of an earlier question",
            "questions": "",
            "conflicts": f"several answers; {counts['conflicts_dropped']:,} left out; conflicts.jsonl",
            "contaminated": f"{sets}; contaminated.jsonl",
        }
        for key, text in more.items():
            if counts[key] or key == "rows":
                word = key.removesuffix("_rows")
                yield f"  {side if key == 'rows' else '':<5} {counts[key]:>11,} {word:<13}{text}".rstrip()
    if "train" in card["counts"]:
        alone = not any(of["sha256"] for of in against) and card["split"]["held_out"] is not None
        remedy = "; prepare some first, or name them with --against" if alone else ""
        named = ", ".join(of["set"] for of in against) or "no evaluation set"
        yield f"  compared with {named}{' alone' if alone and against else ''}{remedy}"
    for name, facts in card["outputs"].items():
        if name.endswith(".parquet"):
            held_out = card["split"]["held_out"] if name == "test.parquet" else None
            how = f"  held out: {held_out:.3g} by hash" if held_out else ""
            yield f"  {'would write' if dry_run else 'wrote'} {done.folder / name}  {facts['rows']:,} rows{how}"
    yield from (f"  note: {note}" for note in done.notes)
    if not dry_run:
        yield "  in a recipe: " + recipe_snippet(card, str(done.folder)).replace("\n", "\n               ")


def _eval_sets(folder: Path, made: "Sequence[PreparedFolder]", against: Sequence[str] | None) -> "list[EvalSet]":
    """The evaluation sets that training questions are compared with: those in `against`, or else those next to the
    folder; and those that this command has prepared."""
    from proxima.prepare.pipeline import load_eval_set, sibling_eval_sets

    fresh = {done.test.name: done.test for done in made if done.test}
    if against is None:
        named = [load_eval_set(name) for name in sibling_eval_sets(folder) if Path(name).name not in fresh]
    else:
        named = [load_eval_set(name) for name in against]
    return named + [new for name, new in fresh.items() if name not in {eval_set.name for eval_set in named}]


def _parts(name: str) -> tuple["Part", ...]:
    """The parts of a source, or the one part of that name."""
    from proxima.config.problems import one_problem
    from proxima.data.errors import suggestion
    from proxima.prepare.catalog import SOURCES

    if name in SOURCES:
        return SOURCES[name]
    alone = {part.name: (replace(part, optional=False),) for parts in SOURCES.values() for part in parts}
    if name not in alone:
        raise one_problem("source", suggestion(name, {*SOURCES, *alone}), name, "command line")
    return alone[name]


def _folders(parts: Sequence["Part"], given: Collection[str], out: Path | None) -> Iterator[tuple["Part", Path]]:
    """The parts to prepare with their folders, evaluation sets first: training questions are compared with them."""
    main = _main(parts)
    for part in parts:
        if given and part.name not in given and main is None:
            continue  # one year of the AIME was named, the other was not asked for
        above = DATA if out is None else out.expanduser() if main is None else out.expanduser().parent
        yield part, out.expanduser() if out is not None and part is main else above / part.name


def _main(parts: Sequence["Part"]) -> "Part | None":
    """The part without which the source is useless; None if each is a set of its own."""
    return parts[0] if len(parts) == 1 else next((part for part in parts if not part.optional), None)


def _named_place(parts: Sequence["Part"], text: str) -> tuple[str, str]:
    """The part and the place of a --from; without the name of a part it is the main one."""
    name, equals, place = text.partition("=")
    if equals and name in {part.name for part in parts}:
        return name, place
    if equals and "/" not in name and not Path(text).exists():
        raise UserError(f"--from {text}: there is no part {name!r}; the parts are {', '.join(p.name for p in parts)}")
    if (main := _main(parts)) is None:
        choices = " or ".join(f"--from {part.name}={place or text}" for part in parts)
        raise UserError(f"--from {text}: which part is it? write {choices}")
    return main.name, text


def _command(
    source: str,
    places: Sequence[str],
    subset: str | None,
    revision: str | None,
    options: "PrepareOptions",
    against: Sequence[str] | None,
) -> str:
    """The command with only the options that decide the content, so that equal data have equal cards wherever they are
    written."""
    words = ["proxima", "data", "prepare", source]
    for place in places:
        words += ["--from", place]
    chosen = {"subset": subset, "revision": revision} | vars(options)
    for name, value in chosen.items():
        if value != getattr(type(options), name, None):  # the default
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words if against is None else [*words, "--against", *against])
