"""The commands; how the module of one is imported, and the words of a command line become its call."""

import argparse
import difflib
import importlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NoReturn

from proxima.cli.parameters import Command, add_command, bound, option_strings
from proxima.cli.prose import WIDTH, laid_out
from proxima.data.errors import UserError, suggestion
from proxima.data.kinds import install_command
from proxima.system.user_files import FILE

GROUP = "proxima.commands"  # entry points: the name of a command → its module, with `COMMAND`
MISTYPED = 0.85  # similarity from which a word is an option; no field of recipes is so near to one


def load_command(name: str, place: str) -> tuple[Command, str]:
    """Load a command and its description for `--help`: `COMMAND` and the docstring of its module.

    Args:
        place: a module of proxima, `proxima.cli.explain`, or the distribution that provides the command,
            `proxima-peers`.

    Raises:
        UserError: the distribution is not installed.
    """
    if not place.startswith("proxima."):
        from importlib.metadata import entry_points

        found = next(iter(entry_points(group=GROUP, name=name)), None)
        if found is None:
            raise UserError(f"proxima {name} needs the package {place}; {install_command(place)}")
        place = found.module
    module = importlib.import_module(place)
    return module.COMMAND, module.__doc__ or ""


# other distributions: other frameworks' files, forecasts, training as a service
PEERS = "proxima-peers"
PLAN = "proxima-plan"
TINKER = "proxima-tinker"
GROUPS: dict[str, dict[str, tuple[str, str]]] = {  # by what one wants
    "try": {
        "init": ("proxima.cli.init", "write a recipe, a reward and questions to start from"),
        "doctor": ("proxima.cli.doctor", "show versions, devices, memory and speed of this machine"),
        "list": ("proxima.cli.list", "list recipes, and every kind of every slot"),
        "explain": ("proxima.cli.explain", "show every value, its origin, and the batch arithmetic"),
        "generate": ("proxima.cli.generate", "complete prompts, or chat, with a model or a run"),
    },
    "train": {
        "train": ("proxima.cli.train", "train a model: RL, SFT, a reward model or DPO"),
        "submit": ("proxima.cli.submit", "send a training to a Ray cluster and follow its output"),
        "sweep": ("proxima.cli.sweep", "train many variants with several seeds; resumable"),
        "serve-training": (TINKER, "train for programs written for the Tinker SDK"),
    },
    "look": {
        "view": ("proxima.cli.view", "look into runs in a browser, token by token"),
        "compare": ("proxima.cli.compare", "compare runs: curves, intervals over seeds, a table"),
        "plot": ("proxima.cli.plot", "plot surrogates, or a run's trust region"),
    },
    "evaluate": {
        "eval": ("proxima.cli.eval", "evaluate a model or a run on held-out questions"),
        "check": ("proxima.cli.check", "check a kind against its laws, or a run's files"),
        "reward": ("proxima.cli.reward", "score texts with rewards, or serve a reward model"),
    },
    "share": {
        "export": ("proxima.cli.export", "export a run's weights as a Hugging Face folder"),
        "data": ("proxima.cli.data", "prepare and inspect data sets"),
        "engine": ("proxima.cli.engine", "install, start, probe and diagnose engines"),
        "peers": (PEERS, "convert other frameworks' options, verify their numbers"),
    },
    "plan": {"plan": (PLAN, "forecast memory and time, here or on other devices")},
}
COMMANDS = dict(chain.from_iterable(group.items() for group in GROUPS.values()))


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises a one-line `UserError` instead of printing the usage and exiting, and accepts no
    abbreviated options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}; {suggestion(str(value), map(str, action.choices))}"
            )


class CommandFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 18  # argparse measures the names of commands without their indentation

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return laid_out(text.strip(), min(width, WIDTH))


def call_of(name: str, words: Sequence[str]) -> Callable[[], int | None]:
    """The call of a command with these words as its arguments; UserError if it does not take them."""
    parser = Parser(prog=f"proxima {name}", formatter_class=CommandFormatter)
    command, parser.description = load_command(name, COMMANDS[name][0])
    add_command(parser, command)
    arguments, rest = parser.parse_known_args(words, argparse.Namespace(command=name))
    if rest:
        place_rest(arguments, rest, option_strings(parser))
    return bound(command, arguments)


def place_rest(arguments: argparse.Namespace, rest: list[str], options: Sequence[str]) -> None:
    """Add the words that argparse left over to `override`; UserError for any other word. argparse takes positionals in
    one run only: `train R.yaml a=1 --quiet b=2` leaves `b=2`, `generate MODEL --samples 2 hi` leaves `hi`.
    `--algorithm=grpo`, as in other tools, means `algorithm=grpo`."""
    for word in rest:
        if isinstance(vars(arguments).get("prompt"), list | tuple) and not word.startswith("-"):
            arguments.prompt = [*arguments.prompt, word]
            continue
        field, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("-") and not (hasattr(arguments, "override") and _names_recipe_field(field, options)):
            near = difflib.get_close_matches(word.partition("=")[0], options, n=1)
            if near:
                hint = f"did you mean {near[0]!r}?"
            else:
                hint = f"see proxima {arguments.command} --help"
            raise UserError(f"unknown argument {word!r}; {hint}")
        if word.startswith(FILE) and hasattr(arguments, "override"):
            arguments.override = [*arguments.override, word]
            continue
        if not equals or not hasattr(arguments, "override"):
            if word.startswith("-"):
                remedy = f"write {field}=VALUE"
            else:
                remedy = f"see proxima {arguments.command} --help"
            raise UserError(f"unknown argument {word!r}; {remedy}")
        arguments.override = [*arguments.override, f"{field}={value}"]


def _names_recipe_field(field: str, options: Sequence[str]) -> bool:
    """True for a field of recipes; False without reading them, which takes a second, for an option that is mistyped."""
    if difflib.get_close_matches(f"--{field}", options, n=1, cutoff=MISTYPED):
        return False
    from proxima.config.families import is_recipe_field

    return is_recipe_field(field)
