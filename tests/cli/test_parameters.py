"""Arguments of a command from the signature of its function."""

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from proxima.cli.command_module import load_command
from proxima.cli.main import COMMANDS
from proxima.cli.parameters import Actions, Argument, add_command, add_parameters, bound


def show(
    run: Annotated[Sequence[str], Argument("run folders", words="+")],
    *,
    out: Annotated[Path | None, Argument("the page", "FILE")] = None,
    only: Annotated[Literal["loss", "weight"] | None, Argument("one of the two")] = None,
    metric: Annotated[Sequence[str], Argument("repeatable", words="append")] = (),
    max_lag: Annotated[Sequence[int], Argument("lags", read=lambda word: [int(n) for n in word.split(",")])] = (0,),
    as_json: Annotated[bool, Argument("for programs", flag="--json")] = False,
):
    return run, out, only, list(metric), list(max_lag), as_json


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_parameters(parser, show)
    return parser


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["a"], (["a"], None, None, [], [0], False)),
        (["a", "b", "--out", "p.html", "--json"], (["a", "b"], Path("p.html"), None, [], [0], True)),
        (["a", "--metric", "x", "--metric", "y", "--max-lag", "1,2"], (["a"], None, None, ["x", "y"], [1, 2], False)),
        (["a", "--only", "loss"], (["a"], None, "loss", [], [0], False)),
    ],
)
def test_words_become_typed_values(parser, words, values):
    assert bound(show, parser.parse_args(words))() == values
    assert bound(show, parser.parse_args(["a"]))() == (["a"], None, None, [], [0], False)  # a default does not grow


def test_what_is_no_value_is_refused(parser):
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'los'"):
        parser.parse_args(["a", "--only", "los"])


def test_help_has_the_names_and_meanings(parser):
    text = parser.format_help()
    assert "[--out FILE]" in text and "the page" in text and "{loss,weight}" in text and "--json" in text


@dataclass(frozen=True)
class Server:
    url: Annotated[str, Argument("address")]
    _: KW_ONLY
    seconds: Annotated[float, Argument("deadline; %(default)s", group="limits")] = 60.0


@dataclass(frozen=True, kw_only=True)
class Lengths:
    most: Annotated[int, Argument("tokens; %(default)s", group="limits")] = 8


LONG = Lengths(most=64)


def ask(server: Server, *, lengths: Lengths = LONG) -> None:
    """Ask a server.

    Not in the help.
    """
    print(server.url, server.seconds, lengths.most)


def compare(
    *,
    pair: Annotated[Sequence[str], Argument("two", ("A", "B"), words=2)] = (),
    peer: Annotated[str | None, Argument("one", flag="--from", choices=("x", "y"))] = None,
    critic: Annotated[bool, Argument("the critic", exclusive="part")] = False,
    adapter: Annotated[bool, Argument("the adapter", exclusive="part")] = False,
) -> int:
    """Compare two results; 3."""
    print(list(pair), peer, critic, adapter)
    return 3


@pytest.fixture
def actions():
    parser = argparse.ArgumentParser(exit_on_error=False)
    command = Actions({"ask": ask, "compare": compare})
    add_command(parser, command)
    return parser, command


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["ask", "u"], 0, "u 60.0 64"),
        (["ask", "u", "--seconds", "2", "--most", "1"], 0, "u 2.0 1"),
        (["compare", "--pair", "a", "b", "--from", "y", "--critic"], 3, "['a', 'b'] y True False"),
    ],
)
def test_an_action_runs_with_the_arguments_of_its_dataclasses(actions, capsys, words, code, line):
    parser, command = actions
    assert (bound(command, parser.parse_args(words))() or 0) == code
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compare", "--critic", "--adapter"], "argument --adapter: not allowed with argument --critic"),
        (["compare", "--from", "z"], "argument --from: invalid choice: 'z'"),
        (["compare", "--pair", "a"], "argument --pair: expected 2 arguments"),
        (["ask"], "the following arguments are required: url"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_what_an_action_refuses(actions, capsys, words, problem):
    with pytest.raises((argparse.ArgumentError, SystemExit)) as refused:
        actions[0].parse_args(words)
    assert problem in f"{refused.value}{capsys.readouterr().err}"


def test_help_of_actions(actions, capsys):
    parser, _ = actions
    text = parser.format_help()
    assert "actions:\n  ACTION" in text and "ask a server\n" in text and "compare two results; 3\n" in text
    with pytest.raises(SystemExit):
        parser.parse_args(["ask", "--help"])
    text = capsys.readouterr().out
    assert "Ask a server.\n" in text and "Not in the help" not in text
    assert text.count("limits:\n") == 1 and "deadline; 60.0" in text and "tokens; 64" in text


def test_every_command_declares_its_arguments_in_a_signature():
    for name, (place, _) in COMMANDS.items():
        command, description = load_command(name, place)
        assert (callable(command) or isinstance(command, Actions)) and description, name
