"""Convert another framework's options to a recipe, each value with its origin; options without an equivalent are
listed. Nothing is executed."""

import argparse
import sys
from pathlib import Path

from proxima_peers.convert import PEERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    file = "the framework's config: YAML, JSON, a launch script (.sh), or a Python file that makes a GRPOConfig"
    parser.add_argument("file", help=file)
    names = (*PEERS, "openrlhf")  # the last is refused with the page that helps
    parser.add_argument("--from", dest="peer", choices=names, help="the framework; default: as the file says")
    parser.add_argument("--out", help="the recipe's file; default: standard output")


def run(arguments: argparse.Namespace) -> int:
    from proxima.config.problems import one_problem
    from proxima_peers.convert.conversion import convert, likely_peers

    peer = arguments.peer
    if peer is None:
        likely = likely_peers(arguments.file)
        if len(likely) != 1:
            options = f"of {' and of '.join(likely)}" if likely else f"of none of {', '.join(PEERS)}"
            raise one_problem(arguments.file, f"has the options {options}; name the framework with --from")
        peer = likely[0]
        print(f"read as a configuration of {peer}; --from names another framework", file=sys.stderr)
    done = convert(arguments.file, peer)
    if arguments.out is None:
        sys.stdout.write(done.text)
    else:
        out = Path(arguments.out)
        if out.exists() and out.samefile(arguments.file):
            raise one_problem("--out", "is the input file; give another path", arguments.out, "command line")
        if not out.parent.is_dir():
            remedy = "its folder does not exist; make it, or give another path"
            raise one_problem("--out", remedy, arguments.out, "command line")
        out.write_text(done.text, encoding="utf-8")
        print(f"wrote {out}")
    for line in (*done.report, *(f"as it stands: {problem}" for problem in done.problems)):
        print(line, file=sys.stderr)
    return 0
