"""Arguments of a command from the signature of its function."""

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import pytest

from proxima.cli.parameters import Argument, add_command, bound


@dataclass(frozen=True)
class Server:
    url: Annotated[str, Argument("address")]
    _: KW_ONLY
    seconds: Annotated[float, Argument("deadline; %(default)s", group="limits")] = 60.0


@dataclass(frozen=True, kw_only=True)
class Lengths:
    most: Annotated[int, Argument("tokens; %(default)s", group="limits")] = 8


def ask(server: Server, *, lengths: Lengths = Lengths()) -> None:
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
    command = {"ask": ask, "compare": compare}
    add_command(parser, command)
    return parser, command


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["ask", "u"], 0, "u 60.0 8"),
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
    assert text.count("limits:\n") == 1 and "deadline; 60.0" in text and "tokens; 8" in text
