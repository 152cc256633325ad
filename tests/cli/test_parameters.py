"""Arguments of a command from the signature of its function."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest

from proxima.cli.command_module import command_module
from proxima.cli.main import COMMANDS
from proxima.cli.parameters import Argument, add_parameters, call


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
    assert call(show, parser.parse_args(words)) == values
    assert call(show, parser.parse_args(["a"])) == (["a"], None, None, [], [0], False)  # a default does not grow


def test_what_is_no_value_is_refused(parser):
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'los'"):
        parser.parse_args(["a", "--only", "los"])


def test_help_has_the_names_and_meanings(parser):
    text = parser.format_help()
    assert "[--out FILE]" in text and "the page" in text and "{loss,weight}" in text and "--json" in text


def test_every_command_has_a_function_or_its_arguments():
    for name, (place, _) in COMMANDS.items():
        command = command_module(name, place)
        assert callable(getattr(command, "COMMAND", None)) or callable(command.add_arguments), name
