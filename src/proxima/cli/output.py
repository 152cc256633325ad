"""What several commands share."""

import argparse
import json
import shutil
import sys
from typing import Any


def add_overrides(parser: argparse.ArgumentParser) -> None:
    example = "a value over the recipe's: train.steps=20, reward.0.weight=2, folder=runs/mine"
    parser.add_argument("override", nargs="*", default=[], metavar="key=value", help=example)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    print()


def truncated(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def terminal_width(stream: Any) -> int | None:
    """Columns of a terminal; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
