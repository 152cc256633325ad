"""Prepare and check data sets for training and evaluation. Inspect the episodes of a recipe.

proxima data prepare gsm8k     # from the hub or its cache into data/gsm8k
proxima data prepare dapo-math --from dapo.parquet --against data/aime24 data/math500
proxima data check data/gsm8k  # do the files match the card?
proxima data inspect my.yaml   # an episode of its environment, token by token"""

import os
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from proxima.cli.parameters import Argument, AsJson, Overrides, Recipe, print_json
from proxima.config.problems import one_problem
from proxima.data import UserError
from proxima.data.errors import suggestion
from proxima.prepare.catalog import SOURCES, Conflicts, Part, PrepareOptions
from proxima.view.formatting import visible
from proxima.view.stage_progress import StageProgress

DATA = Path("data")
SOURCE = "dapo-math, gsm8k, aime (all years), amc23, math (with math500), or a part: aime24, math500 …"
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
UNREADABLE = "refuse if a larger share of the questions has no readable answer; 0.01"
SAY = "what the model says in a turn; repeatable; default: a call of the first tool, then a sentence"
ROW = "which prompt of the training data, from 0; 0"
KINDS = {  # the letter in front of a line, its colour, and what it means
    "prompt": ("p", "2", "the prompt: conditioned on"),
    "sampled": ("S", "1;32", "sampled and trained"),
    "observed": ("o", "36", "written by the environment and the chat template: conditioned on"),
    "earlier": ("e", "33", "written by the model, trained on an earlier path: conditioned on"),
}


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
    from proxima.prepare import locate, pipeline, prompt_template

    parts = _parts(source)
    for part in parts:  # before anything is read
        template = part.template if options.template is None else options.template
        prompt_template.resolve_template(template, options.system)
    given = dict(_named_place(parts, text) for text in places)
    requests = [(part, folder, part.name in given or not part.optional) for part, folder in _folders(parts, given, out)]
    for _, folder, required in requests:
        if required and not dry_run:
            pipeline.refuse_existing(folder, overwrite=overwrite)
    command = _command(source, places, subset, revision, options, against)
    made: list[pipeline.PreparedFolder] = []
    missing: list[str] = []
    for part, folder, required in requests:
        if not required and not overwrite and (folder / "card.json").is_file():
            print(f"{part.name}: {folder} exists and is kept; --overwrite replaces it", file=sys.stderr)
            continue
        try:
            files = locate.locate_files(part, given.get(part.name), subset=subset, revision=revision)
        except UserError as problem:
            if required:
                raise
            missing.append(str(problem))
            continue
        eval_sets = pipeline.eval_sets_for(folder, made, against) if part.side == "train" else []
        with _progress(folder) as progress:
            prepared = pipeline.prepare(
                part,
                files,
                folder,
                options,
                eval_sets=eval_sets,
                command=command,
                overwrite=overwrite,
                dry_run=dry_run,
                progress=None if quiet else progress.update,
            )
        made.append(prepared)
        if not as_json:
            print("\n".join(pipeline.prepared_lines(prepared, dry_run)), flush=True)
    sys.stderr.writelines(f"not prepared: {line}\n" for line in missing)
    if as_json:
        print_json([prepared.card for prepared in made])
    if not made and missing:
        raise UserError(f"no part of {source} could be prepared, see above")


@contextmanager
def _progress(folder: Path) -> Iterator[StageProgress]:
    """Show the progress of a preparation; UserError for a full disk, or a folder that is not writable."""
    progress = StageProgress(sys.stderr, patience=10.0)
    try:
        yield progress
    except OSError as problem:
        reason = f"{problem.filename or folder}: {problem.strerror or problem}; nothing was written"
        raise UserError(reason, remedy="free some space, or give another --out") from None
    finally:
        progress.clear()


def _parts(name: str) -> tuple[Part, ...]:
    """The parts of a source, or the one part of that name."""

    if name in SOURCES:
        return SOURCES[name]
    alone = {part.name: (replace(part, optional=False),) for part in chain.from_iterable(SOURCES.values())}
    if name not in alone:
        raise one_problem("source", suggestion(name, {*SOURCES, *alone}), name, "command line")
    return alone[name]


def _folders(parts: Sequence[Part], given: Collection[str], out: Path | None) -> Iterator[tuple[Part, Path]]:
    """The parts to prepare with their folders, evaluation sets first: training questions are compared with them."""
    main = _main(parts)
    for part in parts:
        if given and part.name not in given and main is None:
            continue  # one year of the AIME was named, the other was not asked for
        if out is None:
            folder = DATA / part.name
        elif main is None:
            folder = out.expanduser() / part.name
        elif part is main:
            folder = out.expanduser()
        else:
            folder = out.expanduser().parent / part.name
        yield part, folder


def _main(parts: Sequence[Part]) -> Part | None:
    """The part without which the source is useless; None if each is a set of its own."""
    if len(parts) == 1:
        return parts[0]
    return next((part for part in parts if not part.optional), None)


def _named_place(parts: Sequence[Part], text: str) -> tuple[str, str]:
    """The part and the place of a --from; without the name of a part it is the main one."""
    name, equals, place = text.partition("=")
    if equals and name in {part.name for part in parts}:
        return name, place
    if equals and "/" not in name and not Path(text).exists():
        raise UserError(f"--from {text}: there is no part {name!r}; the parts are {', '.join(p.name for p in parts)}")
    main = _main(parts)
    if main is None:
        choices = " or ".join(f"--from {part.name}={place or text}" for part in parts)
        raise UserError(f"--from {text}: which part is it? write {choices}")
    return main.name, text


def _command(
    source: str,
    places: Sequence[str],
    subset: str | None,
    revision: str | None,
    options: PrepareOptions,
    against: Sequence[str] | None,
) -> str:
    """The command with only the options that decide the content, so that equal data have equal cards wherever they are
    written."""
    words = ["proxima", "data", "prepare", source]
    for place in places:
        words += ["--from", place]
    defaults = {field.name: field.default for field in fields(options)}
    for name, value in ({"subset": subset, "revision": revision} | vars(options)).items():
        if value != defaults.get(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if against is not None:
        words += ["--against", *against]
    return shlex.join(words)


def check_folders(folder: Annotated[Sequence[str], Argument(words="+")], *, as_json: AsJson = False) -> int:
    """Compare folders with the hashes in their cards; exit code 1 if a file differs."""
    from proxima.prepare.dataset_card import verify_folder

    folders = {name: verify_folder(Path(name).expanduser()) for name in folder}
    statuses = chain.from_iterable(files.values() for files in folders.values())
    bad = sum(status != "same" for status in statuses)
    if as_json:
        print_json({"bad": bad, "folders": folders})
    else:
        for name, files in folders.items():
            print("\n".join(f"{status:<8} {Path(name) / file}" for file, status in files.items()))
        if bad:
            of = f"{bad} of {sum(map(len, folders.values()))} files"
            print(f"{of} do not match the card; prepare the folder again with --overwrite")
    return 1 if bad else 0


def inspect_episode(
    recipe: Recipe,
    override: Overrides = (),
    *,
    say: Annotated[Sequence[str], Argument(SAY, "TEXT", words="append")] = (),
    row: Annotated[int, Argument(ROW)] = 0,
    as_json: AsJson = False,
) -> None:
    """Play an episode of a recipe's task in its environment, with scripted turns of the model, and print its tokens:
    which are the prompt, which are sampled and trained, which are not. Loads no weights."""
    from proxima.api.episode_chat import scripted_episode

    paths, notes, failure = scripted_episode(recipe, override, say, row)
    if as_json:
        return print_json({"notes": notes, "failure": failure, "paths": paths})
    if failure:
        notes = [*notes, f"the episode failed: {failure}"]
    _print(paths, notes)
    return None


def _print(paths: Sequence[Sequence[dict[str, Any]]], notes: Sequence[str]) -> None:
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def painted(kind: str, text: str) -> str:
        if colours:
            return f"\x1b[{KINDS[kind][1]}m{text}\x1b[0m"
        return text

    for kind, (letter, _, meaning) in KINDS.items():
        print(painted(kind, f"{letter}  {meaning}"))
    print("bars separate tokens; ⏎ is a newline\n")
    for number, parts in enumerate(paths):
        if len(paths) > 1:
            print(f"path {number} of {len(paths)}: the chat template rewrote what came before")
        for part in parts:
            letter = KINDS[part["kind"]][0]
            count = len(part["tokens"])
            print(painted(part["kind"], f"{letter}  {part['of'] or part['kind']}: {count} tokens"))
            text = "|".join(visible(token).replace("\n", "⏎") for token in part["texts"])
            for line in text.replace("⏎", "⏎\n").rstrip("\n").split("\n"):
                print(painted(part["kind"], f"{letter}    {line}"))
        total = sum(len(part["tokens"]) for part in parts)
        trained = sum(len(part["tokens"]) for part in parts if part["kind"] == "sampled")
        print(f"{trained} of {total} tokens are trained\n")
    for note in notes:
        print(f"WARNING {note}", file=sys.stderr)


COMMAND = {"prepare": prepare_source, "check": check_folders, "inspect": inspect_episode}
