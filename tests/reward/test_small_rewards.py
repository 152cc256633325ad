"""`accuracy_1_5_2`, `exact`, `gsm8k`, `boxed`, `length`, `missing_eos`, `overlong`, `repetition`, `format`,
`regex`: ten real completions each."""

from dataclasses import replace

import pytest

from proxima.data import Score
from proxima.reward import (
    Accuracy152,
    Boxed,
    Exact,
    Format,
    Gsm8kReward,
    Length,
    MissingEos,
    Overlong,
    Regex,
    Repetition,
)
from proxima.reward.math.extract import as_fraction, last_boxed, last_tagged
from tests.reward.make import completion, completions, corrects, prompt, rows

THOUGHT = "<think>17 + 25 is 42</think>\n<answer>42</answer>"

CASES = {
    Exact(): [
        ("42", "42", True),
        (" 42\n", "42", True),
        ("Paris", "Paris", True),
        ("42", 42, True),
        ("line one\nline two", "line one\nline two", True),
        ("42.", "42", False),
        ("042", "42", False),
        ("paris", "Paris", False),
        ("The answer is 42", "42", False),
        ("", "42", False),
    ],
    Exact(ignore_case=True): [("paris", "Paris", True), ("STRASSE", "straße", True), ("Lyon", "Paris", False)],
    Gsm8kReward(): [
        ("Natalia sold 48/2 = 24 clips in May.\n#### 72", "72", True),
        ("#### $1,200", "1200", True),
        ("#### 5 dollars, paid in 2 parts", "5", True),
        ("first #### 3, no: #### 4", "4", True),
        ("She has 18 left.", "18", True),
        ("A: 18", "She earns 9 * 2 = 18\n#### 18", True),
        ("#### -3", "-3", True),
        ("#### 18\n", "17", False),
        ("The answer is 72\n#### unknown", "72", False),
        ("18 eggs, so 3 left", "18", False),
        ("", "18", False),
    ],
    Gsm8kReward(strict=True): [("She has 18 left.", "18", False), ("#### 18", "18", True)],
    Boxed(): [
        (r"so \boxed{42}", "42", True),
        (r"\boxed{1} then \boxed{2}", "2", True),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{1,234}", "1234", True),
        (r"\fbox{7}", "7", True),
        (r"\boxed{ B }", "B", True),
        (r"\boxed{0.50}", "0.5", True),
        (r"\boxed{41} is not 42", "42", False),
        (r"\boxed{42", "42", False),
        ("42", "42", False),
        (r"\boxed{}", "42", False),
    ],
    Regex(): [
        (THOUGHT, "42", True),
        ("<answer> 42 </answer>", 42, True),
        ("<answer>1</answer> or <answer>2</answer>", "2", True),
        ("<answer>a\nb</answer>", "a\nb", True),
        ("<answer>$1,000</answer>", "1000", True),
        ("<answer>42", "42", False),
        ("42", "42", False),
        ("<answer></answer>", "42", False),
        ("<answer>43</answer>", "42", False),
        ("", "42", False),
    ],
    Regex(pattern=r"answer:\s*(\w+)"): [("answer: C", "C", True), ("Answer: C", "C", False)],
    Regex(pattern=r"(?P<n>\w)=(?P<answer>\d+)"): [("x=3", "3", True), ("x=4", "3", False)],
    Regex(pattern=r"\d+"): [("3 of 4", 4, True), ("none", 4, False)],
}


@pytest.mark.parametrize(
    ("reward", "text", "answer", "right"), [(reward, *case) for reward, cases in CASES.items() for case in cases]
)
def test_real_completions(reward, text, answer, right):
    (score,) = reward.score(prompt(answer), completions(text))
    assert score == Score(value=float(right), correct=right)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (THOUGHT, True),
        ("<think></think>\n<answer></answer>", True),
        ("<think>several\nlines</think>\n<answer>4\n2</answer>", True),
        ("<think>a</think>\n<answer>b</answer> and more </answer>", True),
        ("<think>17 + 25</think><answer>42</answer>", False),
        ("<think>17 + 25</think>\n<answer>42", False),
        (f"Sure! {THOUGHT}", False),
        (f"{THOUGHT} I hope this helps.", False),
        ("<answer>42</answer>\n<think>17</think>", False),
        ("42", False),
        ("", False),
    ],
)
def test_format(text, fits):
    assert Format().score(prompt(), completions(text)) == [Score(value=float(fits))]


@pytest.mark.parametrize(
    ("mode", "tokens", "value"),
    [
        ("penalty", 0, 0.0),
        ("penalty", 10, 0.0),
        ("penalty", 11, -0.1),
        ("penalty", 15, -0.5),
        ("penalty", 20, -1.0),
        ("penalty", 500, -1.0),
        ("target", 0, -1.0),
        ("target", 5, -0.5),
        ("target", 10, 0.0),
        ("target", 12, -0.2),
        ("target", 50, -1.0),
    ],
)
def test_length(mode, tokens, value):
    assert Length(tokens=10, mode=mode).score(prompt(), [completion("x", tokens=tokens)]) == [Score(value=value)]


TAGGED = "<think>let me see</think>\n<answer>{}</answer>"


IN_TAGS = {  # grade → answers and texts
    2.0: r"""
18: 18
\frac{1}{2}: \frac{1}{2}
x + 1: x + 1
""",
    1.5: r"""
18: 18.0 | $18 | 18. | 18 dollars | x = 18 | 18 months
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
18: 9 and 18 | 9 * 2 = 18 | eighteen | 18 and a half
-18: --18 | -$-18 | +−18
1: x + 1 | 1 k
2: 2x | \sqrt{2} | 2 million | 2 dozens | 2 Millions of dollars | 2 plus three | 2 x
3: 3 fifths
4: 4 less than x
5: 5 squared | 5 percent
6: 6 factorial
0: 1/0
x + 1: x+1
""",
}
GRADED = [
    (answer, [TAGGED.format(text) for text in texts], grade)
    for grade, table in IN_TAGS.items()
    for answer, texts in rows(table)
]
GRADED += [
    ("18", [TAGGED.format(" 18\n"), "<answer>1</answer>, no: <answer>18</answer>"], 2.0),
    (18, [TAGGED.format("18")], 2.0),
    ("9 * 2 = 18\n#### 18", [TAGGED.format("18")], 2.0),
    ("9", [TAGGED.format("9" * 5000)], 0.0),
    ("18", [TAGGED.format(""), "18", "<answer>18", ""], 0.0),
    ("", [TAGGED.format("")], 0.0),
]


@pytest.mark.parametrize(("answer", "texts", "grade"), GRADED)
def test_accuracy_in_two_grades(answer, texts, grade):
    scores = Accuracy152().score(prompt(answer), completions(*texts))
    assert dict(zip(texts, scores, strict=True)) == dict.fromkeys(texts, Score(value=grade, correct=grade > 0))


def test_accuracy_of_a_whole_text():
    scores = Accuracy152(tag=None).score(prompt("18"), completions("18", "18.0", "18 eggs", "17 or 18"))
    assert [score.value for score in scores] == [2.0, 1.5, 1.5, 0.0]


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (0, 0),
        (16383, 0),
        (16384, 0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1),
        (30000, -1),
    ],
)
def test_overlong_is_dapos_line(tokens, value):
    long = [completion("x", tokens=tokens)]
    assert Overlong(max_tokens=20480, buffer_tokens=4096).score(prompt(), long) == [Score(value=value)]
    assert Overlong(max_tokens=20480, buffer_tokens=4096, factor=0.5).score(prompt(), long) == [Score(value=value / 2)]


@pytest.mark.parametrize(
    ("text", "finish_reason", "value"),
    [
        ("The answer is 4.", "stop", 0),
        ("4", "stop", 0),
        ("", "stop", 0),
        ("The answer is 4.", "length", -1),
        ("First, 2 + 2 is the same as", "length", -1),
        ("<think>Let me see. Wait", "length", -1),
        ("", "length", -1),
        ("####", "length", -1),
        ("\\boxed{4}", "stop", 0),
        ("4 4 4 4 4 4 4 4 4", "length", -1),
    ],
)
def test_missing_eos_is_a_penalty_for_what_was_cut_off(text, finish_reason, value):
    ended = replace(completion(text), finish_reason=finish_reason)
    assert MissingEos(weight=0.5).score(prompt(), [ended]) == [Score(value=value)]


def test_overlong_may_begin_with_the_first_token():
    reward = Overlong(max_tokens=4, buffer_tokens=4)
    values = [reward.score(prompt(), [completion("", tokens=n)])[0].value for n in range(6)]
    assert values == [0, -0.25, -0.5, -0.75, -1, -1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0.0),
        ("one", 0.0),
        ("one two", 0.0),
        ("one two three", 0.0),
        ("so the answer is seven, as the sum of three and four", 0.0),
        ("a a a", 0.0),
        ("a a a a", -1 / 2),
        ("a a a a a a", -3 / 4),
        ("a b a b a b", -1 / 2),
        ("A b\na  B\ta b", -1 / 2),
        ("wait let me see wait let me see wait let me see", -6 / 10),
        (" ".join(["no"] * 102), -0.99),
    ],
)
def test_repetition(text, value):
    (score,) = Repetition().score(prompt(), completions(text))
    assert score.value == pytest.approx(value, abs=1e-12) and score.correct is None
    assert Repetition(max_penalty=0.2).score(prompt(), completions(text))[0].value == pytest.approx(
        value / 5, abs=1e-12
    )


def test_repetition_of_tokens():
    same = completion("what the text says does not matter", tokens=12)
    assert Repetition(unit="tokens", n=3).score(prompt(), [same])[0].value == pytest.approx(-0.9)
    assert Repetition(unit="tokens", n=12).score(prompt(), [same])[0].value == 0.0
    assert Repetition(unit="tokens", n=1).score(prompt(), [same])[0].value == pytest.approx(-11 / 12)


@pytest.mark.parametrize("reward", [Accuracy152(), Exact(), Gsm8kReward(), Boxed(), Regex()])
def test_a_row_without_an_answer_is_an_error(reward):
    with pytest.raises(ValueError, match=f"'{reward.kind}' compares with an answer; prompt 7 has none"):
        reward.score(prompt(None), completions("42"))


def test_boxed_answers_with_nested_braces():
    assert last_boxed(r"\boxed{\text{a {b} c}} tail }") == r"\text{a {b} c}"
    assert last_boxed("\\boxed{" * 50_000) is None
    assert last_boxed("\\boxed{" + "{" * 100_000 + "}" * 100_001) == "{" * 100_000 + "}" * 100_000


def test_tagged_and_fractions():
    assert last_tagged("<a>1</a><a>2</a><a>3", "a") == "2"
    assert last_tagged("</a>1<a>", "a") is None
    read = [as_fraction(text) for text in ("1/2", r"\frac{2}{4}", r"-\dfrac{1}{2}", "3", "1/0", "0.5", "x")]
    assert read == [0.5, 0.5, -0.5, 3, None, None, None]


@pytest.mark.parametrize("reward", [Format, Regex])
def test_a_pattern_that_is_none_is_refused(reward):
    with pytest.raises(ValueError, match=r"pattern='\(' is not a regular expression"):
        reward(pattern="(")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Length(tokens=0), "tokens=0 must be >= 1"),
        (lambda: Length(mode="short"), "mode='short' must be 'penalty' or 'target'"),
        (lambda: Accuracy152(tag="a b"), "tag='a b' must be a plain name such as 'answer'"),
        (lambda: Overlong(max_tokens=0, buffer_tokens=1), "max_tokens=0 must be >= 1"),
        (lambda: Overlong(max_tokens=8, buffer_tokens=0), r"buffer_tokens=0 must be in \[1, max_tokens=8\]"),
        (lambda: Overlong(max_tokens=8, buffer_tokens=9), r"buffer_tokens=9 must be in \[1, max_tokens=8\]"),
        (
            lambda: Overlong(max_tokens=8, buffer_tokens=4, factor=-1.0),
            "factor=-1.0 must be >= 0 and finite; it is subtracted",
        ),
        (lambda: Repetition(n=0), "n=0 must be >= 1"),
        (lambda: Repetition(unit="letters"), "unit='letters' must be 'words' or 'tokens'"),
        (lambda: Repetition(max_penalty=-1.0), "max_penalty=-1.0 must be >= 0 and finite; it is subtracted"),
        (lambda: Exact(weight=float("nan")), "weight=nan must be finite"),
        (lambda: Exact(name=" "), "name=' ' must not be empty"),
    ],
)
def test_bad_fields(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_gsm8k_answer_without_a_number():
    with pytest.raises(ValueError, match="is not a number after '####'"):
        corrects(Gsm8kReward(), "#### many", "5")
