"""What several commands share."""

import argparse
import json
import sys
from typing import Any

OVERRIDE_HELP = "a value over the recipe's: train.steps=20, reward.0.weight=2, folder=runs/mine"


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("override", nargs="*", default=[], metavar="key=value", help=OVERRIDE_HELP)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    print()
