"""Plain arithmetic: the value of a sum, product, quotient or small power of numbers."""

from collections.abc import Sequence
from fractions import Fraction

from proxima.reward.math.latex import TokenReader

_MAX_CHARS, _MAX_DEPTH, _MAX_EXPONENT, _MAX_BASE = 200, 30, 99, 10**30
_TIMES = ("*", r"\times", r"\cdot", "×")
_OVER = ("/", r"\div", "÷")


class _NotArithmetic(Exception):
    pass


def eval_arithmetic(tokens: Sequence[str]) -> Fraction | None:
    r"""The value of plain arithmetic, written in LaTeX or not: `54 + 7`, `2^{10}`, `\frac{1}{2} \cdot 6`. None for
    anything else, over 200 characters, brackets over 30 deep, or powers of over 99 or of numbers over 10^30."""
    if sum(map(len, tokens)) > _MAX_CHARS:
        return None
    parser = _ArithmeticParser([token for token in tokens if token != "$"])
    try:
        value = parser.read_sum()
    except (_NotArithmetic, ZeroDivisionError):
        return None
    parser.skip_spaces()
    return value if parser.ended else None


class _ArithmeticParser(TokenReader):
    depth = 0

    def read_sum(self) -> Fraction:
        """The value of all that is left, up to a closing bracket."""
        value = self._product()
        while sign := self.take("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self.take(*_TIMES) or self._take_times_as_letter():
                value *= self._signed()
            elif self.take(*_OVER):
                value /= self._signed()
            else:
                return value

    def _signed(self) -> Fraction:
        if sign := self.take("+", "-"):
            self._deeper()
            value = self._signed()
            self.depth -= 1
            return -value if sign == "-" else value
        base = self._operand()
        if not (self.take("^") or self.take_all("*", "*")):
            return base
        self._deeper()
        exponent = self._signed()
        self.depth -= 1
        return _power(base, exponent)

    def _operand(self) -> Fraction:
        if self.take("("):
            return self._until(")")
        if self.take("{"):
            return self._until("}")
        if self.take(r"\frac"):
            return self._argument() / self._argument()
        return self._number()

    def _take_times_as_letter(self) -> bool:
        """The letter in `2 x 3`, which stands between spaces."""
        if (self.next, self.ahead(1), self.ahead(2)) != (" ", "x", " "):
            return False
        self.position += 3
        return True

    def _argument(self) -> Fraction:
        if not self.take("{"):
            raise _NotArithmetic
        return self._until("}")

    def _until(self, closing: str) -> Fraction:
        self._deeper()
        value = self.read_sum()
        self.depth -= 1
        if not self.take(closing):
            raise _NotArithmetic
        return value

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _NotArithmetic

    def _number(self) -> Fraction:
        self.skip_spaces()
        digits = self.take_digits()
        while digits and self.next == ",":
            self.position += 1
            digits += self.take_digits()
        decimals = ""
        if self.next == ".":
            self.position += 1
            decimals = self.take_digits()
        if not (digits or decimals):
            raise _NotArithmetic
        return Fraction(f"{digits or 0}.{decimals or 0}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    size = max(abs(base.numerator), base.denominator)
    if exponent.denominator > 1 or abs(exponent) > _MAX_EXPONENT or size > _MAX_BASE:
        raise _NotArithmetic
    return base ** int(exponent)
