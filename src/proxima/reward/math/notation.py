r"""One notation for formulas: signs, upright constants and sets; and the words in a formula."""

import re
from collections.abc import Iterable, Sequence

from proxima.reward.math.equations import hedges
from proxima.reward.math.latex import (
    BOLD,
    COMMANDS,
    DOTS,
    FONTS,
    FUNCTIONS,
    SWITCHES,
    TEXT_FONTS,
    TokenReader,
    font_groups,
    is_digits,
    is_letter,
    is_word,
    listed_names,
    plain_tokens,
    rewritten,
    rules,
    tokenize,
    unfonted,
    with_replaced_groups,
    without_groups,
)
from proxima.reward.math.numeric_answer import MAX_CHARS, is_unit

EMPTY_SET = r"\emptyset"
ALL_REALS = r"(-\infty,\infty)"
SETS_IN_WORDS = (EMPTY_SET, ALL_REALS)

_EMPTY = (EMPTY_SET, " ")
_LEQ = (r"\leq", " ")
_GEQ = (r"\geq", " ")
_NEQ = (r"\neq", " ")
_ONE_NOTATION = rules(
    {
        ("\u2212",): ("-",),
        ("≤",): _LEQ,
        ("⩽",): _LEQ,
        (r"\le",): _LEQ,
        (r"\leqq",): _LEQ,
        (r"\leqslant",): _LEQ,
        ("≥",): _GEQ,
        ("⩾",): _GEQ,
        (r"\ge",): _GEQ,
        (r"\geqq",): _GEQ,
        (r"\geqslant",): _GEQ,
        (r"\lt",): ("<",),
        (r"\gt",): (">",),
        ("≠",): _NEQ,
        (r"\ne",): _NEQ,
        (r"\not", "="): _NEQ,
        ("∪",): (r"\cup", " "),
        ("∩",): (r"\cap", " "),
        ("∖",): (r"\setminus", " "),
        ("∞",): (r"\infty", " "),
        ("∈",): (r"\in", " "),
        ("ℝ",): (r"\mathbb", "{", "R", "}"),
        ("√",): (r"\sqrt",),
        ("ℯ",): ("e",),
        ("ⅇ",): ("e",),
        ("ⅈ",): ("i",),
        ("∅",): _EMPTY,
        (r"\varnothing",): _EMPTY,
        (r"\{", r"\}"): _EMPTY,
        (r"\left", r"\{", r"\right", r"\}"): _EMPTY,
    }
)
_UPRIGHT = FONTS - BOLD
_PI = r"\pi"
_CONSTANTS = {("e",), ("i",), (_PI,), (_PI, "i"), ("i", _PI), (_PI, "e"), ("e", _PI)}
_REALS = [[r"\R"]] + [
    [font, *letter] for font in (r"\mathbb", r"\mathbf", r"\Bbb") for letter in (["R"], ["{", "R", "}"])
]
_ALL_REALS_IN_WORDS = re.compile(
    r"(?:[a-z] (?:is|can be|=) )?(?:(?:the )?set of (?:all )?|all (?:of )?(?:the )?|any |every )"
    r"real(?:s| numbers?| values?)(?: (?:of )?[a-z])?",
    re.IGNORECASE,
)
_REALS_BUT = re.compile(
    r"(?i:(?:all )?real numbers(?: [a-z])? (?:except|excluding|but|other than)(?: for)?) (?:[A-Za-z] ?= ?)?"
    r"([-0-9./]+(?:(?:, ?| and | or |, and )[-0-9./]+)*)"
)
_EMPTY_IN_WORDS = frozenset({"the empty set", "empty set", "the null set", "null set"})


def normalize_formula(formula: str) -> str:
    r"""The formula with one sign for each relation and set, and `e`, `i` and `\pi` for upright ones (`\mathrm{e}`).

    `\varnothing`, `\{\}` and `\text{the empty set}` become `\emptyset`, `\mathbb{R}` and `\text{all real numbers}`
    the interval from minus to plus infinity.
    """
    tokens = _without_commas_of_thousands(rewritten(tokenize(formula), _ONE_NOTATION))
    if is_all_reals(tokens):
        return ALL_REALS
    formula = "".join(_with_imaginary_units_apart(_with_slanted_constants(tokens)))
    words = " ".join(unfonted(formula).replace("$", "").split()).strip(" .")
    if _ALL_REALS_IN_WORDS.fullmatch(words):
        return ALL_REALS
    match = _REALS_BUT.fullmatch(words)
    if match:
        return rf"{ALL_REALS}\setminus\{{{re.sub(',? (?:and|or) ', ',', match[1])}\}}"
    return EMPTY_SET if words.casefold() in _EMPTY_IN_WORDS else formula


def _without_commas_of_thousands(tokens: list[str]) -> list[str]:
    """The tokens with `1000` for `1{,}000`, of which math-verify makes two numbers."""
    if "{,}" not in tokens:
        return tokens
    kept = []
    for i, token in enumerate(tokens):
        before = "".join(tokens[max(0, i - 1) : i])
        after = "".join(tokens[i + 1 : i + 2])
        if token != "{,}" or not is_digits(before) or not is_digits(after) or len(after) != 3:
            kept.append(token)
    return kept


def is_all_reals(tokens: Sequence[str]) -> bool:
    r"""Return True for `\mathbb{R}`, `\mathbf R`, `x \in \mathbb{R}` and the like."""
    meant = [token for token in tokens if not token.isspace() and token not in (".", "$")]
    if len(meant) > 2 and is_letter(meant[0]) and meant[1] == r"\in":
        meant = meant[2:]
    return meant in _REALS


def _with_slanted_constants(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with `e` for `\mathrm{e}`, `\operatorname e` and `{\rm e}`; `i` and `\pi` likewise."""
    if _UPRIGHT.isdisjoint(tokens):
        return list(tokens)
    slanted: list[str] = []
    reader = TokenReader(tokens)
    while not reader.ended:
        start = reader.position
        grouped = reader.next == "{"
        constant = _take_upright(reader)
        if constant is None:
            reader.position = start + 1
            slanted.append(tokens[start])
            continue
        before = _last_character(slanted)
        if before in ("^", "_") or grouped:
            slanted += ["{", constant, "}"]
            continue
        if before.isalnum():
            slanted.append(" ")
        slanted.append(constant)
        if is_word(reader.next):
            slanted.append(" ")
    return slanted


def _take_upright(reader: TokenReader) -> str | None:
    grouped = reader.take("{")
    if not reader.take(*(SWITCHES - BOLD if grouped else _UPRIGHT)):
        return None
    braced = bool(grouped or reader.take("{"))
    reader.skip_spaces()
    start = reader.position
    for _ in range(2 if braced else 1):
        reader.take("e", "i", _PI)
    constant = reader.tokens[start : reader.position]
    if tuple(token for token in constant if not token.isspace()) not in _CONSTANTS:
        return None
    if braced and not reader.take("}"):
        return None
    return "".join(constant)


def _last_character(tokens: Sequence[str]) -> str:
    """The last character that is no space; empty without one."""
    for token in reversed(tokens[-2:]):
        if not token.isspace():
            return token[-1]
    return ""


def _with_imaginary_units_apart(tokens: Sequence[str]) -> list[str]:
    """The tokens with a space between digits and `i`: math-verify takes 2+3i for real, and 2+3 i not."""
    apart: list[str] = []
    for token in tokens:
        if token == "i" and apart and is_digits(apart[-1]):
            apart.append(" ")
        apart.append(token)
    return apart


def compact_text(formula: str) -> str | None:
    """The formula without typesetting and spaces, with one kind of dots; None for over 4,000 characters."""
    if len(formula) > MAX_CHARS:
        return None
    compact: list[str] = []
    for token in plain_tokens(formula):
        if token == " " or (token == "," and compact[-1:] == ["…"]):
            continue
        if token in DOTS:
            if compact[-1:] == [","]:
                compact.pop()
            token = "…"
        compact.append(token)
    return "".join(compact) or None


_IN_RANGES = frozenset((*",<>=$~()", "\\ ")) | listed_names(
    r"\in \leq \geq \neq \ldots \, \; \: \quad \mathbb \mathbf \Z \N \R \Q \C"
)
_QUALIFIERS = listed_names(
    "all any every some each integer integers real reals number numbers constant constants arbitrary natural positive"
    " negative nonnegative non is a an are the being and in of integration where for with value values whole complex"
    " rational"
)


def without_range(formula: str) -> str:
    r"""The formula without the values that a letter takes: `k\pi` for `k\pi\text{ where }k\in\mathbb{Z}`."""
    tokens = tokenize(formula)
    for group in font_groups(tokens):
        words = group.text.lstrip(" ,\t\n")
        if tokenize(words)[:1] in (["where"], ["for"], ["with"]) and _is_range(words, tokens[group.closing + 1 :]):
            return "".join(tokens[: group.command]).rstrip(" ,;")
    return formula


def _is_range(words: str, rest: Sequence[str]) -> bool:
    """Return True if `where …` only says which values a letter takes."""
    groups = font_groups(rest)
    words = " ".join([words, *(group.text for group in groups)])
    named = words.replace(",", " ").replace(".", " ").split()
    if not all(word in _QUALIFIERS or is_letter(word) for word in named):
        return False
    reader = TokenReader(tokenize(without_groups(rest, groups)))
    while not reader.ended:
        token = reader.next
        if token.isspace() or is_word(token) or is_digits(token) or token in _IN_RANGES:
            reader.position += 1
        elif not _take_number_set(reader):
            return False
    return True


def _take_number_set(reader: TokenReader) -> bool:
    r"""What follows `\mathbb`: `{Z}`, `{Z}^+` or `{Z}_{>0}`."""
    if not (reader.take("{") and reader.take("Z", "N", "Q", "R", "C") and reader.take("}")):
        return False
    if reader.take("^"):
        return bool(reader.take("+", "*"))
    if reader.take("_"):
        braced = reader.take("{")
        while is_word(reader.next) or is_digits(reader.next) or reader.next in (">", "<", "=", " "):
            reader.position += 1
        return not braced or bool(reader.take("}"))
    return True


def without_words(formula: str, reference: str) -> str | None:
    r"""The formula without a unit at its end (`\text{ cm}^2`); None if it has other words, apart from `and`, `or` and
    those of the reference. math-verify would drop everything from the first word on: to it, `\sqrt{2}\text{ or maybe
    }\sqrt{3}` is `\sqrt{2}`, and `2\mathrm{ln}\frac12` is 2. So letters and functions lose their fonts."""
    tokens = _without_unit(tokenize(formula))
    groups = font_groups(tokens)
    if hedges("".join(tokens)) and not hedges(reference):
        return None
    if not groups:
        return "".join(tokens)
    known = [group.text for group in font_groups(tokenize(reference))]
    foreign = [group.text for group in groups if not _connects(group.text) and group.text not in known]
    if not _long_words(foreign) <= _long_words(known) or any(re.search("[0-9,;=]", text) for text in foreign):
        return None
    return with_replaced_groups(tokens, groups, [_in_formula(group.text) for group in groups])


def _without_unit(tokens: list[str]) -> list[str]:
    groups = font_groups(tokens)
    if not groups or tokens[groups[-1].command] not in TEXT_FONTS:
        return tokens
    unit = groups[-1]
    head = "".join(tokens[: unit.command]).strip()
    words = " ".join(re.sub(r"[~\\ $]", " ", unit.text).split())
    if not head or head.endswith(("=", "<", ">")) or not _is_power(tokens[unit.closing + 1 :]):
        return tokens
    return tokenize(head) if words and is_unit(words) else tokens


def _is_power(tokens: Sequence[str]) -> bool:
    """Return True for what may follow a unit: nothing, `^2` or `^{3}`, a period."""
    meant = [token for token in tokens if not token.isspace() and token != "."]
    return meant in ([], ["^", "2"], ["^", "3"], ["^", "{", "2", "}"], ["^", "{", "3", "}"])


def _connects(words: str) -> bool:
    return words.strip(" \t\n,;~\\") in ("and", "or")


def _long_words(texts: Iterable[str]) -> set[str]:
    words = (token.lstrip("\\") for text in texts for token in tokenize(text))
    return {word.casefold() for word in words if is_word(word) and len(word) > 1 and word not in FUNCTIONS}


def _in_formula(text: str) -> str | None:
    """A letter, or a function as its command; None for other words, `and` and `or` among them."""
    word = text.strip()
    if len(word) == 1:
        return f" {word} "
    if word in COMMANDS:
        return f"\\{word} "
    if word in FUNCTIONS:
        return f"\\operatorname{{{word}}}"
    return None
