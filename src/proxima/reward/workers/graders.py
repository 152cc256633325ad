"""The graders that the worker processes run, by name: patterns, formulas by math-verify, reasoning_gym, unit tests.

A worker loads this file, which imports no torch, so that it starts fast. Arguments and results are JSON values; an
exception is the completion's error.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from proxima.reward.workers.user_function import (
    grade_function,
    grade_function_batch,
    grade_function_lists,
    load_user_function,
)


def grade_format(*, pattern: str, text: str) -> dict[str, Any]:
    """1 if the pattern is found."""
    return {"value": float(re.search(pattern, text, re.DOTALL) is not None)}


def grade_regex(*, pattern: str, text: str) -> dict[str, Any]:
    """The last match of the pattern: its group `answer`, else group 1, else all of it."""
    compiled = re.compile(pattern, re.DOTALL)
    matches = list(compiled.finditer(text))
    if not matches:
        return {"answer": None}
    if "answer" in compiled.groupindex:
        return {"answer": matches[-1].group("answer")}
    return {"answer": matches[-1].group(min(compiled.groups, 1))}


def grade_math(*, answer: str, texts: list[str]) -> dict[str, Any]:
    """1 if math-verify accepts all texts. Its own timeouts are off: the worker's CPU limit applies."""
    from math_verify import parse

    parsed = [parse(text.replace("\0", ""), parsing_timeout=None) for text in texts]
    equal = [verify(_reference(answer), formula) for formula in parsed]
    correct = all(equal)
    return {"value": float(correct), "correct": correct}


@lru_cache(maxsize=4096)
def _reference(answer: str) -> Any:
    from math_verify import parse

    parsed = parse(_delimited(answer), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the row's answer {answer!r:.80} can't be read as mathematics")
    return parsed


def _delimited(answer: str) -> str:
    """The formula between the delimiters that math-verify expects."""
    if "$" in answer or "\\boxed" in answer:
        return answer
    return f"${answer}$"


def check_math_answer(*, answer: str) -> dict[str, Any]:
    """The reason why math-verify can't parse the row's answer as mathematics, or None. math-verify returns plain text
    for anything that it can't parse."""
    from math_verify import parse

    parsed = parse(_delimited(answer), parsing_timeout=None)
    if all(isinstance(part, str) for part in parsed):
        return {"why": "can't be read as mathematics"}
    return {"why": None}


def grade_reasoning_gym(*, source: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """The task's own score of the answer."""
    dataset = _reasoning_gym(source["task"], repr(decode_json(source["config"])))
    entry = decode_json(source["entry"])
    try:
        return {"value": float(dataset.score_answer(answer, entry))}
    except (ArithmeticError, IndexError, KeyError, SyntaxError, TypeError, ValueError):
        dataset.score_answer(entry["answer"], entry)  # also raises if the scorer itself is broken
        return {"value": 0.0}


# The scorers that pass the model's answer to `eval`; all they expect is a list literal.
EVAL_TASKS = ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")


@lru_cache(maxsize=256)
def _reasoning_gym(task: str, config: str) -> Any:
    import reasoning_gym

    settings = ast.literal_eval(config)
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in EVAL_TASKS:
            vars(module)["eval"] = ast.literal_eval
    return reasoning_gym.create_dataset(task, **settings)


def decode_json(value: object) -> Any:
    """JSON that the task `reasoning_gym` encoded, with its tuples and non-text keys restored."""
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(decode_json(item) for item in value["__tuple__"])
    if value.keys() == {"__pairs__"}:
        return {decode_json(key): decode_json(item) for key, item in value["__pairs__"]}
    return {key: decode_json(item) for key, item in value.items()}


def grade_unit_tests(*, sandbox: str = "none", **arguments: Any) -> dict[str, Any]:
    """Run the unit tests of a row against the completion's code."""
    from proxima.reward.workers import run_unit_tests  # `warm_up` has loaded it

    run_unit_tests.hide_memory()
    return run_unit_tests.run_unit_tests(**arguments, sandbox=run_unit_tests.code_sandbox(sandbox))


def use_servers(*, kind: str, address: str) -> dict[str, Any]:
    """Run code by servers; see `code_runner.run_by_servers`."""
    from proxima.process import code_runner

    code_runner.run_by_servers(kind, address)
    return {}


# Formulas of every common shape: the LaTeX parser builds its tables as it meets them, and all workers inherit them.
SHAPES = tuple(
    r"""
12  -3.5  12,000  \frac{1}{2}  -\dfrac{3x}{4y}  \sqrt{2}  2\sqrt[3]{5}  x^2+3x-1  (x+1)(x-2)  3\pi
\frac{a+b}{c^2}  (1,2)  (-1,\frac{1}{2},3)  [0,1)  (-\infty,2]\cup[3,4)  \{1,2,3\}  x=5  y=2x+1  x\leq3
x>-2  50\%  30^\circ  \sin(x)  \log_2(8)  e^{-x}  2^{10}  10!  \binom{5}{2}  |x-1|  \text{even}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  x\in[1,2]  5\cdot10^3  a_1+a_2  1\frac{1}{2}  \pm\sqrt{3}  3+4i
n\equiv1  x=1,y=2  \left(-3,\frac{5}{2}\right)  \left(-\infty,-2\right]\cup\left[3,\frac{7}{2}\right)
\left\{-1,0,\frac{1}{2}\right\}  (x-3)\cdot(x+4)  \frac{-1+\sqrt{5}}{2}  y=-3x+\frac{1}{2}  -5<x\leq15
3e^{-2}  2\ln3  \frac{5!}{2!\,3!}  \frac{3}{4}\pi  \dfrac{\pi\cdot3}{4}  x\in(-5,15]
\begin{bmatrix}-1&\frac{1}{2}\\0&3\end{bmatrix}  \mathrm{even}  \textbf{C}  2-3i  \approx3.25  3.25\text{ m}
12{,}000  5\cdot\sqrt{3}  \frac{15}{\sqrt{3}}  -\frac{3}{7}  a^{2}b  2x+3y=6  \frac{a}{b}=\frac{c}{d}
0.\overline{3}  \sqrt{x^2+1}  [-1,\frac{1}{2}]  x^3-2x
""".strip()
    .replace("\n", "  ")
    .split("  ")
)


def parse_in_two_stages() -> None:
    """Make math-verify's LaTeX parser try ANTLR's SLL prediction before LL: the same trees, several times as fast.

    SLL either returns the tree of LL or reports a syntax error (ANTLR's documentation of `PredictionMode`). LL computes
    its full-context lookups again each time, SLL fills a table. Applied in the worker processes only.
    """
    try:
        from antlr4.atn.PredictionMode import PredictionMode
        from latex2sympy2_extended import latex2sympy2 as module

        one_stage = module._Latex2Sympy
        _ = one_stage.create_parser, one_stage.parse
    except (ImportError, AttributeError):  # another version of the parser: leave it unchanged
        return

    class TwoStages(one_stage):  # type: ignore[misc, valid-type]  # it has no types
        mode = PredictionMode.SLL

        def create_parser(self, text: str) -> Any:
            parser = super().create_parser(text)
            parser._interp.predictionMode = self.mode
            return parser

        def parse(self, text: str) -> Any:
            try:
                return super().parse(text)
            except Exception:
                self.mode = PredictionMode.LL
                return super().parse(text)

    module._Latex2Sympy = TwoStages


def warm_math() -> None:
    """Load math-verify and fill the tables of its parser."""
    parse_in_two_stages()
    for shape in SHAPES:
        grade_math(answer=shape, texts=[f"\\boxed{{{shape}}}"])
        grade_math(answer="1", texts=[f"so $z={shape}$, that is $${shape}.$$"])
    grade_math(answer="1", texts=["The answer is 12.5."])


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "format": grade_format,
    "function": grade_function,
    "function_batch": grade_function_batch,
    "function_lists": grade_function_lists,
    "math": grade_math,
    "math_answer": check_math_answer,
    "load": load_user_function,
    "reasoning_gym": grade_reasoning_gym,
    "regex": grade_regex,
    "unit_tests": grade_unit_tests,
    "use_servers": use_servers,
}


PLACES = 6  # of a decimal, to which it is compared
DIGITS = 5  # the least number of significant ones
TOLERANCE = 1e-13  # of what is computed from decimals, relative


def verify(reference: Any, answer: Any) -> bool:
    """math-verify's verdict; its own timeouts use signals and are off.

    2^-60 differs from 2^-61, and 1 - 2^-99 from 1; to math-verify, numbers are equal that differ by less than 1e-15. A
    decimal is compared after rounding, see `rounds_to`.
    """
    formulas = [[_with_imaginary_unit(formula) for formula in parsed] for parsed in (reference, answer)]
    return bool(_grader().verify(*formulas, timeout_seconds=None))


def _with_imaginary_unit(formula: Any) -> Any:
    """The formula with the imaginary unit for `i`, where math-verify found complex numbers: there it takes every letter
    for a number that is not real, and `i` for one of them."""
    from sympy import I, Symbol

    letters = [letter for letter in getattr(formula, "free_symbols", ()) if letter.is_real is False]
    if not letters:
        return formula
    real = {letter: Symbol(letter.name, real=True) for letter in letters}
    imaginary = {letter: I for letter in letters if letter.name == "i"}
    return formula.xreplace(real | imaginary)


@lru_cache(maxsize=1)
def _grader() -> Any:
    """A copy of `math_verify.grader` with `numerically_equal` in place of its absolute comparison, to 15 places; the
    module itself, which other code of this process may use, is left alone."""
    spec = importlib.util.find_spec("math_verify.grader")
    if spec is None or spec.loader is None:
        raise ImportError("math_verify.grader is missing")
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)
    if not hasattr(grader, "sympy_numeric_eq"):
        raise ImportError("this version of math-verify compares numbers in another way: install 0.8 or 0.9")
    vars(grader)["sympy_numeric_eq"] = numerically_equal
    return grader


def numerically_equal(first: object, second: object, float_rounding: int, numeric_precision: int) -> bool:
    """Return True if two numbers, or matrices of them, are equal; False for anything that can't be evaluated. A
    percentage is equal to its number without the percent sign. The last two parameters are math-verify's, and are
    ignored."""
    from sympy import Float, Integer, MatrixBase, MatrixExpr

    if isinstance(first, MatrixBase | MatrixExpr) and isinstance(second, MatrixBase | MatrixExpr):
        first = _done(first)
        second = _done(second)
        if not (isinstance(first, MatrixBase) and isinstance(second, MatrixBase) and first.shape == second.shape):
            return False
        pairs = zip(first.flat(), second.flat(), strict=True)
        return all(numerically_equal(*pair, float_rounding, numeric_precision) for pair in pairs)
    plain = [_percentage(value) for value in (first, second)]
    if all(isinstance(number, Integer) for number in plain):
        return bool(plain[0] == plain[1])
    if any(isinstance(number, Float) for number in plain):
        compare = rounds_to
    else:
        compare = same_value
    try:
        return compare(_done(first), _done(second))
    except Exception:
        return False


def rounds_to(first: Any, second: Any) -> bool:
    """Return True if two numbers are equal after rounding to six decimal places, and to at least five significant
    digits. A decimal of fewer places is exact: 1.0 is not 1 - 2^-99."""
    from sympy import Float, Rational, floor, log

    for decimal, other in ((first, second), (second, first)):
        short = None
        if isinstance(decimal, Float):
            short = decimal.round(PLACES - 1)
        if short is not None and abs(decimal - short) <= TOLERANCE * abs(decimal):
            if isinstance(other, Float):
                return bool(abs(decimal - other) <= TOLERANCE * abs(decimal))
            return same_value(Rational(str(short)), other)
    magnitude = max(abs(number.evalf(30)) for number in (first, second))
    if magnitude == 0:
        places = PLACES
    else:
        places = max(PLACES, DIGITS - 1 - int(floor(log(magnitude, 10).evalf())))
    return bool(first.round(places) == second.round(places))


def same_value(first: Any, second: Any) -> bool:
    """Return True if the difference of two numbers is 0, or has no significant digit when it is computed to 300."""
    from sympy import Float

    difference = first - second
    if difference.is_Rational:
        return bool(difference == 0)
    rounded = difference.has(Float)
    value = difference.evalf(15, maxn=300, chop=rounded and not difference.is_number)
    if not value.is_number:
        return bool(value == 0)
    if rounded:
        return bool(abs(value) <= TOLERANCE * abs(first.evalf(15)))
    return all(part == 0 or (part.is_Float and part._prec == 1) for part in value.as_real_imag())


def _percentage(value: object) -> Any:
    """12 of `12%`, which the parser turns into 12 times an unevaluated 1/100; any other value unchanged."""
    from sympy import Mul, Rational, UnevaluatedExpr

    if isinstance(value, Mul) and len(value.args) == 2 and value.args[1] == UnevaluatedExpr(Rational(1, 100)):
        return value.args[0]
    return value


def _done(value: Any) -> Any:
    """The value with its operations carried out, where that is possible."""
    try:
        return value.doit()
    except Exception:
        return value
