"""The commands, and how the words of a command line become the call of one."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from proxima.cli.command_module import load_command
from proxima.cli.parameters import add_command, bound, option_strings
from proxima.data.errors import UserError

# other distributions: other frameworks' files, forecasts, training as a service
PEERS, PLAN, TINKER = "proxima-peers", "proxima-plan", "proxima-tinker"
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
        "reward": ("proxima.cli.reward.reward_command", "score texts with rewards, or serve a reward model"),
    },
    "share": {
        "export": ("proxima.cli.export", "export a run's weights as a Hugging Face folder"),
        "data": ("proxima.cli.data.data_command", "prepare and inspect data sets"),
        "engine": ("proxima.cli.engine.engine_command", "install, start and probe engines that are servers"),
        "peers": (PEERS, "convert other frameworks' options, verify their numbers"),
    },
    "plan": {"plan": (PLAN, "forecast memory and time, here or on other devices")},
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises a one-line `UserError` instead of printing the usage and exiting, and accepts no
    abbreviated options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from proxima.data.errors import suggestion  # a command without mistakes needs none

            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}; {suggestion(str(value), map(str, action.choices))}"
            )


class CommandFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 18  # argparse measures the names of commands without their indentation


def call_of(name: str, words: Sequence[str]) -> Callable[[], int | None]:
    """The call of a command with these words as its arguments; UserError if it does not take them."""
    parser = Parser(prog=f"proxima {name}", formatter_class=CommandFormatter)
    command, parser.description = load_command(name, COMMANDS[name][0])
    add_command(parser, command)
    arguments, rest = parser.parse_known_args(words, argparse.Namespace(command=name))
    if rest:
        from proxima.cli.leftover_words import place_rest

        place_rest(arguments, rest, option_strings(parser))
    return bound(command, arguments)
