r"""A plain number as an answer is written: `61`, `1{,}000`, `\frac{1}{2}`, `3\tfrac12`, `x = 5\text{ cm}`; no sum, no
power.

Everything here is exact and takes linear time. An operation is never carried out to see whether it comes out right,
except to check the sides of an equality against each other.
"""

import ast
import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 4000  # characters; Python reads no integer of over 4,300 digits

_WRAPPED = re.compile(r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|boldsymbol)\s*\{([^{}]*)\}")
_GAP = re.compile(r"\\[,;: ]|\\(?:quad|qquad|left|right|displaystyle)(?![A-Za-z])|~|\s+")
_DEGREES = re.compile(r"\s?\^\s?\{?\s?\\circ\s?\}?|\s?°|\\degrees?(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac ?([0-9]) ?([0-9])|\\frac ?([0-9]) ?\{|\\frac ?(\{[^{}]*\}) ?([0-9])")
_EQUALS = re.compile(r"(\\(?:approx|simeq|sim|doteq)(?![A-Za-z])|≈)|(?<![<>!:])=(?!=)")

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,3}(?:[ ][0-9]{3})++|[0-9]++)(?![0-9])(?:\.[0-9]*+)?|\.[0-9]++)"
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
_UNIT_WORD = re.compile(rf"{_SHORT_UNIT}|(?!(?i:{_NO_UNIT})\Z)[A-Za-z]{{3,}}")
_NAME = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+|(?:m ?)?\\angle ?[A-Z]{1,4}|[A-Z]{2,4}|[A-Za-z]{3,}(?: [A-Za-z]+)*)"
    r"(?: ?_ ?(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?'*(?: ?\([A-Za-z0-9, ]+\))?"
)


@dataclass(frozen=True)
class WrittenNumber:
    """A number that somebody wrote down.

    Args:
        value: exactly what is written.
        places: decimals written; none: an integer or a fraction.
        percent: a percent sign stands behind it.
        name: what it is said to be the value of, as `x` in `x = 5`; none: nothing.
        finished: False for a fraction whose value is whole, as 122/2: a division that is still to be done.
    """

    value: Fraction
    places: int | None = None
    percent: bool = False
    name: str | None = None
    finished: bool = True


def parse_number(text: str) -> WrittenNumber | None:
    r"""The number that a whole text states, or None where it states none: a formula, several numbers, a false equality.

    Read are signs, thousands (`1,000`, `1{,}000`, `1\,000`), decimals, `0.\overline{3}`, fractions, mixed numbers,
    percent, scientific notation with a factor below 10, currency before or behind, units behind (`61 dollars`, `5\text{
    cm}^2`, `45^\circ`), a name before (`x = 61`), outer brackets. Of `54 + 7 = 61` the last side counts, where the
    sides that plain arithmetic can evaluate agree.
    """
    if len(text) > LONGEST:
        return None
    text = strip_markup(text)
    parts = _EQUALS.split(text)
    sides, exact = [side.strip() for side in parts[::2]], [sign is None for sign in parts[1::2]]
    number = _parse_side(sides[-1])
    if number is None or len(sides) == 1:
        return number
    name = None
    for i, side in enumerate(sides[:-1]):
        other = _parse_side(side)
        value = other.value if other else eval_arithmetic(side)
        if i == 0 and (not side or _NAME.fullmatch(side)):
            name = side or None
        elif value is not None:
            if all(exact[i:]) and not _same_value(
                value, number.value, _fewer(other.places if other else None, number.places)
            ):
                return None
        elif re.search(r"(?<![\\A-Za-z])[A-Za-z]", side) or not side:
            return None  # an equation to be solved
    return WrittenNumber(number.value, number.places, number.percent, name, number.finished)


def same_number(gold: WrittenNumber, answer: WrittenNumber) -> bool:
    """Equal in value, of decimals of six places or more up to rounding; 50 % is 50 and 0.5. Two different names make
    two answers."""
    if gold.name and answer.name and gold.name.replace(" ", "") != answer.name.replace(" ", ""):
        return False
    places = _fewer(gold.places, answer.places)
    pairs = [(gold.value, answer.value)]
    if gold.percent != answer.percent:
        pairs.append((gold.value / 100, answer.value) if gold.percent else (gold.value, answer.value / 100))
    return any(_same_value(one, other, places) for one, other in pairs)


def strip_markup(text: str) -> str:
    """The text without what only sets it: dollars around it, fonts, spacing, a final period, outer brackets."""
    text = (
        unwrap_fonts(text)
        .replace("\\!", "")
        .replace("{,}", ",")
        .replace("\\$", "$")
        .replace("\\%", "%")
        .replace("\u2212", "-")
        .replace(" \u2013 ", " - ")
    )
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", _DEGREES.sub(" degrees ", text))
    text = _SHORT_FRACTION.sub(_with_braces, _GAP.sub(" ", text)).strip(" *")
    for _ in range(3):
        text = text.strip().removesuffix(".").strip()
        for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("(", ")"), ("{", "}")):
            inside = text[len(opening) : -len(closing)]
            if (
                len(text) > 2
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inside
                and closing not in inside
            ):
                text = inside.strip()
    return text


def unwrap_fonts(text: str) -> str:
    r"""`\text{…}` and the like as what stands in them."""
    for _ in range(2):
        text = _WRAPPED.sub(r" \1 ", text)
    return text


def _with_braces(match: re.Match[str]) -> str:
    over, under, only_over, braced, behind = match.groups()
    if over:
        return f"\\frac{{{over}}}{{{under}}}"
    return f"\\frac{{{only_over}}}{{" if only_over else f"\\frac{braced}{{{behind}}}"


def _parse_side(side: str) -> WrittenNumber | None:
    """One side of an equality as a number."""
    match = _VALUE.fullmatch(side)
    if match is None or not _is_unit(match["unit"]):
        return None
    signs = (match["sign"] == "-") + (match["minus"] == "-") + (match["minus_over"] == "-")
    over, under = match["over"] or match["over_too"], match["under"] or match["under_too"]
    places, finished = None, True
    if over:
        top, bottom, whole = _digits(over), _digits(under), int(match["whole"] or match["whole_too"] or 0)
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
            value, places = value * Fraction(10) ** int(power or match["exponent"]), None
    return WrittenNumber(-value if signs % 2 else value, places, bool(match["percent"]), None, finished)


def _is_unit(unit: str | None) -> bool:
    if unit is None:
        return True
    words = re.findall("[A-Za-z]+", unit)
    return len(words) <= 5 and all(map(_UNIT_WORD.fullmatch, words)) and _UNIT.fullmatch(unit) is not None


def _digits(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def _fewer(one: int | None, other: int | None) -> int | None:
    return min((places for places in (one, other) if places is not None), default=None)


def _same_value(one: Fraction, other: Fraction, places: int | None) -> bool:
    """Equal, or rounded alike where one of them has at least six decimals."""
    return one == other or (places is not None and places >= 6 and round(one, places) == round(other, places))


def eval_arithmetic(side: str) -> Fraction | None:
    """The value of a sum, product, quotient or small power of plain numbers; None: it is something else."""
    text = re.sub(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}", r"((\1)/(\2))", side)
    for written, meant in (
        ("\\times", "*"),
        ("\\cdot", "*"),
        ("×", "*"),
        ("\\div", "/"),
        ("÷", "/"),
        ("^", "**"),
        ("{", "("),
        ("}", ")"),
    ):
        text = text.replace(written, meant)
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
        return -_arithmetic(node.operand) if isinstance(node.op, ast.USub) else _arithmetic(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError("not arithmetic")
    left, right = _arithmetic(node.left), _arithmetic(node.right)
    if isinstance(node.op, ast.Pow):
        if right.denominator > 1 or abs(right) > 99 or max(abs(left.numerator), left.denominator) > 10**30:
            raise ValueError("no small power")
        return left ** int(right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    raise ValueError("not arithmetic")
