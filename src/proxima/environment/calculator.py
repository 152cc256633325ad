"""A calculator as a tool."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from proxima.environment.protocol import Environment

LONGEST, LARGEST = 500, 10**30  # characters of an expression; larger values are refused
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Environment):
    """A tool `calculate` for arithmetic; the recipe's rewards judge the answer."""

    def calculate(self, expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: numbers, + - * / // % ** and parentheses, such as 12*(3+4)
        """
        return calculate(expression)


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as 12*(3+4)
    """
    text = expression.strip().rstrip("=").translate(str.maketrans("×·÷−–", "**/--")).replace("^", "**")
    if len(text) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (MemoryError, RecursionError, SyntaxError):
        raise ValueError(f"{expression!r:.60} is not an arithmetic expression") from None
    return str(int(value)) if float(value).is_integer() else f"{value:.12g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            operands = _value(left), _value(right)
            if isinstance(sign, ast.Pow) and (
                abs(operands[1]) > 100 or (operands[0] < 0 and operands[1] != int(operands[1]))
            ):
                raise ValueError("the exponent must be a whole number of at most 100, or the base positive")
            result = _BINARY[type(sign)](*operands)
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            result = _UNARY[type(sign)](_value(operand))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    if not abs(result) <= LARGEST:  # NaN too
        raise ValueError("the result is too large")
    return result
