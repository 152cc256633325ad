r"""Equalities: their sides, the names on the left of them (`x`, `f(2)`, `m+n`), and words that express a doubt."""

from collections.abc import Sequence

from proxima.reward.math.latex import (
    TokenReader,
    has_dots,
    is_command,
    is_digits,
    is_word,
    listed_names,
    strip_tokens,
    tokenize,
    unfonted,
    without_fonts,
)

_APPROXIMATELY = frozenset({r"\approx", r"\simeq", r"\sim", r"\doteq", "≈"})
DOUBTS = listed_names(
    "maybe perhaps possibly probably alternatively otherwise either neither nor unless versus not unsure uncertain"
    " guess wrong incorrect false"
)
_IN_NAMES = frozenset("-+*/(){}|' ") | listed_names(
    r"\cdot \times \frac \angle \overline \vec \alpha \beta \gamma \delta \theta \lambda \mu \phi \varphi \omega"
    r" \sigma \rho \tau"
)
_ASIDE = listed_names("or and not if is so but")
_OPERATORS = frozenset("-+*/^<>")
_SEVERAL = frozenset({",", ";", "<", ">", r"\le", r"\leq", r"\ge", r"\geq", r"\ne", r"\neq"})


def sides_of(tokens: Sequence[str]) -> list[tuple[list[str], bool]]:
    """The sides of an equality, each with whether the sign behind it is exact. One side for anything else."""
    sides = []
    start = 0
    for i, token in enumerate(tokens):
        if token in _APPROXIMATELY or (token == "=" and is_equality_sign(tokens, i)):
            sides.append((strip_tokens(tokens[start:i], (" ",)), token == "="))
            start = i + 1
    return [*sides, (strip_tokens(tokens[start:], (" ",)), True)]


def is_equality_sign(tokens: Sequence[str], i: int) -> bool:
    """Return True for a `=` that is not a part of `<=`, `:=` or `==`."""
    before = tokens[i - 1] if i else ""
    after = tokens[i + 1] if i + 1 < len(tokens) else ""
    return before not in ("<", ">", "!", ":") and after != "="


def names_quantity(side: Sequence[str]) -> bool:
    """Return True if the left side of an equality names a quantity: `x`, `f(2)`, `AB`, `m+n`, `Total cost`."""
    if is_one_name(side):
        return not has_doubts(side)
    reader = TokenReader(side)
    letters = False
    while not reader.ended:
        if is_word(reader.next) and len(reader.next) <= 3 and reader.next not in _ASIDE:
            letters = True
            reader.position += 1
        elif reader.next in _IN_NAMES:
            letters = letters or is_command(reader.next)
            reader.position += 1
        elif not reader.take_index():
            return False
    return letters


def is_one_name(side: Sequence[str]) -> bool:
    """A letter, a command, several capitals (`AB`), an angle or words, also with an index, primes and an argument."""
    reader = TokenReader(side)
    first = reader.next
    reader.position += 1
    if (first == "m" and reader.take(r"\angle")) or first == r"\angle":
        reader.skip_spaces()
        if not (reader.next.isupper() and is_word(reader.next) and len(reader.next) <= 4):
            return first == r"\angle" and reader.ended
        reader.position += 1
    elif is_word(first) and len(first) >= 3:
        while reader.next == " " and is_word(reader.ahead(1)):
            reader.position += 2
    elif not (is_word(first) and (len(first) == 1 or first.isupper())) and not is_command(first):
        return False
    reader.take_index()
    while reader.take("'"):
        pass
    return reader.ended or _take_argument(reader)


def _take_argument(reader: TokenReader) -> bool:
    """All that is left, as the argument of a function: `(2)`, `(x, y)`."""
    if not reader.take("("):
        return False
    *argument, closing = reader.tokens[reader.position :] or [""]
    return closing == ")" and bool(argument) and all(is_word(t) or is_digits(t) or t in ", " for t in argument)


def has_doubts(tokens: Sequence[str]) -> bool:
    """Return True if a word takes an answer back, or makes it one of several: `maybe`, `either`, `not`."""
    return not DOUBTS.isdisjoint(map(str.casefold, tokens))


def hedges(text: str) -> bool:
    """Return True if the words of a formula take an answer back; see `has_doubts`."""
    return has_doubts(tokenize(unfonted(text)))


def is_quantity(side: Sequence[str]) -> bool:
    """Return True for a side without numbers and operators, but for an index: `y`, `Area`, `a_1`, `f(x)`."""
    found = [i for i, token in enumerate(side) if is_digits(token) or token in _OPERATORS]
    if not found:
        return True
    opening = max((i for i, token in enumerate(side[: found[0]]) if token == "_"), default=None)
    if opening is None:
        return False
    reader = TokenReader(side, opening)
    if not reader.take_index() or found[-1] >= reader.position:
        return False
    while reader.take("'"):
        pass
    return reader.ended or _take_argument(reader)


def is_equation(formula: str) -> bool:
    """Return True if a formula is an equation, such as `x+y = 5`, and not a value with a name, such as `y = 5`."""
    (first, *others) = _exact_sides(tokenize(formula))
    return bool(others) and not is_quantity(strip_tokens(without_fonts(first), (" ",)))


def equation_sides(answer: str, reference: str) -> list[str]:
    r"""The formulas that must equal the reference: both of `x = 2\sqrt{3} = \sqrt{12}`, the last one of
    `1+2+\cdots+n = n(n+1)/2`. The whole answer if the reference is an equation itself."""
    if "=" not in answer:
        return [answer]
    tokens = tokenize(answer)
    first, *others = _exact_sides(tokens)
    if not others or len(_exact_sides(tokenize(reference))) > 1 or not _SEVERAL.isdisjoint(tokens):
        return [answer]
    named = is_quantity(without_fonts(first)) or names_quantity(first)
    sides = ["".join(side) for side in (others if named else [first, *others])]
    return [side for side in sides[:-1] if not has_dots(side)] + sides[-1:]


def _exact_sides(tokens: Sequence[str]) -> list[list[str]]:
    sides = []
    start = 0
    for i, token in enumerate(tokens):
        if token == "=" and is_equality_sign(tokens, i):
            sides.append(strip_tokens(tokens[start:i], (" ", "\n")))
            start = i + 1
    return [*sides, strip_tokens(tokens[start:], (" ", "\n"))]
