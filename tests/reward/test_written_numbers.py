"""Laws of a number as written: its value is that of the formula, in every form, and what no person writes is none."""

from decimal import Decimal
from fractions import Fraction
from itertools import product

import pytest

from proxima.reward.math.arithmetic import eval_arithmetic
from proxima.reward.math.latex import tokenize
from proxima.reward.math.numeric_answer import is_unit, parse_number, same_number


def value_of(text):
    number = parse_number(text)
    return None if number is None else number.value


@pytest.mark.parametrize(
    "form", ["{}{} {}/{}", r"{}{}\frac{{{}}}{{{}}}", r"{}{} \frac {{{}}} {{{}}}", r"{}{}\tfrac{}{}"]
)
def test_a_mixed_number_is_the_sum_of_a_whole_and_a_part_below_1(form):
    """3 5/2 is none: it may be 3 · 5/2, 35/2 or a slip. So is 3 2/2, and 3 1/0."""
    for sign, whole, top, bottom in product(("", "-", "+"), (1, 3), range(7), range(5)):
        proper = top < bottom
        value = Fraction(whole) + Fraction(top, bottom) if proper else None
        if value is not None and sign == "-":
            value = -value
        text = form.format(sign, whole, top, bottom)
        assert value_of(text) == value, text


@pytest.mark.parametrize("form", ["{}/{}", r"\frac{{{}}}{{{}}}", r"\dfrac {{{}}}{{{}}}"])
def test_a_fraction_is_finished_unless_it_is_a_division_still_to_do(form):
    for top, bottom in product(range(10), range(6)):
        text = form.format(top, bottom)
        number = parse_number(text)
        if bottom == 0:
            assert number is None, text
        else:
            done = top % bottom != 0 or bottom == 1
            assert (number.value, number.finished, number.places) == (Fraction(top, bottom), done, None), text


def test_an_even_number_of_minus_signs_is_none():
    for sign, minus, over in product(("", "-", "+"), ("", "-"), ("", "-")):
        value = Fraction(1, 2) * (-1) ** sum(each == "-" for each in (sign, minus, over))
        assert value_of(rf"{sign}${minus}\frac{{{over}1}}{{2}}") == value, (sign, minus, over)
    assert value_of(r"3\frac{-1}{2}") is None


@pytest.mark.parametrize(
    ("text", "value", "places"),
    [
        ("61", 61, None),
        ("61.", 61, None),
        ("61.0", 61, 1),
        (".25", Fraction(1, 4), 2),
        ("1,234,567.50", Fraction("1234567.5"), 2),
        ("1 234 567", 1234567, None),
        (r"1{,}000", 1000, None),
        (r"0.\overline{3}", Fraction(1, 3), None),
        (r"0.1\overline{6}", Fraction(1, 6), None),
        (r"2.\overline{142857}", Fraction(15, 7), None),
        (r"1.5 \times 10^{3}", 1500, None),
        (r"1.5 \cdot 10^3", 1500, None),
        (r"9.99 × 10^{-2}", Fraction("0.0999"), None),
        ("2.5e-1", Fraction(1, 4), None),
        ("25E1", 250, None),
        (r"10 \times 10^{3}", None, None),
        (r"54 * 10^2", None, None),
        ("12,34", None, None),
        ("1,2345", None, None),
        ("1.2.3", None, None),
    ],
)
def test_decimals_and_powers_of_ten(text, value, places):
    number = parse_number(text)
    assert value_of(text) == value
    if number is not None:
        assert number.places == places and not number.percent and number.finished
        assert parse_number(f"-{text}").value == -value
        assert parse_number(f"{text}%").percent and parse_number(f"{text} percent").value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("54 + 7 = 61", 61),
        ("54 + 8 = 61", None),
        ("x = 54 + 7 = 61", 61),
        ("x = 54 + 8 = 61", None),
        ("x + 1 = 61", None),
        ("1/3 = 0.333333", Fraction("0.333333")),
        ("1/3 = 0.33333", None),
        (r"1/3 \approx 0.3", Fraction("0.3")),
        (r"5/2 = 2.5 \approx 3", 3),
        (r"5/2 = 2.6 \approx 3", 3),
        ("= 61", 61),
        ("5 = = 61", None),
    ],
)
def test_of_several_sides_the_last_counts_if_what_can_be_computed_agrees(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("0.333333", "1/3", True),  # six places, rounded
        ("0.33333", "1/3", False),
        ("0.333334", "1/3", False),
        ("0.3333333", "0.333333", True),  # the fewer places of the two
        ("0.000012", "0.0000123", False),  # alike at six places, but not in the first five digits that count
        ("0.0000123456", "0.00001234561", True),
        ("1234567.000001", "1234567.0000012", True),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.5", "50%", True),
        ("50%", "5", False),
        ("50%", "5000", False),
        ("x = 5", "x=5", True),
        ("x = 5", "y = 5", False),
        ("x = 5", "5", True),
        ("a_1 = 5", "a _ 1 = 5", True),
    ],
)
def test_two_numbers_are_the_same(first, second, same):
    one, other = parse_number(first), parse_number(second)
    assert same_number(one, other) is same and same_number(other, one) is same


@pytest.mark.parametrize("leading", ["1", "3.1622", "9.9", "9.9995"])
@pytest.mark.parametrize("exponent", range(-12, 4))
def test_decimals_are_compared_at_six_places_and_five_digits(leading, exponent):
    """Whichever is finer; to a fifth of the last place they are the same, and to seven tenths of it not."""
    places = max(6, 4 - exponent)
    first = Decimal(leading).scaleb(exponent)
    written = f"{first:.{max(6, len(leading.partition('.')[2]) - exponent)}f}"
    for part, same in (("0.2", True), ("0.7", False), ("-0.2", True), ("-0.7", False)):
        second = first + Decimal(part).scaleb(-places)
        if second >= Decimal(1).scaleb(exponent):  # one digit less begins another place
            assert same_number(parse_number(written), parse_number(f"{second:f}")) is same, (written, second)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^10", 1024),
        ("2^{-2}", Fraction(1, 4)),
        ("2^99", 2**99),
        ("2^100", None),
        ("2^-100", None),
        ("2^(1/2)", None),
        ("-2^2", -4),
        ("+7 - 10", -3),
        ("2 x 3 × 4", 24),
        (r"\frac{1}{2} \cdot 6 ÷ 3", 1),
        (r"{1 + 2} \times 3", 9),
        ("007 + $1,000", 1007),
        ("1/0", None),
        ("7 // 2", None),
        ("7 % 2", None),
        ("2 +", None),
        ("1" + " + 1" * 49, 50),  # 197 characters
        ("1" + " + 1" * 50, None),
        (f"{10**15}^2", 10**30),
        (f"({10**30})^1", 10**30),
        (f"({10**30 + 1})^1", None),
    ],
)
def test_plain_arithmetic_within_its_bounds(text, value):
    assert eval_arithmetic(tokenize(text)) == value


@pytest.mark.parametrize(
    ("unit", "fits"),
    [
        (None, True),
        (" dollars", True),
        (" cm^2", True),
        (" cm^{3}", True),
        (" cm^4", False),
        (" miles per hour", True),
        (" small red apples and pears", False),  # a second thing
        (" small red apples from here", True),
        (" small red apples from out there", False),  # six words
        (" hundred", False),
        (" xy", False),
    ],
)
def test_what_may_follow_a_number(unit, fits):
    assert is_unit(unit) is fits


def test_a_text_of_more_than_4000_characters_is_no_number():
    assert value_of("1" * 4000) == int("1" * 4000)
    assert value_of("1" * 4001) is None
    assert value_of(r"1 + \ldots = 5") == 5
    assert value_of(r"1, \ldots") is None
