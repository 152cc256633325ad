"""Make data sets to train on and to evaluate on: prepare, show, check, list.

proxima data prepare gsm8k     # from the hub or its cache into data/gsm8k
proxima data prepare dapo-math --from dapo.parquet --against data/aime24 data/math500
proxima data show data/gsm8k   # the card and a few rows
proxima data check data/gsm8k  # do the files match the card?"""

import argparse
from pathlib import Path

ACTIONS = {
    "prepare": "make a data set without repeats or evaluation questions, with a card",
    "show": "print the card of a prepared folder and a few of its rows",
    "check": "compare folders with the hashes in their cards; 1 if a file differs",
    "list": "show what can be prepared, where it is published, and what is in data/",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    for name, line in ACTIONS.items():
        text = f"{line.capitalize()}."
        below = actions.add_parser(name, help=line, description=text, formatter_class=parser.formatter_class)
        if name == "prepare":
            _add_prepare_arguments(below)
            continue
        if name != "list":
            below.add_argument("folder", nargs="+" if name == "check" else None)
        if name == "show":
            below.add_argument("--rows", type=int, default=3, help="rows to print of each side; 3")
        below.add_argument("--json", action="store_true", help="print everything for programs")


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    from proxima.prepare import PrepareOptions

    add, defaults = parser.add_argument, PrepareOptions()
    add("source", help="dapo-math, gsm8k, aime (both years), amc23, math (with math500), or a part: aime24, math500 …")
    from_help = "file, folder, pattern ('data/*.parquet') or hub name, once for each part (aime24=…); default: the hub"
    add("--from", dest="given", action="append", default=[], metavar="[PART=]PLACE", help=from_help)
    add("--subset", metavar="NAME", help="folder inside, or configuration on the hub (DAPO-Math-17k-Processed: en, cn)")
    add("--revision", metavar="COMMIT", help="commit, tag or branch on the hub; default: the cached, else the newest")
    out = "folder to write; data/<name>. math500 goes beside it, the years of aime into it"
    add("--out", metavar="FOLDER", type=Path, help=out)
    against = "evaluation sets to keep out of the training questions; default: those beside the output; empty: none"
    add("--against", nargs="*", metavar="FOLDER", help=against)
    template = "prompt template: plain, dapo, boxed, gsm8k, think_answer, a text with {question}, or @FILE"
    add("--template", metavar="TEXT", help=template)
    add("--system", metavar="TEXT", help="system prompt; '' for none")
    held_out = "share of the questions to split off by hash where the source has no test side; 0.02"
    add("--held-out", type=float, metavar="SHARE", help=held_out)
    words = "consecutive words that no training and evaluation question may share; 0: compare whole texts only; 13"
    add("--words", type=int, default=defaults.words, metavar="N", help=words)
    common = "ignore consecutive words that occur in more training questions than this; 10"
    add("--common", type=int, default=defaults.common, metavar="N", help=common)
    conflicts = "a question with several answers: drop it, keep the first, or the majority; drop"
    add("--conflicts", default=defaults.conflicts, metavar="RULE", help=conflicts)
    unreadable = "refuse if more of the questions have no readable answer; 0.01"
    add("--max-unreadable", type=float, default=defaults.max_unreadable, metavar="SHARE", help=unreadable)
    add("--overwrite", action="store_true", help="replace a prepared folder")
    add("--dry-run", action="store_true", help="count everything, write nothing")
    add("--json", action="store_true", help="print the cards for programs")
    add("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    from proxima.cli.data.inspect_actions import check_folders, list_sources, show_folder
    from proxima.cli.data.prepare_action import OPTIONS, prepare_source
    from proxima.prepare import PrepareOptions

    if arguments.action == "show":
        return show_folder(arguments.folder, rows=arguments.rows, as_json=arguments.json)
    if arguments.action == "check":
        return check_folders(arguments.folder, as_json=arguments.json)
    if arguments.action == "list":
        return list_sources(as_json=arguments.json)
    return prepare_source(
        arguments.source,
        places=arguments.given,
        subset=arguments.subset,
        revision=arguments.revision,
        out=arguments.out,
        against=arguments.against,
        options=PrepareOptions(**{name: getattr(arguments, name) for name in OPTIONS}),
        overwrite=arguments.overwrite,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
        quiet=arguments.quiet,
    )
