"""What several commands share."""

import argparse
import json
import shutil
import sys
from typing import Any

from proxima.cli.completion import complete_override, complete_recipe
from proxima.data.recipe_files import find_recipe, shipped_recipes


def add_recipe(parser: argparse.ArgumentParser, meaning: str = "", metavar: str | None = None) -> None:
    """The positional `recipe`: a file, a run folder, or a name of `proxima list recipes`, which shells complete."""
    meaning = meaning or "YAML file, run folder (its config.yaml), or a name of `proxima list recipes`"
    add: Any = parser.add_argument("recipe", type=named_recipe, metavar=metavar, help=meaning)
    add.completer = complete_recipe


def named_recipe(word: str) -> str:
    """The word; says on standard error which of two recipes is meant where a file here hides one of proxima's."""
    path, shipped = find_recipe(word), shipped_recipes().get(word)
    if shipped is not None and path != shipped and not path.samefile(shipped):
        print(f"note: {word} is {path} of this folder, not the recipe that comes with proxima", file=sys.stderr)
    return word


def add_overrides(parser: argparse.ArgumentParser) -> None:
    example = "a value over the recipe's: train.steps=20, reward.0.weight=2, folder=runs/mine"
    add: Any = parser.add_argument("override", nargs="*", default=[], metavar="key=value", help=example)
    add.completer = complete_override


def add_import_code(parser: argparse.ArgumentParser, meaning: str = "") -> None:
    """`--import-code`, of a command that reads a recipe, a run or records and runs nothing that they name."""
    meaning = meaning or "import the classes and functions outside proxima that it names, which runs their code"
    parser.add_argument("--import-code", action="store_true", help=meaning)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    print()


def truncated(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def terminal_width(stream: Any) -> int | None:
    """Columns of a terminal; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
