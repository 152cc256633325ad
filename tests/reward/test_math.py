"""math-verify in killable workers: verdicts, and what hostile text may cost."""

import asyncio

import pytest

from proxima.reward import Math
from proxima.reward.math import plainly_equal, unevaluable
from tests.reward.make import completions, prompt, runner, scored

pytest.importorskip("math_verify")

TEN = [
    (r"Therefore \boxed{\frac{1}{2}}.", "0.5", True),
    (r"\boxed{0.5}", r"\frac{1}{2}", True),
    (r"so $x = \frac{3}{4}$", "3/4", True),
    ("The answer is 42.", "42", True),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
    (r"\boxed{(1, 2)}", "(1,2)", True),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}", True),
    (r"<think>6 * 7</think>\n<answer>42</answer>", "42", True),
    (r"\boxed{12{,}000}", "12000", True),
    (r"\boxed{42.}", "42", True),
    (r"\boxed{\sqrt{8}. }", r"2\sqrt{2}", True),
    ("<answer>1/2.</answer>", "0.5", True),
    (r"\boxed{1}, no: \boxed{2}", "1", False),
    (r"\boxed{\frac{1}{3}}", "0.5", False),
    (r"\boxed{\frac{1}{", "1", False),
    (r"\boxed{\text{none}}", "7", False),
    ("I can't solve this.", "42", False),
    ("", "42", False),
]

# What no screening sees coming: the parser or the algebra runs on, and only the limits end it.
RUNS_ON = [r"\boxed{(x+y+z)^{900}}", r"we get $\prod_{i=1}^{9999} (x+i)$"]
SCREENED = {
    "9**9**9": "an exponent of more than 9999",
    r"\boxed{9^{9^{9}}}": "an exponent of more than 9999",
    r"\boxed{(x+1)^{100000}}": "an exponent of more than 9999",
    r"\boxed{2^{10^{10}}}": "an exponent of more than 9999",
    r"\boxed{(10^7)!}": "a factorial or binomial without bounds",
    r"\boxed{\binom{10^9}{5\cdot 10^8}}": "a factorial or binomial without bounds",
    r"so $\binom{9}{1000000}$": "a factorial or binomial without bounds",
    r"\boxed{100000!!!}": "a factorial or binomial without bounds",
    r"\boxed{" + "!" * 60 + "}": "a factorial or binomial without bounds",
    r"\boxed{" + "x+" * 2000 + "1}": "more than 2000 characters",
    "(" * 900 + "1" + ")" * 900: "brackets nested",
    r"\boxed{" + "{" * 900 + "1" + "}" * 900 + "}": "brackets nested",
    r"\boxed{" + r"\frac{1}{" * 100 + "2" + "}" * 100 + "}": "brackets nested",
}
UNREADABLE = [
    "9" * 500,
    r"\boxed{" + "9" * 100_000 + "}",
    "(" * 5000 + "1" + ")" * 5000,
    "\\boxed{4\x002}",
    "\x00" * 1000,
    r"\boxed{\left(\right}",
    "\ud800",
    "\\" * 3000,
]


@pytest.fixture(scope="module")
def judged():
    with runner(Math(), workers=2) as made:
        yield lambda answer, *texts: asyncio.run(made.score(prompt(answer), completions(*texts)))


@pytest.mark.parametrize(("text", "answer", "right"), TEN)
def test_real_completions(judged, text, answer, right):
    (score,) = judged(answer, text)
    assert (score.valid, score.value, score.correct, score.error) == (True, float(right), right, None)


@pytest.mark.parametrize(("text", "why"), SCREENED.items(), ids=lambda value: value[:20])
def test_screened_text_reaches_no_worker(judged, text, why):
    (score,) = judged("42", text)
    assert not score.valid and score.correct is None and score.parts == {}
    assert score.error.startswith("math: ValueError: answer not evaluated: ") and why in score.error


def test_many_decimals_are_one_number_and_the_end_of_a_text_still_counts(judged):
    scores = judged("1/3", "0." + "3" * 1500, "9" * 5000 + r" so it is \boxed{\frac{2}{6}}", "9" * 5000 + ", that is 1/3")
    assert [score.correct for score in scores] == [True, True, True]


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_unreadable_text_is_wrong(judged, text):
    (score,) = judged("43", text)
    assert (score.valid, score.value, score.correct) == (True, 0.0, False)


def test_hostile_text_costs_its_own_completion_and_the_worker_is_replaced():
    texts = [r"\boxed{42}", RUNS_ON[0], "The answer is 42.", RUNS_ON[1], r"so $x=\frac{84}{2}$"]
    with runner(Math(cpu_seconds=0.3), workers=1) as made:
        scores = asyncio.run(made.score(prompt("42"), completions(*texts)))
        again = asyncio.run(made.score(prompt("42"), completions("so 42")))
        pool = made._pools["text"]
    assert [score.correct for score in scores] == [True, None, True, None, True]
    assert [score.error for score in scores if not score.valid] == ["math: timed out after 0.3 s of CPU time"] * 2
    assert again[0].correct is True
    assert pool.started == 3


def test_the_clock_holds_where_the_cpu_limit_does_not():
    (bad, good) = scored([Math(cpu_seconds=60)], "42", RUNS_ON[0], "42", timeout=0.5)
    assert bad.error == "math: timed out after 0.5 s"
    assert good.correct is True


def test_an_answer_that_is_no_mathematics_is_an_error(judged):
    (score,) = judged("", "so 42")
    assert not score.valid and "can't be read as mathematics" in score.error
    (score,) = judged("9^{9^9}", "so 42")
    assert "row's answer not evaluated" in score.error
    (score,) = judged(None, "so 42")
    assert "prompt 7 has none" in score.error


@pytest.mark.parametrize(
    "formula",
    [
        "2^{10}",
        "x^2+1",
        r"\frac{2^{100}}{3}",
        "10!",
        "2^{2^{3}}",
        "((((1))))",
        "1" * 400,
        "e^{-x^2}",
        "10^{-9999}",
        r"\sqrt[3]{2}",
        "20!/18!",
        r"\binom{99999}{3}",
        r"\sqrt{1+" * 14 + "x" + "}" * 14,
    ],
)
def test_ordinary_formulas_are_evaluated(formula):
    assert unevaluable(formula) is None


PLAIN = ["1", "-1", "7", "007", "12", "1/2", "2/4", "-3/6", r"\frac{1}{2}", r"\dfrac{4}{2}", r"-\frac{1}{2}", r"\frac{6}{3}", "100/4", "25"]


def test_the_short_way_agrees_with_math_verify():
    from math_verify import parse, verify

    for found in PLAIN:
        for answer in PLAIN:
            slow = verify(parse(f"${answer}$"), parse(f"\\boxed{{{found}}}"))
            assert plainly_equal(found, answer) == slow, (found, answer)
    assert plainly_equal("x", "y") is None and plainly_equal("0.5", "1/2") is None
    assert plainly_equal(" x+1", "x+1 ") is True and plainly_equal("", "") is None


@pytest.mark.parametrize(("field", "value"), [("cpu_seconds", 0), ("max_chars", 3)])
def test_bad_fields(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be >"):
        Math(**{field: value})


def test_two_stages_of_parsing_give_the_trees_of_one():
    import latex2sympy2_extended.latex2sympy2 as module
    import sympy
    from math_verify import parse
    from math_verify.parser import extract_latex, parse_latex_cached

    from proxima.reward.graders import SHAPES, parse_in_two_stages

    texts = (
        [rf"\boxed{{{shape}}}" for shape in SHAPES] + [text for text, _, _ in TEN] + [*UNREADABLE, r"$1 & 2 \\ & ^^ __$", "$x=1 and y=2$"]
    )

    def trees():
        made = []
        for text in texts:
            for cache in (parse_latex_cached, extract_latex):
                cache.cache_clear()
            made.append([one if isinstance(one, str) else sympy.srepr(one) for one in parse(text.replace("\0", ""), parsing_timeout=None)])
        return made

    before, original = trees(), module._Latex2Sympy
    try:
        parse_in_two_stages()
        assert module._Latex2Sympy is not original and trees() == before
    finally:
        module._Latex2Sympy = original


def test_the_parser_of_this_process_is_left_alone():
    import latex2sympy2_extended.latex2sympy2 as module

    Math().score(prompt("42"), completions(r"\boxed{\sqrt{8}}"))
    assert module._Latex2Sympy.__name__ == "_Latex2Sympy"
