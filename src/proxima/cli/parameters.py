"""Derives the arguments of a command from the signature of its function, so that each is declared once.

def show(run: Annotated[str, Argument("run folder", "RUN")], *, step: Annotated[int, Argument("one step", "N")] = 1)

has the arguments `RUN [--step N]`. A parameter that may be given by position is a positional argument, a keyword-only
one an option; a `bool` is a switch, a sequence takes several words, a `Literal` one of its values. A parameter whose
type is a dataclass expands to the arguments that the fields of that class declare. A command with actions, such as
`proxima data`, is a table of them, each a function: the first paragraph of its docstring is its line in `--help`.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from proxima.data.errors import require
from proxima.system.user_files import find_recipe, shipped_recipes


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
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                options += option_strings(below)
    return options


def bound(command: Command, arguments: argparse.Namespace) -> Callable[[], int | None]:
    """A command with the arguments that `add_command` added; it returns its exit code."""
    function = command[arguments.action] if isinstance(command, Mapping) else command
    return partial(function, **_values(function, arguments))


def add_parameters(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add an argument for each parameter of the function."""
    groups: dict[str, Any] = {}
    for parameter in _parameters(function):
        hint, argument = get_args(parameter.annotation)
        default = parameter.default
        if argument.words == "append":
            default = list(default)
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
        if isinstance(options, type) and is_dataclass(options):
            values[name] = options(**_values(options, arguments))
        else:
            values[name] = getattr(arguments, name)
    return values


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function; a dataclass is replaced by the parameters of its fields."""
    for parameter in inspect.signature(function).parameters.values():
        options = parameter.annotation
        if isinstance(options, type) and is_dataclass(options):
            yield from _parameters(options)
        else:
            yield parameter


def _group(parser: argparse.ArgumentParser, argument: Argument, groups: dict[str, Any]) -> Any:
    """The object that the option is added to: the parser, or its group of that name."""
    name = argument.group or argument.exclusive
    if name is None:
        return parser
    if name in groups:
        return groups[name]
    if argument.group:
        groups[name] = parser.add_argument_group(name)
    else:
        groups[name] = parser.add_mutually_exclusive_group()
    return groups[name]


def _of_type(hint: Any, argument: Argument) -> dict[str, Any]:
    if get_origin(hint) in (Union, UnionType):
        hint = next(member for member in get_args(hint) if member is not NoneType)
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal and argument.read is None:
        return {"choices": get_args(hint)}
    read = get_args(hint)[0] if get_origin(hint) is Sequence else hint
    if argument.read is not None:
        read = argument.read
    elif read in (int, float):
        read = partial(_number, read)
    made: dict[str, Any] = {"type": read}
    if argument.choices:
        made["choices"] = argument.choices
    if argument.words == "append":
        made["action"] = "append"
    elif argument.words is not None:
        made["nargs"] = argument.words
    return made


def _number(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        expected = "whole number" if read is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} must be a {expected}") from None


RECIPE = "YAML file, run folder (its config.yaml), or a name of `proxima list recipes`"
OVERRIDE = "a value in place of the recipe's: train.steps=20, reward.0.weight=2, folder=runs/mine; @FILE: more, in YAML"
IMPORT_CODE = "import the classes and functions outside proxima that it names, which runs their code"


def named_recipe(word: str) -> str:
    """Return the word; print a note on standard error if a file in this folder hides proxima's recipe of that name."""
    file = find_recipe(word)
    shipped = shipped_recipes().get(word)
    if shipped is not None and file != shipped and not file.samefile(shipped):
        print(f"note: {word} is {file} of this folder, not the recipe that comes with proxima", file=sys.stderr)
    return word


# Parameters that several commands share, or a command and the module of its work.
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
    import json  # `--help` needs it not

    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    print()


def truncated(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: width - 1] + "…"


CHATS = ("messages", "conversations")  # which may end with the completion
PROMPT = ("prompt", "question", *CHATS)  # the first one present
COMPLETION = ("completion", "text", "response")
ANSWER = "what rewards compare with; default: answer, if present"
JSON_COLUMN = "column whose texts are JSON, such as a list of right answers; repeatable"


@dataclass(frozen=True, kw_only=True)
class TextColumns:
    """The columns of a file of texts; None: the first of the default names that the file has."""

    prompt: Annotated[str | None, Argument(f"default: {', else '.join(PROMPT)}", "COLUMN")] = None
    completion: Annotated[str | None, Argument(f"default: {', else '.join(COMPLETION)}", "COLUMN")] = None
    answer: Annotated[str | None, Argument(ANSWER, "COLUMN")] = None
    json_column: Annotated[Sequence[str], Argument(JSON_COLUMN, "COLUMN", words="append")] = ()


TEMPLATE_ARGUMENT = "argument of the chat template: enable_thinking=false; repeatable; overrides the run's own"
TOP_P = "keep the most probable tokens up to this mass"
MIN_P = "keep tokens with at least this share of the largest probability"
MAX_LENGTH = "tokens of prompt and completion together; default: the run's own, or the model's limit"
DTYPE = "of the engine's matrix products and cache; auto: the run's own, or the faster one on this machine (default)"
MAX_TOKENS = "maximum number of new tokens (default: 256, in chat 512; of each turn, with tools, as in the training)"
TOOLS = "functions that the model may call, module:function, with commas between them; default: those of the run"
ENVIRONMENT = "module:Class, a kind such as calculator, or {kind: …}; default: that of the run"
SAMPLING = "sampling"  # titles of options in `--help`
WORLD = "tools and environment"


@dataclass(frozen=True, kw_only=True)
class Inference:
    """The options for answering a person's prompts."""

    checkpoint: Annotated[str, Argument("of a run: last, best, or a step (default: last)")] = "last"
    system: Annotated[str | None, Argument("system prompt; default: the run's own (data.system)")] = None
    template_argument: Annotated[Sequence[str], Argument(TEMPLATE_ARGUMENT, "NAME=VALUE", words="append")] = ()
    seed: Annotated[int, Argument("seed of the samples")] = 0
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], Argument(DTYPE)] = "auto"
    device: Annotated[str, Argument("auto, cpu, cuda, cuda:1")] = "auto"
    max_length: Annotated[int | None, Argument(MAX_LENGTH)] = None
    temperature: Annotated[float, Argument("0 is greedy (default)", group=SAMPLING)] = 0.0
    top_k: Annotated[int, Argument("keep the k most probable tokens; 0: all", group=SAMPLING)] = 0
    top_p: Annotated[float, Argument(TOP_P, group=SAMPLING)] = 1.0
    min_p: Annotated[float, Argument(MIN_P, group=SAMPLING)] = 0.0
    max_tokens: Annotated[int | None, Argument(MAX_TOKENS, group=SAMPLING)] = None
    stop: Annotated[
        Sequence[str], Argument("text that ends a completion; repeatable", "TEXT", words="append", group=SAMPLING)
    ] = ()
    tools: Annotated[str | None, Argument(TOOLS, group=WORLD)] = None
    environment: Annotated[str | None, Argument(ENVIRONMENT, group=WORLD)] = None
