r"""Parses one number as people write it: `61`, `1{,}000`, `\frac{1}{2}`, `3\tfrac12`, `x = 5\text{ cm}`.

All parsing is exact and takes linear time. Operations are only evaluated to compare the sides of an equality.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from proxima.reward.math.arithmetic import eval_arithmetic
from proxima.reward.math.equations import DOUBTS, is_one_name, names_quantity, sides_of
from proxima.reward.math.forms import WrittenNumber
from proxima.reward.math.latex import TokenReader, has_dots, is_digits, is_word, listed_names, plain_tokens, tokenize

MAX_CHARS = 4000  # Python parses no integer of over 4,300 digits

_CURRENCIES = ("$", "€", "£", "¥", "₹")
_TIMES = (r"\times", r"\cdot", "×", "*")
_SHORT_UNITS = listed_names(
    "m mm cm dm km in ft yd mi g kg mg lb lbs oz s ms h hr hrs l ml cl L mL cL sq cu A V W J N K C F Hz am pm"
)
_NO_UNITS = listed_names(
    "and not but except plus minus times over divided multiplied mod modulo equals percent more less than squared cubed"
    " factorial choose power root sqrt sin cos tan log exp hundred thousand million billion trillion dozen dozens score"
    " half halves third thirds quarter quarters fifth fifths tenth tenths"
)


def parse_number(text: str, question: str = "") -> WrittenNumber | None:
    r"""The number of which the whole text consists; None for a formula, several numbers or a false equality.

    Reads signs, thousands (`1,000`, `1{,}000`, `1\,000`), decimals, `0.\overline{3}`, fractions, mixed numbers,
    percent, scientific notation with a factor below 10, currency, units (`61 dollars`, `5\text{ cm}^2`, `45^\circ`),
    a name (`x = 61`) or a sum or product of names (`m + n = 61`), outer brackets. Of `54 + 7 = 61` the last side
    counts, if the sides that plain arithmetic can evaluate agree. `x + 1 = 61` is an equation to be solved, hence None,
    unless the question asks for x + 1.
    """
    if len(text) > MAX_CHARS or has_dots(text[text.rfind("=") + 1 :]):
        return None
    *others, (last, _) = sides_of(plain_tokens(text))
    number = _parse_side(last)
    if number is None or not others:
        return number
    name = None
    for i, (side, _) in enumerate(others):
        written = "".join(side)
        other = _parse_side(side)
        value = eval_arithmetic(side) if other is None else other.value
        if i == 0 and (not side or names_quantity(side) or is_asked(written, question)):
            name = written or None
        elif value is not None:
            places = _fewer(other.places if other else None, number.places)
            if all(e for _, e in others[i:]) and not _same_value(value, number.value, places):
                return None
        elif not side or any(map(is_word, side)):
            return None  # an equation to be solved
    return WrittenNumber(number.value, number.places, number.percent, name, number.finished)


def is_sum_of_names(name: str | None) -> bool:
    """Return True for an expression as a name: as a row's answer, `m+n = 61` is an equation, unless asked for."""
    return name is not None and not is_one_name(tokenize(name))


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


def _parse_side(side: Sequence[str]) -> WrittenNumber | None:
    """The number on one side of an equality; None if the side is anything else."""
    if not any(map(is_digits, side)):
        return None
    for parse in (_take_fraction, _take_quotient, _take_decimal):
        reader = TokenReader(side)
        negative = reader.take("-", "+") == "-"
        reader.take(*_CURRENCIES)
        negative ^= bool(reader.take("-"))
        number = parse(reader)
        if number is None:
            continue
        percent = bool(reader.take("%", "percent", "Percent"))
        reader.take(*_CURRENCIES)
        if not is_unit_of(reader.tokens[reader.position :]):
            continue
        if isinstance(number, _Impossible):
            return None
        value = -number.value if negative else number.value
        return WrittenNumber(value, number.places, percent, None, number.finished)
    return None


class _Impossible:
    """What is written as a number and is none: `1/0`, `3 5/2`, `54 * 10^2`."""


def _take_fraction(reader: TokenReader) -> WrittenNumber | _Impossible | None:
    r"""`\frac{1}{2}` or `3\frac{1}{2}`."""
    reader.skip_spaces()
    whole = reader.take_digits()
    if not reader.take_all(r"\frac", "{"):
        return None
    minus = bool(reader.take("-"))
    over = _decimal(reader)
    if over is None or not reader.take_all("}", "{"):
        return None
    under = _decimal(reader)
    if under is None or not reader.take("}"):
        return None
    if whole and minus:
        return _Impossible()
    return _quotient(whole, -over if minus else over, under)


def _take_quotient(reader: TokenReader) -> WrittenNumber | _Impossible | None:
    """`1/2` or `3 1/2`."""
    reader.skip_spaces()
    start = reader.position
    whole = reader.take_digits()
    over = _decimal(reader) if whole and reader.next == " " else None
    if over is None or not reader.take("/"):
        reader.position = start
        whole = ""
        over = _decimal(reader)
        if over is None or not reader.take("/"):
            return None
    under = _decimal(reader)
    if under is None:
        return None
    return _quotient(whole, over, under)


def _quotient(whole: str, over: Fraction, under: Fraction) -> WrittenNumber | _Impossible:
    if under == 0 or (whole and over >= under):
        return _Impossible()
    value = int(whole or 0) + over / under
    return WrittenNumber(value, finished=value.denominator > 1 or under == 1)


def _take_decimal(reader: TokenReader) -> WrittenNumber | _Impossible | None:
    r"""`61.0`, `0.\overline{3}`, `3 \times 10^5` or `3e5`."""
    start = reader.position
    value = _decimal(reader)
    if value is None:
        return None
    written = "".join(reader.tokens[start : reader.position])
    decimals = written.partition(".")[2]
    places = len(decimals) or None
    if reader.take_all(r"\overline", "{"):
        period = reader.take_digits()
        if not (period and reader.take("}")):
            return None
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
        places = None
    power = _take_power_of_ten(reader)
    if power is not None and value >= 10:
        return _Impossible()  # 54 * 10^2 is a product
    if power is None:
        power = _take_exponent(reader)
    if power is not None:
        value *= Fraction(10) ** power
        places = None
    return WrittenNumber(value, places)


def _take_power_of_ten(reader: TokenReader) -> int | None:
    r"""The power of `\times 10^{5}`; None, and nothing is taken, without one."""
    start = reader.position
    if reader.take(*_TIMES) and reader.take("10") and reader.take("^"):
        braced = reader.take("{")
        sign = reader.take("-", "+") if braced else reader.take("-")
        reader.skip_spaces()
        digits = reader.take_digits(most=3)
        if digits and (not braced or reader.take("}")):
            return int(sign + digits)
    reader.position = start
    return None


def _take_exponent(reader: TokenReader) -> int | None:
    """The exponent of `3e5`; None, and nothing is taken, without one."""
    start = reader.position
    if reader.next in ("e", "E"):
        reader.position += 1
        sign = ""
        if reader.next in ("+", "-"):
            sign = reader.next
            reader.position += 1
        digits = reader.take_digits(most=3)
        if digits:
            return int(sign + digits)
    reader.position = start
    return None


def _decimal(reader: TokenReader) -> Fraction | None:
    """`1234`, `1,234.5`, `1 234` or `.5`; else None."""
    reader.skip_spaces()
    digits = reader.take_digits()
    if digits and len(digits) <= 3 and reader.next in (",", " "):
        separator = reader.next
        while reader.next == separator and is_digits(reader.ahead(1)) and len(reader.ahead(1)) == 3:
            digits += reader.ahead(1)
            reader.position += 2
    decimals = ""
    if reader.next == ".":
        if not (digits or is_digits(reader.ahead(1))):
            return None
        reader.position += 1
        decimals = reader.take_digits()
    if not (digits or decimals):
        return None
    return Fraction(f"{digits or 0}.{decimals or 0}")


def is_unit(unit: str | None) -> bool:
    """Return True if these words can follow a number without a change of its value: a unit, or what is counted."""
    return unit is None or is_unit_of(tokenize(unit))


def is_unit_of(tokens: Sequence[str]) -> bool:
    """Return True for at most five words with spaces, points, dashes or slashes between, squared or cubed, or none."""
    words = 0
    separated = True
    reader = TokenReader(tokens)
    reader.skip_spaces()
    while not reader.ended:
        token = reader.next
        reader.position += 1
        if is_word(token):
            words += 1
            if not separated or words > 5 or not _is_unit_word(token):
                return False
            separated = False
        elif token == "^" and words:
            if not (reader.take("2", "3") or reader.take_all("{", "2", "}") or reader.take_all("{", "3", "}")):
                return False
            separated = False
        elif token in (" ", ".", "/", "-") and words:
            separated = True
        else:
            return False
    return not tokens or (words > 0 and tokens[-1] not in ("/", "-"))


def _is_unit_word(word: str) -> bool:
    if word in _SHORT_UNITS:
        return True
    folded = word.casefold()
    return len(word) >= 3 and folded not in _NO_UNITS and folded not in DOUBTS


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
