"""What a command line without a command gets: the help with all commands, the version, or the command that it meant."""

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from proxima.cli.commands import COMMANDS, GROUPS, CommandFormatter, Parser, call_of, load_command
from proxima.data.errors import UserError
from proxima.version import __version__

WITH_ACTIONS = ("data", "engine", "peers", "plot", "reward")  # their actions are easily mistaken for commands
WITHIN = {"chat": "generate --chat", "schema": "list schema", "sft": "train", "dpo": "train"}  # so are these
EPILOG = """\
proxima train quickstart    # train; the folder is printed
proxima train quickstart algorithm=grpo train.steps=20
proxima explain quickstart  # before you train
proxima init mine           # recipe, reward and questions of your own
proxima COMMAND --help"""


class GroupedCommands(CommandFormatter):
    def _format_action(self, action: argparse.Action) -> str:
        """Format an argument; above the first command of a group, also the group's title."""
        title = next((f"\n  {group}\n" for group, names in GROUPS.items() if action.dest == next(iter(names))), "")
        return title + super()._format_action(action)


def answer(words: Sequence[str]) -> Callable[[], int | None]:
    """The call that a command line asks for whose first word is no command: an option may precede it."""
    parser = Parser(
        prog="proxima",
        description="Trust-region reinforcement learning for language models.",
        epilog=EPILOG,
        formatter_class=GroupedCommands,
    )
    parser.add_argument("--version", action="version", version=f"proxima {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    at = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
    if at < len(words) and words[at] not in COMMANDS:
        raise UserError(f"unknown command {words[at]!r}; {near_command(words[at])}")
    _, unknown = parser.parse_known_args(words[:at])
    if at < len(words):
        return call_of(words[at], [*unknown, *words[at + 1 :]])
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}; see proxima --help")
    return parser.print_help


def near_command(word: str) -> str:
    """Suggest the command or action whose name is most similar to the word; if none is, list all commands."""
    meant = WITHIN | {name: name for name in COMMANDS}
    for name in WITH_ACTIONS:
        with suppress(UserError):  # its distribution is not installed
            command, _ = load_command(name, COMMANDS[name][0])
            if isinstance(command, Mapping):
                meant |= {action: f"{name} {action}" for action in command if action not in meant}
    near = difflib.get_close_matches(word, meant, n=1, cutoff=0.7)
    if near:
        return f"did you mean {meant[near[0]]!r}?"
    return f"commands: {', '.join(COMMANDS)}"
