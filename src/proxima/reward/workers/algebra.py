"""math-verify with numbers compared by relative precision. Loaded in the worker processes."""

import importlib.util
from functools import lru_cache
from typing import Any

PLACES, DIGITS = 6, 5  # of a decimal: the places to which it is compared, and the least number of significant digits
TOLERANCE = 1e-13  # of what is computed from decimals, relative


def verify(reference: Any, answer: Any) -> bool:
    """math-verify's verdict; its own timeouts use signals and are off.

    2^-60 differs from 2^-61, and 1 - 2^-99 from 1; to math-verify, numbers are equal that differ by less than 1e-15. A
    decimal is compared after rounding, see `rounds_to`.
    """
    given = [[_with_imaginary_unit(formula) for formula in parsed] for parsed in (reference, answer)]
    return bool(_grader().verify(*given, timeout_seconds=None))


def _with_imaginary_unit(formula: Any) -> Any:
    """The formula with the imaginary unit for `i`, where math-verify found complex numbers: there it takes every letter
    for a number that is not real, and `i` for one of them."""
    from sympy import I, Symbol

    letters = [letter for letter in getattr(formula, "free_symbols", ()) if letter.is_real is False]
    if not letters:
        return formula
    return formula.xreplace({x: I if x.name == "i" else Symbol(x.name, real=True) for x in letters})


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


def numerically_equal(first: Any, second: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Whether two numbers, or matrices of them, are equal; False for anything that can't be evaluated. A percentage is
    equal to its number without the percent sign. The last two parameters are math-verify's, and are ignored."""
    from sympy import Float, Integer, MatrixBase, MatrixExpr

    if isinstance(first, MatrixBase | MatrixExpr) and isinstance(second, MatrixBase | MatrixExpr):
        first, second = _done(first), _done(second)
        if not (isinstance(first, MatrixBase) and isinstance(second, MatrixBase) and first.shape == second.shape):
            return False
        pairs = zip(first.flat(), second.flat(), strict=True)
        return all(numerically_equal(*pair, float_rounding, numeric_precision) for pair in pairs)
    plain = [_percentage(value) for value in (first, second)]
    if all(isinstance(number, Integer) for number in plain):
        return bool(plain[0] == plain[1])
    compare = rounds_to if any(isinstance(number, Float) for number in plain) else same_value
    try:
        return compare(_done(first), _done(second))
    except Exception:
        return False


def rounds_to(first: Any, second: Any) -> bool:
    """Whether two numbers are equal after rounding to six decimal places, and to at least five significant digits. A
    decimal of fewer places is exact: 1.0 is not 1 - 2^-99."""
    from sympy import Float, Rational, floor, log

    for decimal, other in ((first, second), (second, first)):
        short = decimal.round(PLACES - 1) if isinstance(decimal, Float) else None
        if short is not None and abs(decimal - short) <= TOLERANCE * abs(decimal):
            if isinstance(other, Float):
                return bool(abs(decimal - other) <= TOLERANCE * abs(decimal))
            return same_value(Rational(str(short)), other)
    magnitude = max(abs(number.evalf(30)) for number in (first, second))
    places = PLACES if magnitude == 0 else max(PLACES, DIGITS - 1 - int(floor(log(magnitude, 10).evalf())))
    return bool(first.round(places) == second.round(places))


def same_value(first: Any, second: Any) -> bool:
    """Whether the difference of two numbers is 0, or has no significant digit when it is computed to 300."""
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


def _percentage(value: Any) -> Any:
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
