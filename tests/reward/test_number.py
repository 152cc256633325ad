import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.reward.math.extract import as_number, last_number
from proxima.reward.math.number import Number
from tests.reward.make import completions, corrects, prompt, rows

RIGHT = rows(r"""
42: 42 | The answer is 42. | 17 + 25 = 42
1234.5: She pays $1,234.50 in total.
-5: So the change is -$5.
3: 10-7=3
18: Janet makes 9 * 2 = $18 every day
""")
WRONG = rows(r"""
42:  | 42, because 17 + 25 is what you get | I don't know. | The answer is 4 2
0.5: It is 1/2
""")


@pytest.mark.parametrize(("answer", "texts"), [*RIGHT, *WRONG])
def test_real_completions(answer, texts):
    right = (answer, texts) in RIGHT
    for score in Number().score(prompt(answer), completions(*texts)):
        assert (score.value, score.correct, score.valid) == (float(right), right, True)
    assert corrects(Number(), 42, "The answer is 42.", "41") == [True, False]


LAST = rows("""
3: 1,2,3 | x-3 | 3. | version 1.2.3
1234567: 1,234,567
34: about 12,34
-3: (-3)
-7: = −7 | $-7
-7.5: -$7.50
5: a list:\\n- 5
1500: 1.5e3
0.5: 0.50 | .5
50: 50%
4: ٣ and 4
7: 7\0
""")


@pytest.mark.parametrize(("value", "texts"), LAST)
def test_last_number(value, texts):
    assert [*map(last_number, texts)] == [as_number(value)] * len(texts)


def test_exact_comparison_of_decimals():
    assert corrects(Number(), "0.1", "0.1000", "0.1000000000000000055511151231257827", "1e-1") == [True, False, True]


@pytest.mark.parametrize("answer", [None, "forty-two", "1/2", "", True])
def test_an_answer_that_is_no_number_is_an_error(answer):
    with pytest.raises(ValueError, match="prompt 7"):
        Number().score(prompt(answer), completions("42"))


@given(value=st.integers(-(10**12), 10**12))
def test_any_integer_is_read_back_however_it_is_written(value):
    texts = (f"It is {value}.", f"It is {value:,}", f"= {value}.00!", f"{value + 1}")
    assert corrects(Number(), value, *texts) == [True, True, True, False]


@pytest.mark.parametrize(
    "text",
    ["9" * 200_000, "1," * 100_000, "1,111" * 40_000, "-" * 200_000, "$" * 200_000, "1e" * 100_000, "." * 200_000],
)
def test_hostile_text_is_wrong_at_once(text):
    assert corrects(Number(), 42, text) == [False]
