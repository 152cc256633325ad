"""How one layer lies over another."""

import pytest

from proxima.config.tree import DEFAULT, Layout, Node, Source, merge, node_of

LOW, HIGH = Source("low"), Source("high")
SLOTS = Layout(
    children={
        "s": Layout("kind"),
        "d": Layout("kind", default="usual"),
        "many": Layout("kind", many=True),
        "p": Layout("preset", children={"s": Layout("kind")}),
    }
)


def merged(low, high, layout=SLOTS):
    return merge(node_of(low, LOW), node_of(high, HIGH), layout).to_python()


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
