"""How one layer lies over another."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest

from proxima.config.describe import root_field
from proxima.config.tree import DEFAULT, Node, Source, merge, node_of
from proxima.data.kinds import Slot

LOW, HIGH = Source("low"), Source("high")


@dataclass(frozen=True)
class Section:
    s: Annotated[Any, Slot("")]
    PRESETS: ClassVar[str] = "module:TABLE"


@dataclass(frozen=True)
class Config:
    s: Annotated[Any, Slot("")]
    d: Annotated[Any, Slot("", default="usual")]
    many: Annotated[Any, Slot("", many=True)]
    p: Annotated[Section, "a section with presets"]


def merged(low, high):
    return merge(node_of(low, LOW), node_of(high, HIGH), root_field(Config)).to_python()


@pytest.mark.parametrize(
    ("low", "high", "result"),
    [
        ({"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 3}}, {"a": 1, "b": {"x": 1, "y": 3}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": [1, 2]}, {"a": {"1": 5}}, {"a": [1, 5]}),
        ({"a": [1, 2]}, {"a": {"2": 5}}, {"a": [1, 2, 5]}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({"s": "one"}, {"s": {"x": 1}}, {"s": {"kind": "one", "x": 1}}),
        ({"s": {"kind": "one", "x": 1}}, {"s": {"x": 2}}, {"s": {"kind": "one", "x": 2}}),
        ({"s": {"kind": "one", "x": 1}}, {"s": "two"}, {"s": {"kind": "two"}}),
        ({"s": {"kind": "one", "x": 1}}, {"s": {"kind": "two", "y": 1}}, {"s": {"kind": "two", "y": 1}}),
        ({"s": {"kind": "one", "x": 1}}, {"s": {"kind": "one", "y": 1}}, {"s": {"kind": "one", "x": 1, "y": 1}}),
        ({"many": "one"}, {"many": {"0": {"w": 2}}}, {"many": [{"kind": "one", "w": 2}]}),
        ({"many": [{"kind": "one", "w": 2}]}, {"many": {"0": {"kind": "two"}}}, {"many": [{"kind": "two"}]}),
        ({"s": {"x": 1}}, {"s": "two"}, {"s": {"x": 1, "kind": "two"}}),  # nobody named a kind before
        ({"d": {"x": 1}}, {"d": "usual"}, {"d": {"x": 1, "kind": "usual"}}),
        ({"d": {"x": 1}}, {"d": "other"}, {"d": {"kind": "other"}}),
        ({"s": {"kind": "one"}}, {"s": "none"}, {"s": None}),
        ({"p": "grpo"}, {"p": {"s": {"x": 1}}}, {"p": {"preset": "grpo", "s": {"x": 1}}}),
        ({"p": {"preset": "grpo", "s": {"x": 1}}}, {"p": "cppo"}, {"p": {"preset": "cppo"}}),
        (
            {"x": {"kind": "one", "y": 1}},
            {"x": {"kind": "two"}},
            {"x": {"kind": "two", "y": 1}},
        ),  # no slot: kind is a field like any
    ],
)
def test_merge(low, high, result):
    assert merged(low, high) == result


def test_shown_is_short_and_on_one_line():
    assert node_of("a\n  b", LOW).shown() == "a b"
    assert node_of({"a": [1, "x"]}, LOW).shown() == "{a: [1, x]}"
    assert Node(1e-5, DEFAULT, "1e-5").shown() == "1e-5"
    assert len(node_of(list(range(100)), LOW).shown()) == 60
