"""`proxima peers convert`: another framework's options as a recipe."""

import sys
from pathlib import Path
from typing import Annotated

from proxima.cli.parameters import Argument
from proxima_peers.convert import PEERS
from proxima_peers.convert.not_read import NOT_READ

FILE = "the framework's config: YAML, JSON, a launch script (.sh), or a Python file that makes a GRPOConfig"
NAMES = (*PEERS, *NOT_READ)  # the latter are refused with the page that helps


def convert_file(
    file: Annotated[str, Argument(FILE)],
    *,
    peer: Annotated[
        str | None, Argument("the framework; default: as the file says", flag="--from", choices=NAMES)
    ] = None,
    out: Annotated[str | None, Argument("the recipe's file; default: standard output")] = None,
) -> None:
    """Convert another framework's options to a recipe, each value with its origin, and list the options without an
    equivalent. Nothing is executed."""
    # here, so that --help needs no torch
    from proxima.config.problems import one_problem
    from proxima_peers.convert.conversion import convert, likely_peers

    if peer is None:
        likely = likely_peers(file)
        if len(likely) != 1:
            if likely:
                options = f"of {' and of '.join(likely)}"
            else:
                options = f"of none of {', '.join(PEERS)}"
            raise one_problem(file, f"has the options {options}; name the framework with --from")
        peer = likely[0]
        print(f"read as a configuration of {peer}; --from names another framework", file=sys.stderr)
    conversion = convert(file, peer)
    if out is None:
        sys.stdout.write(conversion.text)
    else:
        target = Path(out)
        if target.exists() and target.samefile(file):
            raise one_problem("--out", "is the input file; give another path", out, "command line")
        if not target.parent.is_dir():
            remedy = "its folder does not exist; make it, or give another path"
            raise one_problem("--out", remedy, out, "command line")
        target.write_text(conversion.text, encoding="utf-8")
        print(f"wrote {target}")
    for line in (*conversion.report, *(f"remaining problem: {problem}" for problem in conversion.problems)):
        print(line, file=sys.stderr)
