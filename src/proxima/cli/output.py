"""Output helpers that several commands share."""

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from proxima.cli.parameters import Argument
from proxima.data.errors import require
from proxima.system.user_files import find_recipe, shipped_recipes

RECIPE = "YAML file, run folder (its config.yaml), or a name of `proxima list recipes`"
OVERRIDE = "a value over the recipe's: train.steps=20, reward.0.weight=2, folder=runs/mine; @FILE: a recipe over it"
IMPORT_CODE = "import the classes and functions outside proxima that it names, which runs their code"


def named_recipe(word: str) -> str:
    """Return the word; print a note on standard error if a file in this folder hides proxima's recipe of that name."""
    file, shipped = find_recipe(word), shipped_recipes().get(word)
    if shipped is not None and file != shipped and not file.samefile(shipped):
        print(f"note: {word} is {file} of this folder, not the recipe that comes with proxima", file=sys.stderr)
    return word


# Parameters of commands, for `cli.parameters`.
Recipe = Annotated[str, Argument(RECIPE, read=named_recipe)]
Overrides = Annotated[Sequence[str], Argument(OVERRIDE, "key=value", words="*")]
ImportCode = Annotated[bool, Argument(IMPORT_CODE)]
FORMAT = "for programs and documents: csv has the numbers unrounded, md is a table for a README; default: text"
Format = Literal["text", "json", "csv", "md"]
TableFormat = Annotated[Literal["text", "json", "csv", "md"], Argument(FORMAT)]
AsJson = Annotated[bool, Argument("print everything for programs", flag="--json")]


def chosen_format(form: Format, as_json: bool) -> Format:
    """The format of a table; `--json` is `--format json`."""
    require(not as_json or form in ("text", "json"), "--format", form, "excludes --json", remedy="give one of them")
    return "json" if as_json else form


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    print()


def truncated(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def terminal_width(stream: Any) -> int | None:
    """Columns of a terminal; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
