"""Written values become values of the annotated type, or the line that says what would do."""

import pytest

from proxima.config.resolution import resolve
from tests.refusals import refused

EVERYTHING = "tests.config.fakes:Everything"


def spec(recipe, *overrides):
    return resolve(recipe(), [f"task.kind={EVERYTHING}", *overrides]).config.task


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("flag=true", True),
        ("count=1e3", 1000),
        ("count=7.0", 7),
        ("ratio=2", 2.0),
        ("ratio=.inf", float("inf")),
        ("name=12", "12"),
        ("name=true", "true"),
        ("name=1e-5", "1e-5"),
        ("name=Reply with: only", "Reply with: only"),
        ("name=[x", "[x"),
        ("choice=3", 3),
        ("choice=null", None),
        ("pair=[2, 3]", (2, "3")),
        ("many=[1, 2e-1]", (1.0, 0.2)),
        ("table={a: 1, b: 2}", {"a": 1, "b": 2}),
        ("table.a=1", {"a": 1}),
        ("either=2", 2.0),
        ("either=word", "word"),
        ("anything={a: [1, 1e-5]}", {"a": [1, 1e-5]}),
    ],
)
def test_accepted(recipe, text, value):
    name = text.partition("=")[0].partition(".")[0]
    values = getattr(spec(recipe, f"task.{text}"), name)
    assert values == value
    assert type(values) is type(value)


def test_a_text_in_a_file_that_looks_like_a_number_wants_quotes(recipe):
    (said,) = refused(resolve, recipe(f"model: {{path: 12}}\ntask: {EVERYTHING}\nreward: number\nalgorithm: cppo\n"))
    assert said == 'model.path=12 (run.yaml:1): must be a text; put it in quotes: "12"'


@pytest.mark.parametrize("number", [str(2**63), "1e19", "-1e300", "9" * 308, "9" * 5000, "0x" + "f" * 4000])
def test_a_whole_number_has_at_most_64_bits(recipe, number):
    (said,) = refused(spec, recipe, f"task.count={number}")
    assert said.startswith("task.count=") and len(said) < 500
    assert said.endswith((": must be a whole number of at most 64 bits", ": must be a whole number"))
    assert spec(recipe, f"task.count={2**63 - 1}").count == 2**63 - 1


@pytest.mark.parametrize("index", ["²", "9" * 5000, "1" * 10, "٣"])
def test_what_is_no_index_is_a_field(recipe, index):
    (said,) = refused(resolve, recipe(), [f"reward.{index}.weight=1"])
    assert said.startswith("reward") and len(said) < 2500
