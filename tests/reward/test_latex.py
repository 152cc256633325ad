"""Tokens of LaTeX: nothing is lost, groups are found at any depth, and every text takes linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.reward.math.latex import (
    COMMANDS,
    FONTS,
    FUNCTIONS,
    SPACING,
    closing_braces,
    font_groups,
    plain_text,
    tokenize,
    unfonted,
    without_groups,
)
from proxima.reward.math.symbolic import Math
from tests.reward.make import completions, prompt

PIECES = [
    r"\frac",
    r"\text{",
    r"\mathrm ",
    "{",
    "}",
    "12",
    "ab",
    " ",
    "\n",
    ".",
    "...",
    "{,}",
    r"\!",
    r"\,",
    "^",
    r"\circ",
]
PIECES += ["$", "é", r"\\", "matrix", "=", r"\left(", r"\{"]


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_the_tokens_joined_are_the_text(pieces):
    text = "".join(pieces)
    if "matrix" in text:
        assert "".join(tokenize(text)) == text
    else:
        assert "".join(tokenize(text)).replace("\\", "") == text.replace("\\", "")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (r"\frac12x", [r"\frac", "12", "x"]),
        (r"25^\circC", ["25", "^", r"\circ", "C"]),
        (r"1{,}000...", ["1", "{,}", "000", "..."]),
        (r"2\\sqrt3", ["2", r"\sqrt", "3"]),
        (r"\begin{pmatrix}1\\x", [r"\begin", "{", "pmatrix", "}", "1", r"\\", "x"]),
        ("\\", ["\\"]),
    ],
)
def test_tokens(text, tokens):
    assert tokenize(text) == tokens


def test_groups_of_a_font_are_the_innermost_ones():
    tokens = tokenize(r"2\text { cm}\sqrt{3}\mathrm{a \textbf{b} c}\text{\displaystyle d}\text")
    groups = font_groups(tokens)
    assert [group.text for group in groups] == [" cm", "b", r"\displaystyle d"]
    assert without_groups(tokens, groups) == r"2 \sqrt{3}\mathrm{a   c} \text"
    assert all(closing_braces(tokens)[tokens.index("{", group.command)] == group.closing for group in groups)
    assert unfonted(r"\text{a \textbf{b}{c}}d").split() == ["a", "b", "{c}", "d"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"$\left( \dfrac12 \right)$.", r"\frac{1}{2}"),
        (r"\tfrac{a}2", r"\frac{a}{2}"),
        (r"\frac123", r"\frac{1}{2}3"),
        (r"45^{\circ}\,\text{C}.", "45 degrees C"),
        (r"1\!2{,}000\%", "12,000%"),
        ("**(x)**", "x"),
        ("(a)(b)", "(a)(b)"),
    ],
)
def test_plain_text_has_no_typesetting(text, plain):
    assert plain_text(text) == plain


def test_the_lists_of_names_agree():
    assert COMMANDS <= FUNCTIONS
    assert FONTS.isdisjoint(SPACING)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["61", "B", r"\text{even}", r"2\sqrt{3}", r"(-\infty,2]\cup[3,\infty)"])
@pytest.mark.parametrize(
    "piece", [r"\mathrm ", "{", r"\text{a}", "x<1,", r"\text{ where }k", r"\frac{d}{", "1,000", "'"]
)
def test_a_text_of_any_length_takes_linear_time(answer, piece):
    """60,000 characters in a box take some 30 ms; in quadratic time it was half a minute."""
    text = rf"\boxed{{x={piece * (60_000 // len(piece))}5}}"
    start = time.process_time()
    try:
        (score,) = Math().score(prompt(answer), completions(text))
        assert score.correct is not True
    except ValueError as error:
        assert "not evaluated" in str(error)
    assert time.process_time() - start < 5
