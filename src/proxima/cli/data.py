"""Make data sets to train on and to evaluate on: prepare, show, check, list.

proxima data prepare gsm8k                               from the hub or its cache into data/gsm8k
proxima data prepare dapo-math --from dapo.parquet --against data/aime24 data/math500
proxima data show data/gsm8k                             the card and a few rows
proxima data check data/gsm8k                            are the files what the card says?"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.cli.common import print_json
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.prepare import EvalSet, Part, PreparedFolder, PrepareOptions

DATA = Path("data")
_PER_CARD = ("out", "overwrite", "dry_run", "json", "quiet")  # change nothing of what is made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")

    def action(name: str, line: str) -> argparse.ArgumentParser:
        return actions.add_parser(
            name, help=line, description=line[0].upper() + line[1:] + ".", formatter_class=parser.formatter_class
        )

    _prepare_arguments(
        action(
            "prepare", "make a data set: each question once, none of an evaluation's, with a card of counts and hashes"
        )
    )
    show = action("show", "print the card of a prepared folder and a few of its rows")
    show.add_argument("folder")
    show.add_argument("--rows", type=int, default=3, help="rows to print of each side; 3")
    show.add_argument("--json", action="store_true", help="print the card for programs")
    check = action(
        "check", "compare the files of prepared folders with the hashes of their cards; exit code 1 if one differs"
    )
    check.add_argument("folder", nargs="+")
    check.add_argument("--json", action="store_true", help="print every verdict for programs")
    known = action("list", "show what can be prepared, where it is published, and what lies in data/")
    known.add_argument("--json", action="store_true", help="print everything for programs")


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        help="dapo-math, gsm8k, aime (both years), amc23, math (with math500), or one part: aime24, aime25, math500",
    )
    add(
        "--from",
        dest="given",
        action="append",
        default=[],
        metavar="[PART=]PLACE",
        help="file, folder, pattern ('data/*.parquet') or hub name; once for each part (aime24=…, math500=…); "
        "none: the hub or its cache",
    )
    add(
        "--subset",
        metavar="NAME",
        help="folder inside, or configuration on the hub (open-r1/DAPO-Math-17k-Processed has en and cn)",
    )
    add(
        "--revision",
        metavar="COMMIT",
        help="commit, tag or branch on the hub; none: what is in the cache, else the newest",
    )
    add(
        "--out",
        metavar="FOLDER",
        help="folder to make; data/<name>. math500 goes beside it, the two parts of aime into it",
    )
    add(
        "--against",
        nargs="*",
        metavar="FOLDER",
        help="evaluation sets whose questions must not be trained on; not given: those beside the output; given "
        "empty: none",
    )
    add(
        "--template",
        metavar="TEXT",
        help="how the question is asked: plain, dapo, boxed, gsm8k, think_answer, a text with {question}, or @FILE",
    )
    add("--system", metavar="TEXT", help="system prompt; '' for none")
    add(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="share of the questions for testing where the source has no test side, by a hash; 0.02",
    )
    add(
        "--words",
        type=int,
        default=13,
        metavar="N",
        help="words in a row that no training question may share with an evaluation question; 0: compare whole "
        "texts only; 13",
    )
    add(
        "--common",
        type=int,
        default=10,
        metavar="N",
        help="a run in more training questions than this is a phrase and counts nothing; 10",
    )
    add(
        "--conflicts",
        default="drop",
        metavar="RULE",
        help="a question with several answers: drop it, keep the first, or the majority; drop",
    )
    add(
        "--max-unreadable",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="refuse if more of the questions have no readable answer; 0.01",
    )
    add("--overwrite", action="store_true", help="make a prepared folder anew")
    add("--dry-run", action="store_true", help="count everything, write nothing")
    add("--json", action="store_true", help="print the cards for programs")
    add("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    actions = {"prepare": _prepare, "show": _show, "check": _check, "list": _list}
    return actions[arguments.action](arguments)


@dataclass(frozen=True)
class _Wanted:
    """A part to make."""

    part: "Part"
    place: str | None
    folder: Path
    must: bool  # asked for by name, or the source is nothing without it


def _prepare(arguments: argparse.Namespace) -> int:
    from proxima.prepare import PrepareOptions, load_eval_set, locate_files, prepare, sibling_eval_sets
    from proxima.prepare.atomic_folder import refuse_existing

    parts = _parts(arguments.source)
    options = PrepareOptions(
        template=arguments.template,
        system=arguments.system,
        held_out=arguments.held_out,
        words=arguments.words,
        common=arguments.common,
        conflicts=arguments.conflicts,
        max_unreadable=arguments.max_unreadable,
    )
    _check_template(parts, options)
    wanted = _wanted(parts, arguments)
    command = _command(arguments)
    for one in wanted if not arguments.dry_run else ():
        if one.must:
            refuse_existing(one.folder, overwrite=arguments.overwrite)
    made: list[PreparedFolder] = []
    missing: list[str] = []
    for one in wanted:
        if not one.must and not arguments.overwrite and _is_prepared(one.folder):
            print(
                f"{one.part.name}: {one.folder} is there and stays as it is; --overwrite makes it anew", file=sys.stderr
            )
            continue
        try:
            origin = locate_files(one.part, one.place, subset=arguments.subset, revision=arguments.revision)
        except ValueError as problem:
            if one.must:
                raise
            missing.append(str(problem))
            continue
        named = sibling_eval_sets(one.folder) if arguments.against is None else arguments.against
        own = {done.test.name: done.test for done in made if done.test}
        known: list[EvalSet] = []
        if one.part.side == "train":
            known = [
                load_eval_set(name) for name in named if arguments.against is not None or Path(name).name not in own
            ]
            known += [found for name, found in own.items() if name not in {other.name for other in known}]
        try:
            with _Progress(arguments.quiet) as progress:
                done = prepare(
                    one.part,
                    origin,
                    one.folder,
                    options,
                    eval_sets=known,
                    command=command,
                    overwrite=arguments.overwrite,
                    dry_run=arguments.dry_run,
                    progress=progress.at,
                )
        except OSError as problem:  # a full disk, a folder that may not be written
            place = problem.filename or one.folder
            raise UserError(
                f"{place}: {problem.strerror or problem}; nothing was written, make room or give another --out"
            ) from None
        made.append(done)
        if not arguments.json:
            print("\n".join(_account(made[-1], arguments.dry_run)), flush=True)
    for line in missing:
        print(f"not made: {line}", file=sys.stderr)
    if arguments.json:
        print_json([done.card for done in made])
    if not made and missing:
        raise UserError(f"nothing was made of {arguments.source}, see above")
    return 0


def _parts(name: str) -> tuple["Part", ...]:
    """The parts of a source, or the one part of that name."""
    from proxima.config.errors import one_problem, suggestion
    from proxima.prepare import SOURCES

    if name in SOURCES:
        return SOURCES[name]
    alone = {part.name: (replace(part, optional=False),) for parts in SOURCES.values() for part in parts}
    if name not in alone:
        raise one_problem("source", suggestion(name, {*SOURCES, *alone}), name, "command line")
    return alone[name]


def _check_template(parts: Sequence["Part"], options: "PrepareOptions") -> None:
    """Before anything is read."""
    from proxima.prepare import resolve_template

    for part in parts:
        resolve_template(options.template if options.template is not None else part.template, options.system)


def _wanted(parts: Sequence["Part"], arguments: argparse.Namespace) -> list[_Wanted]:
    """The parts to make, evaluation sets first: training questions are compared with them."""
    places = dict(_named_places(parts, arguments.given))
    main = next((part for part in parts if not part.optional), None)
    out = None if arguments.out is None else Path(arguments.out).expanduser()
    found = []
    for part in parts:
        if places and part.name not in places and main is None:
            continue  # one year of the AIME was named, the other was not asked for
        if out is None:
            folder = DATA / part.name
        elif main is None:
            folder = out / part.name
        else:
            folder = out if part is main else out.parent / part.name
        found.append(_Wanted(part, places.get(part.name), folder, part.name in places or not part.optional))
    return found


def _named_places(parts: Sequence["Part"], given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(part, place) of each --from: by its name before the `=`, or what the place is called."""
    names = {part.name for part in parts}
    for text in given:
        name, equals, place = text.partition("=")
        if equals and name in names:
            yield name, place
            continue
        if equals and not Path(text).exists() and "/" not in name:
            raise UserError(f"--from {text}: no part {name!r}; it has {', '.join(sorted(names))}")
        if len(parts) == 1:
            yield parts[0].name, text
            continue
        main = next((part for part in parts if not part.optional), None)
        last = Path(text).name.lower()
        meant = [part for part in parts if any(hint in last for hint in part.hints)] or ([main] if main else [])
        if len(meant) != 1:
            raise UserError(
                f"--from {text}: which part is it? write {' or '.join(f'--from {part.name}={text}' for part in parts)}"
            )
        yield meant[0].name, text


def _command(arguments: argparse.Namespace) -> str:
    """What decides the content, in one form: the same data has the same card wherever it is written."""
    words = ["proxima", "data", "prepare", arguments.source]
    for place in arguments.given:
        words += ["--from", place]
    for name in (
        "subset",
        "revision",
        "template",
        "system",
        "held_out",
        "words",
        "common",
        "conflicts",
        "max_unreadable",
    ):
        value, usual = getattr(arguments, name), _USUAL.get(name)
        if value != usual:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if arguments.against is not None:
        words += ["--against", *arguments.against]
    return shlex.join(words)


_USUAL = {"words": 13, "common": 10, "conflicts": "drop", "max_unreadable": 0.01}


def _is_prepared(folder: Path) -> bool:
    return (folder / "card.json").is_file()


class _Progress:
    """A line that moves on a terminal, a line every ten seconds elsewhere; nothing for what is done at once."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._live = quiet, sys.stderr.isatty()
        self._stage, self._began, self._shown, self._width = "", 0.0, 0.0, 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def at(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._shown = stage, now, now
        if self._quiet or now - self._shown < (0.5 if self._live else 10.0):
            return
        self._shown = now
        rate = done / (now - self._began)
        line = f"{stage}  {done:,}" + (f" of {total:,}" if total else "") + f"  {rate:,.0f}/s"
        if total and total > done:
            line += f"  eta {_duration((total - done) / max(rate, 1e-9))}"
        self._clear()
        if self._live:
            self._width = len(line)
            print(line, end="\r", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._width:
            print(" " * self._width, end="\r", file=sys.stderr, flush=True)
            self._width = 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _account(done: "PreparedFolder", dry_run: bool) -> Iterator[str]:
    """What became of every row, a line a step."""
    from proxima.prepare.dataset_card import recipe_snippet, repetition_line

    card = done.card
    source = card["source"]
    yield f"{card['name']}  from {source['name']}" + (f" at {source['revision'][:12]}" if source["revision"] else "")
    for side, counts in card["counts"].items():
        yield f"  {side:<5} {counts['rows']:>11,} rows"
        repeats = f"of an earlier question; questions × rows: {repetition_line(card['repetition'][side])}"
        for key, words, more in (
            ("unreadable_rows", "unreadable", f"{counts['unreadable']:,} distinct; unreadable.jsonl"),
            ("repeats", "repeats", repeats),
            ("questions", "questions", ""),
            ("conflicts", "conflicts", f"several answers; {counts['conflicts_dropped']:,} left out; conflicts.jsonl"),
            ("contaminated", "contaminated", f"{_met(card)}; contaminated.jsonl"),
        ):
            if counts[key]:
                yield f"        {counts[key]:>11,} {words:<13}{more}".rstrip()
    compared = [one["set"] for one in card["overlap"]["against"]]
    if "train" in card["counts"]:
        alone = not any(one["sha256"] for one in card["overlap"]["against"]) and card["split"]["held_out"] is not None
        remedy = "; prepare some first, or name them with --against" if alone else ""
        yield (
            "  compared with "
            f"{', '.join(compared) or 'no evaluation set'}{' alone' if alone and compared else ''}{remedy}"
        )
    for name, facts in card["outputs"].items():
        if name.endswith(".parquet"):
            held_out = card["split"]["held_out"]
            how = f"  held out: {held_out:.3g} by hash" if held_out and name == "test.parquet" else ""
            yield f"  {'would write' if dry_run else 'wrote'} {done.folder / name}  {facts['rows']:,} rows{how}"
    yield from (f"  note: {note}" for note in done.notes)
    if not dry_run:
        yield "  in a recipe: " + recipe_snippet(card, str(done.folder)).replace("\n", "\n               ")


def _met(card: dict[str, Any]) -> str:
    return ", ".join(f"{one['set']} {one['left_out']:,}" for one in card["overlap"]["against"] if one["left_out"])


def _show(arguments: argparse.Namespace) -> int:
    from pyarrow import parquet

    from proxima.prepare import read_card
    from proxima.prepare.dataset_card import card_markdown

    folder = Path(arguments.folder).expanduser()
    card = read_card(folder)
    if arguments.json:
        print_json(card)
        return 0
    print(card_markdown(card, arguments.folder).rstrip())
    for name in card["outputs"]:
        if not name.endswith(".parquet") or arguments.rows < 1:
            continue
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; see proxima data check {arguments.folder}")
        print(f"\n## First rows of {name}")
        for row in next(parquet.ParquetFile(folder / name).iter_batches(batch_size=arguments.rows)).to_pylist():
            facts = ", ".join(f"{key} {row[key]}" for key in ("subject", "level", "source_id") if row[key] is not None)
            print(f"\n{row['row']}{': ' + facts if facts else ''}, ×{row['repeats']}")
            for message in row["messages"]:
                print(f"  {message['role']}: " + message["content"].replace("\n", "\n    "))
            print(f"  answer: {row['answer']}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from proxima.prepare import verify_folder

    found = {name: verify_folder(Path(name).expanduser()) for name in arguments.folder}
    bad = sum(one.status != "same" for files in found.values() for one in files)
    if arguments.json:
        print_json(
            {"bad": bad, "folders": {name: {one.file: one.status for one in files} for name, files in found.items()}}
        )
    else:
        for name, files in found.items():
            print("\n".join(f"{one.status:<8} {Path(name) / one.file}" for one in files))
        if bad:
            print(
                f"{bad} of {sum(map(len, found.values()))} files are not what the card says; make the folder anew "
                "with --overwrite"
            )
    return 1 if bad else 0


def _list(arguments: argparse.Namespace) -> int:
    from proxima.prepare import SOURCES

    rows: list[dict[str, Any]] = [
        {
            "source": source,
            "name": part.name,
            "title": part.title,
            "hubs": [hub.name for hub in part.hubs],
            "license": part.license,
            "template": part.template,
            "folder": str(DATA / part.name),
            "prepared": _is_prepared(DATA / part.name),
        }
        for source, parts in SOURCES.items()
        for part in parts
    ]
    if arguments.json:
        print_json(rows)
        return 0
    for row in rows:
        state = "prepared" if row["prepared"] else f"make it: proxima data prepare {row['source']}"
        print(f"{row['folder']:<16} {row['title']}\n{'':<16} {', '.join(row['hubs'])}\n{'':<16} {state}")
    return 0
