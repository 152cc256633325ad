import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.reward import Number
from proxima.reward.math.extract import as_number, last_number
from tests.reward.make import completions, corrects, prompt

TEN = [
    ("42", "42", True),
    ("The answer is 42.", 42, True),
    ("17 + 25 = 42", "42", True),
    ("She pays $1,234.50 in total.", "1234.5", True),
    ("So the change is -$5.", "-5", True),
    ("10-7=3", "3", True),
    ("Janet makes 9 * 2 = $18 every day", "18", True),
    ("42, because 17 + 25 is what you get", "42", False),
    ("I don't know.", "42", False),
    ("The answer is 4 2", "42", False),
    ("It is 1/2", "0.5", False),
    ("", "42", False),
]


@pytest.mark.parametrize(("text", "answer", "right"), TEN)
def test_real_completions(text, answer, right):
    (score,) = Number().score(prompt(answer), completions(text))
    assert (score.value, score.correct, score.valid) == (float(right), right, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,2,3", "3"),
        ("1,234,567", "1234567"),
        ("about 12,34", "34"),
        ("x-3", "3"),
        ("(-3)", "-3"),
        ("= −7", "-7"),
        ("$-7", "-7"),
        ("-$7.50", "-7.5"),
        ("a list:\n- 5", "5"),
        ("1.5e3", "1500"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("version 1.2.3", "3"),
        ("3.", "3"),
        ("50%", "50"),
        ("٣ and 4", "4"),
        ("7\x00", "7"),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == as_number(value)


def test_exact_comparison_of_decimals():
    assert corrects(Number(), "0.1", "0.1000", "0.1000000000000000055511151231257827", "1e-1") == [True, False, True]


@pytest.mark.parametrize("answer", [None, "forty-two", "1/2", "", True])
def test_an_answer_that_is_no_number_is_an_error(answer):
    with pytest.raises(ValueError, match="prompt 7"):
        Number().score(prompt(answer), completions("42"))


@given(value=st.integers(-(10**12), 10**12))
def test_any_integer_is_read_back_however_it_is_written(value):
    assert corrects(Number(), value, f"It is {value}.", f"It is {value:,}", f"= {value}.00!", f"{value + 1}") == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "text",
    ["9" * 200_000, "1," * 100_000, "1,111" * 40_000, "-" * 200_000, "$" * 200_000, "1e" * 100_000, "." * 200_000],
)
def test_hostile_text_is_wrong_at_once(text):
    assert corrects(Number(), 42, text) == [False]
