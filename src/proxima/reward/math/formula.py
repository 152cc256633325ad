"""A formula: what needs algebra to be compared, with what the comparison asks of it, each computed once."""

from dataclasses import dataclass
from functools import cached_property

from proxima.reward.math.equations import equation_sides, is_equation
from proxima.reward.math.latex import TokenReader, has_dots, tokenize
from proxima.reward.math.notation import compact_text, normalize_formula, without_range, without_words

_UNFINISHED = {
    r"\int": "integral",
    r"\iint": "integral",
    r"\iiint": "integral",
    "∫": "integral",
    r"\sum": "sum",
    "∑": "sum",
    r"\prod": "product",
    "∏": "product",
    r"\lim": "limit",
}
_DIFFERENTIALS = ("d", r"\partial")


@dataclass(frozen=True)
class Formula:
    """An expression, equation, set, tuple, interval or matrix, in LaTeX."""

    latex: str

    @cached_property
    def compact(self) -> str | None:
        """The text without typesetting and spaces; None if nothing is left, or for over 4,000 characters."""
        return compact_text(self.latex)

    @cached_property
    def normal(self) -> str:
        """The formula in one notation, see `normalize_formula`."""
        return normalize_formula(self.latex)

    @cached_property
    def plain(self) -> str:
        """In one notation, without unit and fonts, unless a word names its value: as math-verify should read it."""
        return plain_formula(self.normal)

    @cached_property
    def has_dots(self) -> bool:
        """True if it has dots for what is not written."""
        return has_dots(self.latex)

    @cached_property
    def is_equation(self) -> bool:
        """True for `x+y = 5`, and not for a value with a name."""
        return is_equation(self.latex)

    @cached_property
    def is_only_text(self) -> bool:
        r"""True if math-verify would drop its words and all behind them: `2\text{ hours }30\text{ minutes}` is 2 to it.
        Units, `and`, `or`, names before an equals sign and `where …` are none of them."""
        return any(without_words(side, "") is None for side in equation_sides(without_range(self.normal), ""))

    @cached_property
    def operations(self) -> frozenset[str]:
        """What is left to do: an integral, a sum or product over an index, a limit, a derivative."""
        if not any(sign in self.latex for sign in (*_UNFINISHED, r"\frac")):
            return frozenset()
        tokens = tokenize(self.latex)
        operations = {_UNFINISHED[token] for token in tokens if token in _UNFINISHED}
        if any(token == r"\frac" and _is_derivative(TokenReader(tokens, i + 1)) for i, token in enumerate(tokens)):
            operations.add("derivative")
        return frozenset(operations)


def plain_formula(normal: str) -> str:
    """A formula in one notation without its unit and fonts, unless a word names its value."""
    if "=" in normal:
        return normal
    return without_words(normal, normal) or normal


def _is_derivative(reader: TokenReader) -> bool:
    r"""Return True for `{d}{dx}` and `{\partial}{\partial x}`."""
    if not (reader.take("{") and reader.take(*_DIFFERENTIALS) and reader.take_all("}", "{")):
        return False
    reader.skip_spaces()
    start = reader.position
    while not reader.ended and reader.next != "}":
        reader.position += 1
    below = "".join(reader.tokens[start : reader.position]).replace(" ", "")
    return len(below.removeprefix(r"\partial").removeprefix("d")) == 1 and below.startswith(_DIFFERENTIALS)
