"""What a dataclass says of itself."""

from dataclasses import MISSING

from proxima.config.describe import args_section, fields_of, first_sentence, summary_of
from proxima.task.local_files import Jsonl
from tests.config.fakes import Everything, Sums

DOC = """Head.

    Formula with colon: not an argument.

    Args:
        one: first line
            goes on here: with a colon.
        two, three: both.

        `four`: in backticks.
    Returns: nothing.
        five: not an argument.
    """


def test_args_section():
    assert args_section(DOC) == [
        (("one",), "first line goes on here: with a colon."),
        (("two", "three"), "both."),
        (("four",), "in backticks."),
    ]
    assert args_section("no arguments") == []


def test_fields_with_their_meaning():
    fields = {info.name: info for info in fields_of(Sums)}
    assert fields["low"].help == fields["high"].help == "bounds of the numbers, inclusive."
    assert fields["split"].help == "which half of the questions"
    assert fields["path"].default is None
    assert [info.name for info in fields_of(Jsonl) if info.default is MISSING] == ["path"]
    assert "kind_of_thing" not in {info.name for info in fields_of(Everything)}


class Like(Sums):
    """Another. Args, Returns: as `Sums`."""


def test_arguments_documented_elsewhere():
    assert {info.name: info.help for info in fields_of(Like)}["low"] == "bounds of the numbers, inclusive."


def test_summary():
    assert summary_of(Sums) == "Questions about sums"
    assert first_sentence("a (Dr. GRPO) b. c") == "a (Dr. GRPO) b"
    assert first_sentence("a. b") == "a"
    assert first_sentence("1 if (x. y") == "1 if (x. y"
