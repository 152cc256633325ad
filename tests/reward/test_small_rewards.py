"""`accuracy_1_5_2`, `exact`, `number`, `gsm8k`, `boxed`, `length`, `missing_eos`, `overlong`, `repetition`, `format`,
`regex`: ten real completions each; and `environment`."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.data.episode import Episode
from proxima.data.flow import Score
from proxima.reward.environment_reward import EnvironmentReward
from proxima.reward.length import Length, MissingEos, Overlong
from proxima.reward.math.marked import Boxed, Gsm8kReward, as_fraction, as_number, last_boxed, last_number, last_tagged
from proxima.reward.math.numbers import Accuracy152, Number
from proxima.reward.repetition import Repetition
from proxima.reward.text import Exact, Format, Regex
from tests.reward.make import completion, completions, corrects, prompt, rows

THOUGHT = "<think>17 + 25 is 42</think>\n<answer>42</answer>"

CASES = {  # reward → lines `answer: text | text` that are right, and those that are wrong
    Exact(): (
        r"""
42: 42 |  42\n
Paris: Paris
line one\nline two: line one\nline two
""",
        r"""
42:  | 42. | 042 | The answer is 42
Paris: paris
""",
    ),
    Exact(ignore_case=True): ("Paris: paris\nstraße: STRASSE", "Paris: Lyon"),
    Number(): (
        r"""
42: 42 | The answer is 42. | 17 + 25 = 42
1234.5: She pays $1,234.50 in total.
-5: So the change is -$5.
3: 10-7=3
18: Janet makes 9 * 2 = $18 every day
""",
        r"""
42:  | 42, because 17 + 25 is what you get | I don't know. | The answer is 4 2
0.5: It is 1/2
""",
    ),
    Gsm8kReward(): (
        r"""
72: Natalia sold 48/2 = 24 clips in May.\n#### 72
1200: #### $1,200
5: #### 5 dollars, paid in 2 parts
4: first #### 3, no: #### 4
18: She has 18 left.
She earns 9 * 2 = 18\n#### 18: A: 18
-3: #### -3
""",
        r"""
17: #### 18\n
72: The answer is 72\n#### unknown
18:  | 18 eggs, so 3 left
""",
    ),
    Gsm8kReward(strict=True): ("18: #### 18", "18: She has 18 left."),
    Boxed(): (
        r"""
42: so \boxed{42}
2: \boxed{1} then \boxed{2}
\frac{1}{2}: \boxed{\frac{1}{2}}
1234: \boxed{1,234}
7: \fbox{7}
B: \boxed{ B }
0.5: \boxed{0.50}
""",
        r"42: \boxed{41} is not 42 | \boxed{42 | 42 | \boxed{}",
    ),
    Regex(): (
        r"""
42: <think>17 + 25 is 42</think>\n<answer>42</answer> | <answer> 42 </answer>
2: <answer>1</answer> or <answer>2</answer>
a\nb: <answer>a\nb</answer>
1000: <answer>$1,000</answer>
""",
        "42:  | <answer>42 | 42 | <answer></answer> | <answer>43</answer>",
    ),
    Regex(pattern=r"answer:\s*(\w+)"): ("C: answer: C", "C: Answer: C"),
    Regex(pattern=r"(?P<n>\w)=(?P<answer>\d+)"): ("3: x=3", "3: x=4"),
    Regex(pattern=r"\d+"): ("4: 3 of 4", "4: none"),
}


@pytest.mark.parametrize("reward", CASES)
def test_real_completions(reward):
    for table, right in zip(CASES[reward], (True, False), strict=True):
        for answer, texts in rows(table):
            scores = dict(zip(texts, reward.score(prompt(answer), completions(*texts)), strict=True))
            assert scores == dict.fromkeys(texts, Score(value=float(right), correct=right)), answer


def test_an_answer_may_be_a_number():
    for reward, text in ((Exact(), "42"), (Regex(), THOUGHT), (Number(), "The answer is 42.")):
        assert corrects(reward, 42, text, "43") == [True, False]


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


@settings(max_examples=30)
@given(value=st.integers(-(10**12), 10**12))
def test_any_integer_is_read_back_however_it_is_written(value):
    texts = (f"It is {value}.", f"It is {value:,}", f"= {value}.00!", f"{value + 1}")
    assert corrects(Number(), value, *texts) == [True, True, True, False]


@pytest.mark.parametrize(
    "text",
    ["9" * 200_000, "1," * 100_000, "1,111" * 40_000, "-" * 200_000, "$" * 200_000, "1e" * 100_000, "." * 200_000],
)
def test_a_hostile_number_is_wrong_at_once(text):
    assert corrects(Number(), 42, text) == [False]


FITS = {
    THOUGHT: 1,
    "<think></think>\n<answer></answer>": 1,
    "<think>several\nlines</think>\n<answer>4\n2</answer>": 1,
    "<think>a</think>\n<answer>b</answer> and more </answer>": 1,
    "<think>17 + 25</think><answer>42</answer>": 0,
    "<think>17 + 25</think>\n<answer>42": 0,
    f"Sure! {THOUGHT}": 0,
    f"{THOUGHT} I hope this helps.": 0,
    "<answer>42</answer>\n<think>17</think>": 0,
    "42": 0,
    "": 0,
}


def test_format():
    scores = Format().score(prompt(), completions(*FITS))
    assert dict(zip(FITS, scores, strict=True)) == {text: Score(value=fits) for text, fits in FITS.items()}


def by_tokens(reward, *counts):
    scores = reward.score(prompt(), [completion("x", tokens=count) for count in counts])
    assert scores == [Score(value=score.value) for score in scores]
    return [score.value for score in scores]


def test_length():
    assert by_tokens(Length(tokens=10, mode="penalty"), 0, 10, 11, 15, 20, 500) == [0, 0, -0.1, -0.5, -1, -1]
    assert by_tokens(Length(tokens=10, mode="target"), 0, 5, 10, 12, 50) == [-1, -0.5, 0, -0.2, -1]


TAGGED = "<think>let me see</think>\n<answer>{}</answer>"


IN_TAGS = {  # grade → answers and texts
    2.0: r"""
18: 18
\frac{1}{2}: \frac{1}{2}
x + 1: x + 1
""",
    1.5: r"""
18: 18.0 | $18 | 18. | 18 dollars | x = 18 | 18 months
18: The answer is 18. | Total: 18 | = 18 | 18% | **18** | \boxed{18}
18: 9 * 2 = 18 | So she has 18 eggs left. | $18$ | **Answer:** 18 | it is 2 times 9, which equals 18.
18: (18) | 18 is the answer
-18: -$18 | $-18
1000: 1,000
1,000: 1000
-3.5: -3.50
1/2: 3/6
0.5: \frac{2}{4}
3: 3 times a week | 3 apples left over.
12: 12 dollars and no cents
""",
    0.0: r"""
17: 18
18: 9 and 18 | 17 or 18 | 20, 18 | eighteen | 18 and a half | not 18 | at least 18 | 18 = x + 2 | 36/2 of 18*x
-18: --18 | -$-18 | +−18
1: x + 1 | 1 k
2: 2x | \sqrt{2} | 2 million | 2 dozens | 2 Millions of dollars | 2 plus three | 2 x
3: 3 fifths
4: 4 less than x
5: 5 squared
6: 6 factorial
0: 1/0
x + 1: x+1
""",
}
GRADED = [("9", ["9" * 5000], 0.0), (18, ["18"], 2.0), ("9 * 2 = 18\n#### 18", ["18"], 2.0), ("", [""], 0.0)]
GRADED += [(*row, grade) for grade, table in IN_TAGS.items() for row in rows(table)]
GRADED = [(answer, [TAGGED.format(text) for text in texts], grade) for answer, texts, grade in GRADED]
GRADED += [("18", [TAGGED.format(""), "18", "<answer>18", ""], 0.0)]
GRADED += [("18", [TAGGED.format(" 18\n"), "<answer>1</answer>, no: <answer>18</answer>"], 2.0)]


@pytest.mark.parametrize(("answer", "texts", "grade"), GRADED)
def test_accuracy_in_two_grades(answer, texts, grade):
    scores = Accuracy152().score(prompt(answer), completions(*texts))
    assert dict(zip(texts, scores, strict=True)) == dict.fromkeys(texts, Score(value=grade, correct=grade > 0))


def test_accuracy_of_a_whole_text():
    scores = Accuracy152(tag=None).score(prompt("18"), completions("18", "18.0", "18 eggs", "17 or 18"))
    assert [score.value for score in scores] == [2.0, 1.5, 1.5, 0.0]


def test_overlong_is_dapos_line():
    counts = (0, 16383, 16384, 16385, 17408, 18432, 20479, 20480, 30000)
    values = [0, 0, 0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1, -1]
    assert by_tokens(Overlong(max_tokens=20480, buffer_tokens=4096), *counts) == values
    halved = Overlong(max_tokens=20480, buffer_tokens=4096, factor=0.5)
    assert by_tokens(halved, *counts) == [value / 2 for value in values]
    assert by_tokens(Overlong(max_tokens=4, buffer_tokens=4), *range(6)) == [0, -0.25, -0.5, -0.75, -1, -1]


@pytest.mark.parametrize("text", ["The answer is 4.", "<think>Let me see. Wait", "", "\\boxed{4}"])
def test_missing_eos_is_a_penalty_for_what_was_cut_off(text):
    for finish_reason, value in (("stop", 0), ("length", -1)):
        ended = replace(completion(text), finish_reason=finish_reason)
        assert MissingEos(weight=0.5).score(prompt(), [ended]) == [Score(value=value)]


REPEATED = {
    **dict.fromkeys(("", "one", "one two", "one two three", "a a a"), 0),
    "so the answer is seven, as the sum of three and four": 0,
    "a a a a": -1 / 2,
    "a a a a a a": -3 / 4,
    "a b a b a b": -1 / 2,
    "A b\na  B\ta b": -1 / 2,
    "wait let me see wait let me see wait let me see": -6 / 10,
    " ".join(["no"] * 102): -0.99,
}


@pytest.mark.parametrize(("reward", "most"), [(Repetition(), 1.0), (Repetition(max_penalty=0.2), 0.2)])
def test_repetition(reward, most):
    scores = reward.score(prompt(), completions(*REPEATED))
    values = {text: pytest.approx(value * most, abs=1e-12) for text, value in REPEATED.items()}
    assert dict(zip(REPEATED, (score.value for score in scores), strict=True)) == values
    assert {score.correct for score in scores} == {None}


@pytest.mark.parametrize(("n", "value"), [(3, -0.9), (12, 0), (1, -11 / 12)])
def test_repetition_of_tokens(n, value):
    assert by_tokens(Repetition(unit="tokens", n=n), 12) == pytest.approx([value])  # whatever the text says


def test_boxed_answers_with_nested_braces():
    assert last_boxed(r"\boxed{\text{a {b} c}} tail }") == r"\text{a {b} c}"
    assert last_boxed("\\boxed{" * 50_000) is None
    assert last_boxed("\\boxed{" + "{" * 100_000 + "}" * 100_001) == "{" * 100_000 + "}" * 100_000


def test_tagged_and_fractions():
    assert last_tagged("<a>1</a><a>2</a><a>3", "a") == "2"
    assert last_tagged("</a>1<a>", "a") is None
    read = [as_fraction(text) for text in ("1/2", r"\frac{2}{4}", r"-\dfrac{1}{2}", "3", "1/0", "0.5", "x")]
    assert read == [0.5, 0.5, -0.5, 3, None, None, None]


@pytest.mark.parametrize(
    ("reward", "fields", "message"),
    [
        (Length, {"tokens": 0}, "must be >= 1"),
        (Length, {"mode": "short"}, "must be 'penalty' or 'target'"),
        (Overlong, {"buffer_tokens": 1, "max_tokens": 0}, "must be >= 1"),
        (Overlong, {"max_tokens": 8, "buffer_tokens": 0}, r"must be in \[1, max_tokens=8\]"),
        (Repetition, {"max_penalty": -1.0}, "must be >= 0 and finite; it is subtracted"),
        (Exact, {"weight": float("nan")}, "must be finite"),
        (Exact, {"name": " "}, "must not be empty"),
        (Format, {"pattern": "("}, "is not a regular expression"),
        (Regex, {"pattern": "("}, "is not a regular expression"),
    ],
)
def test_bad_fields(reward, fields, message):
    """The last of them."""
    name, value = [*fields.items()][-1]
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} ") + message):
        reward(**fields)


@pytest.mark.parametrize(("reward", "correct"), [(1.0, True), (0.5, True), (0.25, False), (-3.0, False), (0.0, False)])
def test_that_of_an_environment_is_that_of_the_episode(reward, correct):
    played = replace(completion("x"), episode=Episode(reward=reward))
    assert EnvironmentReward().score_one(prompt(), played).value == reward
    assert EnvironmentReward().score_one(prompt(), played).correct is None
    assert EnvironmentReward(correct_from=0.5).score_one(prompt(), played).correct is correct


def test_a_completion_without_an_environments_reward_fails():
    with pytest.raises(ValueError, match="is not an episode"):
        EnvironmentReward().score_one(prompt(), completion("x"))
    with pytest.raises(ValueError, match="got no reward from its environment"):
        EnvironmentReward().score_one(prompt(), replace(completion("x"), episode=Episode()))
    assert EnvironmentReward().unreadable(None) is None


JOINED = ["61 or 62", "61, 62", "61/2", "61+1", "61 62", "61 to 70", "61 or maybe 62", "not 61", "less than 61"]
ALONE = [
    "61",
    "$61.",
    "61 dollars",
    "61 (5 each)",
    "about 61",
    "61 apples, 3 of them red",
    "x = 61",
    "61\n\nIn 2 steps.",
]


def test_a_number_after_hashes_stands_alone():
    assert corrects(Gsm8kReward(), "61", *[f"#### {text}" for text in JOINED]) == [False] * len(JOINED)
    assert corrects(Gsm8kReward(), "61", *[f"#### {text}" for text in ALONE]) == [True] * len(ALONE)
    assert corrects(Accuracy152(), "61", "<answer>61 maybe</answer>", "<answer>61 dollars</answer>") == [False, True]
