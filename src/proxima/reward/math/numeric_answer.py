r"""Parses one number as people write it: `61`, `1{,}000`, `\frac{1}{2}`, `3\tfrac12`, `x = 5\text{ cm}`.

All parsing is exact and takes linear time. Operations are only evaluated to compare the sides of an equality.
"""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 4000  # Python parses no integer of over 4,300 digits

_FONT = re.compile(r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|boldsymbol)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;: ]|\\(?:quad|qquad|left|right|displaystyle)(?![A-Za-z])|~|\s+")
_DEGREES = re.compile(r"\s?\^\s?\{?\s?\\circ\s?\}?|\s?°|\\degrees?(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac ?([0-9]) ?([0-9])|\\frac ?([0-9]) ?\{|\\frac ?(\{[^{}]*\}) ?([0-9])")
_EQUALS = re.compile(r"(\\(?:approx|simeq|sim|doteq)(?![A-Za-z])|≈)|(?<![<>!:])=(?!=)")

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,3}(?:[ ][0-9]{3})++|[0-9]++)(?![0-9])(?:\.[0-9]*+)?|\.[0-9]++)"
_MARKUP = {"\\!": "", "{,}": ",", "\\$": "$", "\\%": "%", "\u2212": "-", " \u2013 ": " - "}
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_OPERATORS = {"\\times": "*", "\\cdot": "*", "×": "*", "\\div": "/", "÷": "/", "^": "**", "{": "(", "}": ")"}
_VALUE = re.compile(
    rf"""(?P<sign>[-+]?)[ ]?(?P<currency>[$€£¥₹]?)[ ]?(?P<minus>-?)[ ]?
    (?:(?:(?P<whole>[0-9]+)[ ]?)?\\frac[ ]?\{{[ ]?(?P<minus_over>-?)(?P<over>{_DECIMAL})[ ]?\}}[ ]?\{{[ ]?
        (?P<under>{_DECIMAL})[ ]?\}}
      |(?:(?P<whole_too>[0-9]+)[ ])?(?P<over_too>{_DECIMAL})[ ]?/[ ]?(?P<under_too>{_DECIMAL})
      |(?P<decimal>{_DECIMAL})(?:\\overline[ ]?\{{(?P<repeats>[0-9]+)\}})?
       (?:[ ]?(?:\\times|\\cdot|×|\*)[ ]?10[ ]?\^[ ]?(?:\{{(?P<power>[-+]?[0-9]{{1,3}})\}}
           |(?P<power_too>-?[0-9]{{1,3}}))
         |[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?)
    [ ]?(?P<percent>%|[Pp]ercent(?![A-Za-z]))?[ ]?[$€£¥₹]?(?P<unit>[ ]?[A-Za-z][A-Za-z0-9 ./^{{}}-]*)?""",
    re.VERBOSE,
)
_UNIT = re.compile(r"[ ]?[A-Za-z]+(?:(?:[ ./-]+[A-Za-z]+)|[ ]?\^[ ]?(?:[23]|\{[23]\}))*[ .]*")
_SHORT_UNIT = r"[mcdk]?m|in|ft|yd|mi|[km]?g|lbs?|oz|m?s|hr?|hrs|[mc]?[lL]|sq|cu|[AVWJNKCF]|Hz|[ap]m"
_NO_UNIT = (
    "and|not|but|except|plus|minus|times|over|divided|multiplied|mod|modulo|equals|percent|more|less|than|squared|cubed|factorial|choose|power|"
    "root|sqrt|sin|cos|tan|log|exp|hundred|thousand|million|billion|trillion|dozens?|score|half|halves|thirds?|quarters?|fifths?|tenths?"
)
_DOUBT = (
    "maybe|perhaps|possibly|probably|alternatively|otherwise|either|neither|nor|unless|versus|not|unsure|uncertain|"
    "guess|wrong|incorrect|false"
)
DOTS = re.compile(r"\\(?:[lcdvh]?dots[bcmio]?|(?:math|text)ellipsis)(?![A-Za-z])|\.\.\.|[…⋯]")
HEDGES = re.compile(rf"(?<!\\)\b(?i:{_DOUBT})\b")
_UNIT_WORD = re.compile(rf"{_SHORT_UNIT}|(?!(?i:{_NO_UNIT}|{_DOUBT})\Z)[A-Za-z]{{3,}}")
_NAME = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+|(?:m ?)?\\angle ?[A-Z]{1,4}|[A-Z]{2,4}|[A-Za-z]{3,}(?: [A-Za-z]+)*)"
    r"(?: ?_ ?(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?'*(?: ?\([A-Za-z0-9, ]+\))?"
)
_EXPRESSION = re.compile(
    r"(?:[-+*/(){}|' ]|(?<![A-Za-z])[A-Za-z]{1,3}(?![A-Za-z])|_ ?(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\})"
    r"|\\(?:cdot|times|frac|angle|overline|vec|alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|omega|sigma|rho|tau|left|right)(?![A-Za-z]))++"
)
_ASIDE = re.compile(r"(?<![A-Za-z\\])(?:or|and|not|if|is|so|but)(?![A-Za-z])")


@dataclass(frozen=True)
class WrittenNumber:
    """A number as written.

    Args:
        value: the exact value.
        places: decimal places written; none: an integer or a fraction.
        percent: a percent sign follows.
        name: name of the quantity, such as `x` in `x = 5`; none: unnamed.
        finished: False for a fraction with an integer value, such as 122/2: an unfinished division.
    """

    value: Fraction
    places: int | None = None
    percent: bool = False
    name: str | None = None
    finished: bool = True


def parse_number(text: str, question: str = "") -> WrittenNumber | None:
    r"""The number of which the whole text consists; None for a formula, several numbers or a false equality.

    Reads signs, thousands (`1,000`, `1{,}000`, `1\,000`), decimals, `0.\overline{3}`, fractions, mixed numbers,
    percent, scientific notation with a factor below 10, currency, units (`61 dollars`, `5\text{ cm}^2`, `45^\circ`),
    a name (`x = 61`) or a sum or product of names (`m + n = 61`), outer brackets. Of `54 + 7 = 61` the last side
    counts, if the sides that plain arithmetic can evaluate agree. `x + 1 = 61` is an equation to be solved, hence None,
    unless the question asks for x + 1.
    """
    if len(text) > MAX_CHARS or DOTS.search(text, text.rfind("=") + 1):
        return None
    text = strip_markup(text)
    parts = _EQUALS.split(text)
    sides = [side.strip() for side in parts[::2]]
    exact = [sign is None for sign in parts[1::2]]
    number = _parse_side(sides[-1])
    if number is None or len(sides) == 1:
        return number
    name = None
    for i, side in enumerate(sides[:-1]):
        other = _parse_side(side)
        value = other.value if other else eval_arithmetic(side)
        if i == 0 and (not side or is_name(side) or is_asked(side, question)):
            name = side or None
        elif value is not None:
            places = _fewer(other.places if other else None, number.places)
            if all(exact[i:]) and not _same_value(value, number.value, places):
                return None
        elif re.search(r"(?<![\\A-Za-z])[A-Za-z]", side) or not side:
            return None  # an equation to be solved
    return WrittenNumber(number.value, number.places, number.percent, name, number.finished)


def is_name(side: str) -> bool:
    """Return True if the left side of an equality names a quantity: `x`, `f(2)`, `AB`, `m+n`, `Total cost`."""
    if _NAME.fullmatch(side):
        return not HEDGES.search(side)
    return (
        _EXPRESSION.fullmatch(side) is not None and re.search("[A-Za-z]", side) is not None and not _ASIDE.search(side)
    )


def is_sum_of_names(name: str | None) -> bool:
    """Return True for an expression as a name: as a row's answer, `m+n = 61` is an equation, unless asked for."""
    return name is not None and _NAME.fullmatch(name) is None


def asked_number(answer: str, question: str) -> WrittenNumber | None:
    """61 for a row's answer `m+n = 61`, if the question asks for m+n."""
    number = parse_number(answer, question)
    if number is not None and number.name and is_asked(number.name, question):
        return number
    return None


def is_asked(side: str, question: str) -> bool:
    """Return True if the question asks for the value of this formula: `Find $10a+b$`, and not `if $10a+b=61$`."""
    if not (1 < len(side) <= 100 and question):
        return False
    formula = r"\s*".join(map(re.escape, side.replace(" ", "")))
    return (
        re.search(rf"(?<![A-Za-z0-9^_+*/}}-])\s*{formula}(?!\s*(?:[A-Za-z0-9^_=<>+*/-]|\\[a-z]))", question) is not None
    )


def same_number(reference: WrittenNumber, answer: WrittenNumber) -> bool:
    """Compare values and names; decimals of six places or more are compared rounded; 50 % equals 50 and 0.5."""
    if reference.name and answer.name and reference.name.replace(" ", "") != answer.name.replace(" ", ""):
        return False
    places = _fewer(reference.places, answer.places)
    pairs = [(reference.value, answer.value)]
    if reference.percent != answer.percent:
        percents = (reference.value / 100, answer.value), (reference.value, answer.value / 100)
        pairs.append(percents[answer.percent])
    return any(_same_value(first, second, places) for first, second in pairs)


def strip_markup(text: str) -> str:
    """The text without typesetting: outer dollars and brackets, fonts, spacing, a final period."""
    text = unwrap_fonts(text)
    for markup, replacement in _MARKUP.items():
        text = text.replace(markup, replacement)
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", _DEGREES.sub(" degrees ", text))
    text = _SHORT_FRACTION.sub(_with_braces, _SPACING.sub(" ", text)).strip(" *")
    for _ in range(3):
        text = text.strip().removesuffix(".").strip()
        for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("(", ")"), ("{", "}")):
            inside = text[len(opening) : -len(closing)]
            enclosed = len(text) > 2 and text.startswith(opening) and text.endswith(closing)
            if enclosed and opening not in inside and closing not in inside:
                text = inside.strip()
    return text


def unwrap_fonts(text: str) -> str:
    r"""The text with `\text{…}` and the like replaced by their contents."""
    for _ in range(2):
        text = _FONT.sub(r" \1 ", text)
    return text


def _with_braces(match: re.Match[str]) -> str:
    over, under, only_over, braced, behind = match.groups()
    if over:
        return f"\\frac{{{over}}}{{{under}}}"
    if only_over:
        return f"\\frac{{{only_over}}}{{"
    return f"\\frac{braced}{{{behind}}}"


def _parse_side(side: str) -> WrittenNumber | None:
    """The number on one side of an equality; None if the side is anything else."""
    match = _VALUE.fullmatch(side)
    if match is None or not is_unit(match["unit"]):
        return None
    signs = (match["sign"] == "-") + (match["minus"] == "-") + (match["minus_over"] == "-")
    over, under = match["over"] or match["over_too"], match["under"] or match["under_too"]
    places = None
    finished = True
    if over:
        top = _digits(over)
        bottom = _digits(under)
        whole = int(match["whole"] or match["whole_too"] or 0)
        mixed = bool(match["whole"] or match["whole_too"])
        if bottom == 0 or (mixed and (top >= bottom or match["minus_over"])):
            return None
        value = whole + top / bottom
        finished = value.denominator > 1 or bottom == 1
    else:
        value = _digits(match["decimal"])
        _, point, decimals = match["decimal"].partition(".")
        places = len(decimals) if point and decimals else None
        if match["repeats"]:
            period = match["repeats"]
            value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
            places = None
        power = match["power"] or match["power_too"]
        if power and value >= 10:
            return None  # 54 * 10^2 is a product
        if power or match["exponent"]:
            value = value * Fraction(10) ** int(power or match["exponent"])
            places = None
    return WrittenNumber(-value if signs % 2 else value, places, bool(match["percent"]), None, finished)


def is_unit(unit: str | None) -> bool:
    """Return True if these words can follow a number without a change of its value: a unit, or what is counted."""
    if unit is None:
        return True
    words = re.findall("[A-Za-z]+", unit)
    return len(words) <= 5 and all(map(_UNIT_WORD.fullmatch, words)) and _UNIT.fullmatch(unit) is not None


def _digits(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def _fewer(first: int | None, second: int | None) -> int | None:
    return min((places for places in (first, second) if places is not None), default=None)


def _same_value(first: Fraction, second: Fraction, places: int | None) -> bool:
    """Compare exactly, or after rounding to `places` if these are at least six, and to five significant digits."""
    if first == second or places is None or places < 6:
        return first == second
    magnitude = max(abs(first), abs(second))
    exponent = int((magnitude.numerator.bit_length() - magnitude.denominator.bit_length()) * 0.30103) + 1
    while Fraction(10) ** exponent > magnitude:
        exponent -= 1
    places = max(places, 4 - exponent)
    return round(first, places) == round(second, places)


def eval_arithmetic(side: str) -> Fraction | None:
    """The value of a sum, product, quotient or small power of plain numbers; None for anything else."""
    text = re.sub(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}", r"((\1)/(\2))", side)
    for sign, replacement in _OPERATORS.items():
        text = text.replace(sign, replacement)
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", text.replace(",", "").replace("$", "").replace(" x ", "*"))
    if len(text) > 200 or not re.fullmatch(r"[-+*/(). 0-9]+", text):
        return None
    try:
        return _arithmetic(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _arithmetic(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub):
            return -_arithmetic(node.operand)
        return _arithmetic(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError("not arithmetic")
    left, right = _arithmetic(node.left), _arithmetic(node.right)
    if isinstance(node.op, ast.Pow):
        if right.denominator > 1 or abs(right) > 99 or max(abs(left.numerator), left.denominator) > 10**30:
            raise ValueError("the power is too large")
        return left ** int(right)
    if type(node.op) not in _BINARY:
        raise ValueError("not arithmetic")
    return _BINARY[type(node.op)](left, right)
