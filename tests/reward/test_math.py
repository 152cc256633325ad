"""math-verify in killable workers: verdicts, and what hostile text may cost."""

from functools import partial
from itertools import product

import pytest

from proxima.process.worker import Worker
from proxima.reward.math.algebra import unevaluable
from proxima.reward.math.numeric_answer import parse_number, same_number
from proxima.reward.math.symbolic import Math
from tests.lent_servers import lent_servers
from tests.reward.make import LONG, SHORT, ask, completions, prompt, rows, runner

pytest.importorskip("math_verify")
pytestmark = pytest.mark.usefixtures("lent_servers")

TRUE = rows(r"""
0.5: Therefore \boxed{\frac{1}{2}}. | <answer>1/2.</answer>
\frac{1}{2}: \boxed{0.5}
3/4: so $x = \frac{3}{4}$
42: The answer is 42. | <think>6 * 7</think>\n<answer>42</answer> | \boxed{42.}
(x+1)^2: \boxed{x^2 + 2x + 1}
2\sqrt{2}: \boxed{\sqrt{8}} | \boxed{\sqrt{8}. }
(1,2): \boxed{(1, 2)}
\{1,2\}: \boxed{\{2, 1\}}
12000: \boxed{12{,}000}
2\sqrt{3}: \boxed{x = \sqrt{12} = 2\sqrt{3}}
x^2+1: so $f(x) = 1 + x^2$. | \boxed{f(x)=1+x^2}
[0,5]: \boxed{0 \le x \leq 5}
\left[0,5\right): \boxed{0 \le x < 5}
[5,\infty): \boxed{x \ge 5}
(-\infty,5): \boxed{x < 5}
y=x^2+1: \boxed{y=1+x^2}
""")
FALSE = rows(r"""
1: \boxed{1}, no: \boxed{2} | \boxed{\frac{1}{
0.5: \boxed{\frac{1}{3}}
2\sqrt{3}: \boxed{\sqrt{11} = 2\sqrt{3}} | \boxed{\int_0^{2} \sqrt{3} dx} | \boxed{\sum_{k=1}^{2} \sqrt{3}}
2\sqrt{3}: The answer is 5.
[0,5]: \boxed{0 < x \le 5}
[0,6]: \boxed{0 \le x \leq 5}
[5,\infty): \boxed{x > 5}
(0,5]: \boxed{5 > x > 0}
7: \boxed{\text{none}}
42: I can't solve this.
""")
FALSE += [("42", [""])]
ONES = "1" * 400
# The question said again, or nothing finished: all wrong.
RESTATED = rows(r"""
61: What is 54 + 7 | What is 54 + 7? 54 + 7 = ? | Answer: 54+7 | The answer is 54 + 7. | <answer>54+7</answer>
61: $54 + 7$
61: \boxed{54+7} | \boxed{60=61} | \boxed{x=60=61} | \boxed{\int_0^{61} 1 dx} | \boxed{54+8=61}
61: <answer>60=61</answer>
61: \boxed{\frac{122}{2}} | \boxed{122/2} | It is 122/2. | \boxed{\sqrt{3721}} | \boxed{x+1=61} | \boxed{\pm 61}
61: \boxed{60, 61} | \boxed{61 \text{ or } 62} | \boxed{61x} | \boxed{61 million} | \boxed{x < 61} | \boxed{61!}
87: 12 * 7 + 3 apples | What is 12 * 7 + 3 | 12 times 7 plus 3 | \boxed{12 \cdot 7 + 3} | $12 \times 7 + 3$
3: 12 * 7 + 3 apples | 84 divided by 28 plus 3 | 2 - 3 | It is 5 - 3
1024: We compute $2^{10}$ and then | \boxed{2^{10}} | <answer>2**10</answer> | 2^10 | 2^{10}
24: \boxed{4!} | \boxed{\binom{24}{1}} | \boxed{\sum_{i=1}^{24} 1} | \boxed{\prod_{i=2}^{4} i}
24: \boxed{\lim_{x\to 24} x}
-6: \boxed{4-10} | \boxed{-(6)(1)} | \boxed{\log_2 \frac{1}{64}} | \boxed{6}
0.5: \boxed{\frac{1}{4}+\frac{1}{4}} | \boxed{1 \cdot \frac{1}{2}} | \boxed{\cos 60^\circ} | \boxed{2^{-1}}
x=61: \boxed{y=61} | \boxed{x=54+7}
61: So it is $54 + $7 | **54 + 7** | 6.1 x 10 | 54 plus 7 | She has 60 = 61.
7: 54 plus 7 | 54 + 7 | $54 + $7 | 54 x 7
""")
RESTATED += [(ONES + "9", [rf"\boxed{{{ONES}1}}", ONES + "1", ONES + "8", "1" * 399 + "9"])]
FINAL = rows(r"""
61: 61 | \boxed{61.0} | <answer>61 dollars</answer> | <answer>$61</answer> | <answer>So it is $61.</answer> | x = 61
61: $x=61$
61: So 54 + 7 = 61 apples. | \boxed{54+7=61} | $$54 + 7 = 61.$$ | \[ x = 54 + 7 = 61 \] | The answer is 61!
61: **Answer:** 61
61: The answer is 61, because 3 and 58 are. | \boxed{61\text{ cm}^2} | \boxed{61^\circ} | \boxed{\textbf{61}}
61: \boxed{{61}}
61: \boxed{\text{Area} = 61} | \boxed{f(2) = 61} | \boxed{\approx 61} | <answer>61 miles per hour</answer>
61: Answer:\n\n61
1000: \boxed{(1,000)} | \boxed{1{,}000} | \boxed{1\,000} | \boxed{10^{3} = 1000} | It costs $1,000.
1000: \boxed{1\times 10^3}
300000: \boxed{3\times 10^5} | \boxed{3 \cdot 10^{5}} | <answer>3e5</answer> | 300,000
3.5: \boxed{3\frac{1}{2}} | It is 3 1/2 | \boxed{\frac72} | \boxed{\frac{14}{4}} | \boxed{\left(\dfrac{7}{2}\right)}
3.5: 7/2
-2: 10 is more, -2 | \boxed{-2} | \boxed{−2} | <answer>-$2</answer> | \boxed{-2.} | so $-2$
50\%: \boxed{50\%} | 50% | \boxed{0.5} | \boxed{50} | <answer>50 percent</answer>
x=61: \boxed{61} | \boxed{x = 61}
15 miles: \boxed{15} | 15
4/2: \boxed{2} | \boxed{4/2}
694: Therefore it was $204 + $160 + $330 = $694. | It is **694**. | $520-$480 = $40, and so **$694** a week
694: It earns $694/year.
300: She can drive 300 miles, because 12 x 25 = 300. | 12 × 25 = 300 | 4200 / 14 = 300 times.
\frac{1}{3}: \boxed{0.\overline{3}} | \boxed{0.333333} | \boxed{-\frac{-1}{3}} | $\frac{2}{6}$ | \frac{1}{3}
""")
FINAL += [
    (ONES + "9", [rf"\boxed{{{ONES}9}}", ONES + "9", f"<answer>0{ONES}9</answer>"]),
    (r"\frac{1}{3}", ["0." + "3" * 1500]),
]
# Compared as text.
SAME_WORDS = rows(r"""
\text{even}: \boxed{\textbf{ Even }} | \boxed{even} | The answer is even. | <answer>even</answer>
Monday: \boxed{\text{Monday}} | \boxed{monday.} | Answer: **Monday**
abc: \boxed{abc}
\text{no solution}: \boxed{no solution} | \boxed{\text{No solution.}}
\text{(A)}: \boxed{A} | \boxed{(A)} | The answer is (A).
""")
OTHER_WORDS = rows(r"""
\text{even}:  | \boxed{odd} | even
Monday: \boxed{\text{Sunday}} | \boxed{\text{dayMon}}
abc: \boxed{cba} | \boxed{bca} | \boxed{a b c d}
\text{no solution}: \boxed{\text{solution}} | \boxed{no oslution}
\text{(A)}: \boxed{B} | A
""")


# What no screening sees coming: the parser or the algebra runs on, and only the limits end it.
RUNS_ON = [r"\boxed{(x+y+z)^{900}}", r"we get $(x+y+z)^{901}$"]
POWERS = [r"<answer>$9**9**9$</answer>", r"\boxed{9^{9^{9}}}", r"\boxed{(x+1)^{100000}}", r"\boxed{2^{10^{10}}}"]
FACTORIALS = [r"\boxed{(10^7)!}", r"\boxed{\binom{10^9}{5\cdot 10^8}}", r"so $\binom{9}{1000000}$"]
FACTORIALS += [r"\boxed{100000!!!}", r"\boxed{" + "!" * 60 + "}"]
SCREENED = {
    **dict.fromkeys(POWERS, "an exponent of more than 9999"),
    **dict.fromkeys(FACTORIALS, "a factorial or binomial without bounds"),
    r"\boxed{" + "x+" * 2000 + "1}": "more than 2000 characters",
    "so $" + "(" * 900 + "1" + ")" * 900 + "$": "brackets nested",
    r"\boxed{" + "{" * 900 + "1" + "}" * 900 + "}": "brackets nested",
    r"\boxed{" + r"\frac{1}{" * 100 + "2" + "}" * 100 + "}": "brackets nested",
}
UNREADABLE = [
    "9" * 500,
    r"\boxed{" + "9" * 100_000 + "}",
    "(" * 5000 + "1" + ")" * 5000,
    "\\boxed{4\x002}",
    "\x00" * 1000,
]
UNREADABLE += [r"\boxed{\left(\right}", "\ud800", "\\" * 3000]


VERDICTS = [(*row, True) for row in TRUE + FINAL + SAME_WORDS]
VERDICTS += [(*row, False) for row in [*FALSE, *RESTATED, *OTHER_WORDS, ("43", UNREADABLE)]]


@pytest.fixture(scope="module")
def judged():
    with lent_servers(), runner(Math(), workers=2) as made:
        yield partial(ask, made)


@pytest.mark.parametrize(("answer", "texts", "right"), VERDICTS)
def test_verdicts(judged, answer, texts, right):
    given = {
        text: (s.valid, s.value, s.correct, s.error) for text, s in zip(texts, judged(answer, *texts), strict=True)
    }
    assert given == dict.fromkeys(texts, (True, float(right), right, None))


@pytest.mark.parametrize(("text", "why"), SCREENED.items(), ids=lambda value: value[:20])
def test_screened_text_reaches_no_worker(judged, text, why):
    (score,) = judged(r"2\sqrt{2}", text)
    assert not score.valid and score.correct is None and score.parts == {}
    assert score.error.startswith("math: ValueError: answer not evaluated: ") and why in score.error
    (score,) = judged("42", text)  # no plain number, whatever it would come out as
    assert (score.valid, score.value, score.correct) == (True, 0.0, False)


PROSE = ["no idea", "No idea.", "see the figure", "it depends on x", "Not enough information", "what 2 is"]


@pytest.mark.parametrize("answer", PROSE)
def test_prose_is_no_mathematics(judged, answer):
    assert Math().unreadable(answer) == r"is prose, not mathematics; write words as \text{…}, or use 'exact'"
    (score,) = judged(answer, r"\boxed{aide on}")
    assert not score.valid and "is prose" in score.error


FORMULAS = ["2xy", "ab+c", "a b", r"\sin x + \cos x", "sin x", r"x=1 \text{ or } x=2", r"\overline{ABC}", "xyz^2"]


@pytest.mark.parametrize("answer", [*FORMULAS, r"\operatorname{arsinh} 1"])
def test_products_of_letters_are_mathematics(answer):
    assert Math().unreadable(answer) is None


def test_a_run_of_digits_is_never_cut(judged):
    long = r"1\cdot x + " + "7" * 401
    (score,) = judged(r"2\sqrt{2}", rf"\boxed{{{long}}}")
    assert (score.valid, score.correct) == (True, False)
    assert Math().unreadable(long) == "not evaluated: a run of more than 400 digits"


def test_many_decimals_are_one_number_and_the_end_of_a_text_still_counts(judged):
    texts = ("0." + "3" * 1500, "9" * 5000 + r" so it is \boxed{\frac{2}{6}}", "9" * 5000 + ", that is 1/3")
    assert [score.correct for score in judged("1/3", *texts)] == [True, True, True]


@pytest.mark.slow
def test_hostile_text_costs_its_own_completion_and_the_worker_is_replaced(monkeypatch):
    """The first one ends by its CPU limit, the second by the clock."""
    run, limits = Worker.run, set()

    def hurried(worker, job, arguments, seconds, cpu_seconds):
        limits.add((seconds, cpu_seconds))
        cpu_seconds = SHORT if "900" in repr(arguments) else cpu_seconds
        return run(worker, job, arguments, SHORT if "901" in repr(arguments) else seconds, cpu_seconds)

    monkeypatch.setattr(Worker, "run", hurried)
    texts = [r"\boxed{\sqrt{8}}", RUNS_ON[0], r"The answer is $\sqrt{8}$.", RUNS_ON[1], r"so $x=\frac{4}{\sqrt{2}}$"]
    with runner(Math(cpu_seconds=500.0), workers=1) as made:
        scores = ask(made, r"2\sqrt{2}", *texts)
        again = ask(made, r"2\sqrt{2}", r"so $\sqrt8$")
        pool = made._pools["text"]
    assert [score.correct for score in scores] == [True, None, True, None, True]
    assert [score.error for score in scores if not score.valid] == [
        f"math: timed out after {SHORT:g} s of CPU time",
        f"math: timed out after {SHORT:g} s",
    ]
    assert again[0].correct is True
    assert pool.started == 3 and limits == {(LONG, 500.0)}


def test_an_answer_that_is_no_mathematics_is_an_error(judged):
    reasons = {"": "can't be read as mathematics", "9^{9^9}": "row's answer not evaluated", None: "prompt 7 has none"}
    for answer, reason in reasons.items():
        (score,) = judged(answer, "so 42")
        assert not score.valid and reason in score.error


((_, ORDINARY),) = rows(r"""
none: 2^{10} | x^2+1 | \frac{2^{100}}{3} | 10! | 2^{2^{3}} | ((((1)))) | e^{-x^2} | 10^{-9999} | \sqrt[3]{2} | 20!/18!
""")
ORDINARY += [r"\binom{99999}{3}", "1" * 400, r"\sqrt{1+" * 14 + "x" + "}" * 14]


@pytest.mark.parametrize("formula", ORDINARY)
def test_ordinary_formulas_are_evaluated(formula):
    assert unevaluable(formula) is None


((_, PLAIN),) = rows(r"""
none: 1 | -1 | 7 | 007 | 12 | 1/2 | 2/4 | -3/6 | \frac{1}{2} | \dfrac{4}{2} | -\frac{1}{2} | 100/4 | 25 | 0.5 | 12.0
""")
PLAIN += [r"2\frac{1}{2}", "0.333333", r"\frac{1}{3}", "1,200", "1{,}200", "x = 25", r"25\text{ cm}", r"25^\circ"]
PLAIN += [r"25\%", "0.25", r"\$25"]


@pytest.mark.slow
def test_plain_numbers_are_equal_where_math_verify_holds_them_equal():
    from math_verify import parse, verify

    answers, boxed = ({text: parse(form.format(text)) for text in PLAIN} for form in ("${}$", "\\boxed{{{}}}"))
    for answer, written in product(PLAIN, PLAIN):
        same = same_number(parse_number(answer), parse_number(written))
        assert verify(answers[answer], boxed[written]) == same, (answer, written)


@pytest.mark.parametrize(("field", "value"), [("cpu_seconds", 0), ("max_chars", 3)])
def test_bad_fields(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be >"):
        Math(**{field: value})


HERE = "tests/reward/test_math.py::test_two_stages_of_parsing_give_the_trees_of_one"


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.campaign(f"{HERE}[4]"))])
def test_two_stages_of_parsing_give_the_trees_of_one(every):
    import latex2sympy2_extended.latex2sympy2 as module
    import sympy
    from math_verify import parse
    from math_verify.parser import extract_latex, parse_latex_cached

    from proxima.reward.workers.graders import SHAPES, parse_in_two_stages

    texts = [rf"\boxed{{{shape}}}" for shape in SHAPES] + [text for _, texts in TRUE + FALSE for text in texts]
    texts += [*UNREADABLE, r"$1 & 2 \\ & ^^ __$", "$x=1 and y=2$"]

    def tree(text):
        for cache in (parse_latex_cached, extract_latex):
            cache.cache_clear()
        parsed = parse(text.replace("\0", ""), parsing_timeout=None)
        return [entry if isinstance(entry, str) else sympy.srepr(entry) for entry in parsed]

    def trees():
        return [*map(tree, texts[::every])]

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
