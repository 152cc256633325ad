"""The words of a command line that argparse leaves over."""

import argparse
import difflib
from collections.abc import Sequence

from proxima.config.describe import fields_of
from proxima.config.families import FAMILIES
from proxima.data.errors import UserError
from proxima.system.user_files import FILE


def place_rest(arguments: argparse.Namespace, rest: list[str], options: Sequence[str]) -> None:
    """Add the words that argparse left over to `override`; UserError for any other word. argparse takes positionals in
    one run only: `train R.yaml a=1 --quiet b=2` leaves `b=2`, `generate MODEL --samples 2 hi` leaves `hi`.
    `--algorithm=grpo`, as in other tools, means `algorithm=grpo`."""
    for word in rest:
        if isinstance(getattr(arguments, "prompt", None), list | tuple) and not word.startswith("-"):
            arguments.prompt = [*arguments.prompt, word]
            continue
        field, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("-") and not (hasattr(arguments, "override") and _is_recipe_field(field)):
            near = difflib.get_close_matches(word.partition("=")[0], options, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"see proxima {arguments.command} --help"
            raise UserError(f"unknown argument {word!r}; {hint}")
        if word.startswith(FILE) and hasattr(arguments, "override"):
            arguments.override = [*arguments.override, word]
            continue
        if not equals or not hasattr(arguments, "override"):
            remedy = f"write {field}=VALUE" if word.startswith("-") else f"see proxima {arguments.command} --help"
            raise UserError(f"unknown argument {word!r}; {remedy}")
        arguments.override = [*arguments.override, f"{field}={value}"]


def _is_recipe_field(path: str) -> bool:
    return any(path.partition(".")[0] == info.name for family in FAMILIES.values() for info in fields_of(family.root))
