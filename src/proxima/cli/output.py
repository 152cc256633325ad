"""What several commands share."""

import argparse
import json
import shutil
import sys
from typing import Any

OVERRIDE_HELP = "a value over the recipe's: train.steps=20, reward.0.weight=2, folder=runs/mine"


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("override", nargs="*", default=[], metavar="key=value", help=OVERRIDE_HELP)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    print()


def truncated(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def terminal_width(stream: Any) -> int | None:
    """Columns of a terminal; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
