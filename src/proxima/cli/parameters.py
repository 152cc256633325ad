"""The arguments of a command, from the signature of its function: each is declared once.

def show(run: Annotated[str, Argument("run folder", "RUN")], *, step: Annotated[int, Argument("one step", "N")] = 1)

has the arguments `RUN [--step N]`. A parameter that may be given by position is a positional argument, a keyword-only
one an option; a `bool` is a switch, a sequence takes several words, a `Literal` one of its values.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Argument:
    """What the command line adds to a parameter.

    Args:
        help: of `--help`.
        metavar: the name of the value there.
        flag: of the option, where it is not the parameter's name.
        words: how many, of a sequence: `+`, `*`, `append` for an option that may be repeated.
        read: makes the value of a word; None: the class of the parameter.
        complete: what a shell offers.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    words: str | None = None
    read: Callable[[str], Any] | None = None
    complete: Callable[..., list[str]] | None = None


def add_parameters(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add an argument for each parameter of the function."""
    for name, parameter in inspect.signature(function).parameters.items():
        hint, argument = get_args(parameter.annotation)
        default = list(parameter.default) if argument.words == "append" else parameter.default
        added: dict[str, Any] = {"help": argument.help, "default": default, **_of_type(hint, argument)}
        if argument.metavar is not None:
            added["metavar"] = argument.metavar
        if parameter.kind is parameter.KEYWORD_ONLY:
            flag = argument.flag or f"--{name.replace('_', '-')}"
            parser.add_argument(flag, dest=name, **added)
            continue
        if parameter.default is parameter.empty:
            added.pop("default")
        elif argument.words is None:
            added["nargs"] = "?"
        action: Any = parser.add_argument(name, **added)
        if argument.complete is not None:
            action.completer = argument.complete


def call(function: Callable[..., Any], arguments: argparse.Namespace) -> Any:
    """The function with the arguments that `add_parameters` added."""
    return function(**{name: getattr(arguments, name) for name in inspect.signature(function).parameters})


def _of_type(hint: Any, argument: Argument) -> dict[str, Any]:
    if get_origin(hint) in (Union, UnionType):
        hint = next(member for member in get_args(hint) if member is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    several = get_origin(hint) is Sequence
    made: dict[str, Any] = {"type": argument.read or (get_args(hint)[0] if several else hint)}
    if argument.words is not None:
        made |= {"action": "append"} if argument.words == "append" else {"nargs": argument.words}
    return made
