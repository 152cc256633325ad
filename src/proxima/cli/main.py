"""`proxima`: runs a command and turns its exceptions into exit codes."""

import argparse
import difflib
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from proxima import __version__
from proxima.cli.command_module import load_command
from proxima.cli.parameters import Actions, add_command, bound, option_strings
from proxima.config.families import FAMILIES
from proxima.data.errors import UserError, suggestion
from proxima.system.recipe_files import FILE

PEERS, PLAN = "proxima-peers", "proxima-plan"  # other distributions: other frameworks' files, forecasts
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
WITH_ACTIONS = ("data", "engine", "peers", "plot", "reward")  # their actions are easily mistaken for commands
WITHIN = {"chat": "generate --chat", "schema": "list schema", **dict.fromkeys(FAMILIES, "train")}  # so are these


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal can't show must not abort a run
    if argv is None and "RANK" not in os.environ and words[:1] == ["train"]:
        gc.disable()  # until a run has loaded its model: traversing a million imported objects takes half a second
    with ExitCode() as end:
        command = _read(words, argparse.Namespace())
        end.code = int(command() or 0)
    return end.code


def train_rank(**arguments: Any) -> int:
    """Entry point of a cluster's ranks: `train_recipe`, with the exit codes and messages of the command line."""
    from proxima.cli.train import train_recipe

    with ExitCode() as end:
        end.code = train_recipe(**arguments)
    return end.code


class ExitCode:
    """Within the block, an exception becomes an exit code, and a message on standard error."""

    code = 0

    def __enter__(self) -> "ExitCode":
        if "SLURM_PROCID" in os.environ:
            from proxima.runtime.placement.process_group import adopt_launcher

            adopt_launcher()
        if "RANK" in os.environ:  # torch logs many lines about a process that has exited
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        if not isinstance(error, Exception | KeyboardInterrupt):
            return False
        from proxima.cli.exit_codes import report_error

        self.code = report_error(error)
        return True


def _near_command(word: str) -> str:
    """Suggest the command or action whose name is most similar to the word; if none is, list all commands."""
    meant = WITHIN | {name: name for name in COMMANDS}
    for name in WITH_ACTIONS:
        with suppress(UserError):  # its distribution is not installed
            command, _ = load_command(name, COMMANDS[name][0])
            if isinstance(command, Actions):
                meant |= {action: f"{name} {action}" for action in command.functions if action not in meant}
    near = difflib.get_close_matches(word, meant, n=1, cutoff=0.7)
    return f"did you mean {meant[near[0]]!r}?" if near else f"commands: {', '.join(COMMANDS)}"


def _read(words: list[str], arguments: argparse.Namespace) -> Callable[[], int | None]:
    """The call of a command that a command line asks for."""
    if any("\0" in word for word in words):
        raise UserError("an argument has a NUL character", remedy="leave it out")
    parser = Parser(
        prog="proxima",
        description="Trust-region reinforcement learning for language models.",
        epilog=_EPILOG,
        formatter_class=_Grouped,
    )
    parser.add_argument("--version", action="version", version=f"proxima {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        raise UserError(f"unknown command {chosen!r}; {_near_command(chosen)}")
    for name, (place, line) in COMMANDS.items():
        below = commands.add_parser(name, help=line, formatter_class=_Formatter)
        if name == chosen:
            command, below.description = load_command(name, place)
            add_command(below, command)
            options = option_strings(below)
    _, rest = parser.parse_known_args(words, arguments)
    if arguments.command is None:
        if rest:
            raise UserError(f"unknown argument {rest[0]!r}; see proxima --help")
        return parser.print_help
    _place_rest(arguments, rest, options)
    return bound(command, arguments)


def _place_rest(arguments: argparse.Namespace, rest: list[str], options: Sequence[str]) -> None:
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
    from proxima.config.describe import fields_of

    return any(path.partition(".")[0] == info.name for family in FAMILIES.values() for info in fields_of(family.root))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 18  # argparse measures the names of commands without their indentation


class _Grouped(_Formatter):
    def _format_action(self, action: argparse.Action) -> str:
        """Format an argument; above the first command of a group, also the group's title."""
        title = next((f"\n  {group}\n" for group, names in GROUPS.items() if action.dest == next(iter(names))), "")
        return title + super()._format_action(action)


_EPILOG = """\
proxima train quickstart    # train; the folder is printed
proxima train quickstart algorithm=grpo train.steps=20
proxima explain quickstart  # before you train
proxima init mine           # recipe, reward and questions of your own
proxima COMMAND --help"""


if __name__ == "__main__":
    sys.exit(main())
