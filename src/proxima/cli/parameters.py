"""Derives the arguments of a command from the signature of its function, so that each is declared once.

def show(run: Annotated[str, Argument("run folder", "RUN")], *, step: Annotated[int, Argument("one step", "N")] = 1)

has the arguments `RUN [--step N]`. A parameter that may be given by position is a positional argument, a keyword-only
one an option; a `bool` is a switch, a sequence takes several words, a `Literal` one of its values. A parameter whose
type is a dataclass expands to the arguments that the fields of that class declare. A command with actions, such as
`proxima data`, is a table of them, each a function: the first paragraph of its docstring is its line in `--help`.
"""

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Argument:
    """Command-line properties of a parameter.

    Args:
        help: the text in `--help`; may contain the default as `%(default)s`.
        metavar: the name of the value in `--help`, or of each of several values.
        flag: the option string, if it is not derived from the parameter's name.
        words: the number of words of a sequence: `+`, `*`, a number, or `append` for an option that may be repeated.
        choices: the allowed values, if a `Literal` can't list them.
        read: converts a word to the value; None: the class of the parameter does.
        group: the title in `--help` under which the option is listed.
        exclusive: at most one of the options with the same name here may be given.
    """

    help: str = ""
    metavar: str | tuple[str, ...] | None = None
    flag: str | None = None
    words: str | int | None = None
    choices: Sequence[str] = ()
    read: Callable[[str], Any] | None = None
    group: str | None = None
    exclusive: str | None = None


Command = Mapping[str, Callable[..., int | None]] | Callable[..., int | None]


def add_command(parser: argparse.ArgumentParser, command: Command) -> None:
    """Add the arguments of a command, or of each of its actions."""
    if not isinstance(command, Mapping):
        return add_parameters(parser, command)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for name, function in command.items():
        line = " ".join(str(inspect.getdoc(function)).partition("\n\n")[0].split()).rstrip(".")
        help = line[0].lower() + line[1:]
        below = actions.add_parser(name, help=help, description=f"{line}.", formatter_class=parser.formatter_class)
        add_parameters(below, function)
    return None


def option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command and of its actions, as they are typed."""
    options = [word for action in parser._actions for word in action.option_strings]
    tables = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return options + [word for table in tables for below in table.values() for word in option_strings(below)]


def bound(command: Command, arguments: argparse.Namespace) -> Callable[[], int | None]:
    """A command with the arguments that `add_command` added; it returns its exit code."""
    function = command[arguments.action] if isinstance(command, Mapping) else command
    return partial(function, **_values(function, arguments))


def add_parameters(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add an argument for each parameter of the function."""
    groups: dict[str, Any] = {}
    for parameter in _parameters(function):
        hint, argument = get_args(parameter.annotation)
        default = list(parameter.default) if argument.words == "append" else parameter.default
        added: dict[str, Any] = {"help": argument.help, "default": default, **_of_type(hint, argument)}
        if argument.metavar is not None:
            added["metavar"] = argument.metavar
        if parameter.kind is parameter.KEYWORD_ONLY:
            flag = argument.flag or f"--{parameter.name.replace('_', '-')}"
            _group(parser, argument, groups).add_argument(flag, dest=parameter.name, **added)
            continue
        if default is parameter.empty:
            added.pop("default")
        elif argument.words is None:
            added["nargs"] = "?"
        parser.add_argument(parameter.name, **added)


def _values(function: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the function's parameters, among the arguments that `add_parameters` added."""
    values = {}
    for name, parameter in inspect.signature(function).parameters.items():
        options = parameter.annotation
        held = is_dataclass(options)
        values[name] = options(**_values(options, arguments)) if held else getattr(arguments, name)
    return values


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function; a dataclass is replaced by the parameters of its fields."""
    for parameter in inspect.signature(function).parameters.values():
        held = is_dataclass(parameter.annotation)
        if held:
            yield from _parameters(parameter.annotation)
        else:
            yield parameter


def _group(parser: argparse.ArgumentParser, argument: Argument, groups: dict[str, Any]) -> Any:
    """The object that the option is added to: the parser, or its group of that name."""
    name = argument.group or argument.exclusive
    if name is None:
        return parser
    if name not in groups:
        groups[name] = parser.add_argument_group(name) if argument.group else parser.add_mutually_exclusive_group()
    return groups[name]


def _of_type(hint: Any, argument: Argument) -> dict[str, Any]:
    if get_origin(hint) in (Union, UnionType):
        hint = next(member for member in get_args(hint) if member is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal and argument.read is None:
        return {"choices": get_args(hint)}
    read = get_args(hint)[0] if get_origin(hint) is Sequence else hint
    made: dict[str, Any] = {"type": argument.read or (partial(_number, read) if read in (int, float) else read)}
    if argument.choices:
        made["choices"] = argument.choices
    if argument.words is not None:
        made |= {"action": "append"} if argument.words == "append" else {"nargs": argument.words}
    return made


def _number(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a {'whole number' if read is int else 'number'}") from None
