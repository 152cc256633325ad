r"""LaTeX as tokens, and the one list of each kind of names: fonts, spacing, functions, dots, signs.

A token is a command (`\frac`), a run of letters, of digits or of white space, three dots, or any other character. The
tokens of a text, joined, are the text. Everything here takes linear time, whatever the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# 25^\circC is a common slip for 25^\circ C
_TOKEN = re.compile(r"\\(?:circ(?=[A-Z])|[A-Za-z]+\*?|.)?|[A-Za-z]+|[0-9]+|\.\.\.|\s+|.", re.DOTALL)

SWITCHES = frozenset({r"\rm", r"\bf", r"\it", r"\sf", r"\tt"})  # {\rm e}: the rest of the group
UNIT_FONTS = frozenset({r"\text", r"\textrm", r"\textnormal", r"\textup", r"\mathrm", r"\mbox", r"\rm"})
FONTS = (
    UNIT_FONTS
    | SWITCHES
    | {r"\textbf", r"\textit", r"\textsf", r"\texttt", r"\textsl", r"\textsc", r"\textmd"}
    | {r"\mathbf", r"\mathit", r"\mathsf", r"\mathtt", r"\mathnormal", r"\boldsymbol"}
    | {r"\operatorname", r"\operatorname*"}
)
SPACING = frozenset({r"\,", r"\;", r"\:", "\\ ", "~", r"\quad", r"\qquad", r"\left", r"\right", r"\displaystyle"})
DOTS = frozenset(
    {"...", "…", "⋯", r"\mathellipsis", r"\textellipsis"}
    | {rf"\{kind}dots" for kind in ("", "l", "c", "d", "v", "h")}
    | {rf"\dots{kind}" for kind in "bcmio"}
)

_CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_HYPERBOLIC = ("sinh", "cosh", "tanh", "coth", "sech", "csch")
_OTHER_SPELLINGS = ("ctg", "tg", "sh", "ch", "th", "arsinh", "arcosh", "artanh")
FUNCTIONS = frozenset(
    (*_CIRCULAR, *_HYPERBOLIC, *_OTHER_SPELLINGS)
    + tuple(f"arc{name}" for name in (*_CIRCULAR, *_HYPERBOLIC, *_OTHER_SPELLINGS[:2]))
    + ("ln", "lg", "log", "exp", "sqrt", "max", "min", "inf", "sup", "gcd", "lcm", "hcf", "deg", "mod", "sgn", "sign")
    + ("det", "dim", "tr", "rank", "ker", "adj", "Re", "Im", "arg", "cis", "erf", "curl", "div", "grad")
    + ("Var", "Cov", "Pr")
)
# The functions that LaTeX has a command for
COMMANDS = FUNCTIONS & frozenset(
    "arccos arcsin arctan cos sin tan cot cosh sinh tanh coth arg csc deg det dim exp gcd inf ker lg ln log max min sec sup"
    .split()
)


def tokenize(text: str) -> list[str]:
    return _TOKEN.findall(text)


def is_word(token: str) -> bool:
    """Return True for a run of the letters A to Z, in either case."""
    return token.isascii() and token.isalpha()


def is_digits(token: str) -> bool:
    return token.isascii() and token.isdigit()


def is_space(token: str) -> bool:
    return token.isspace()


def has_dots(text: str) -> bool:
    r"""Return True if a text has dots for what is not written: `\ldots`, `...`."""
    return not DOTS.isdisjoint(tokenize(text))


def strip_spaces(tokens: Sequence[str]) -> list[str]:
    start, end = 0, len(tokens)
    while start < end and tokens[start].isspace():
        start += 1
    while start < end and tokens[end - 1].isspace():
        end -= 1
    return list(tokens[start:end])


def closing_braces(tokens: Sequence[str]) -> dict[int, int]:
    """The position of the closing brace of each opening one that has one."""
    closing = {}
    opened = []
    for i, token in enumerate(tokens):
        if token == "{":
            opened.append(i)
        elif token == "}" and opened:
            closing[opened.pop()] = i
    return closing


@dataclass(frozen=True)
class FontGroup:
    r"""`\text{ cm}`: the positions of the font and of the closing brace, and the text between the braces."""

    font: int
    closing: int
    text: str


def font_groups(tokens: Sequence[str]) -> list[FontGroup]:
    """The groups in a font in which there are no further braces, from left to right."""
    groups = []
    font = opening = None
    for i, token in enumerate(tokens):
        if token in FONTS:
            font, opening = i, None
        elif token == "{":
            opening = i if opening is None else None
            if opening is None:
                font = None
        elif token == "}":
            if font is not None and opening is not None:
                groups.append(FontGroup(font, i, "".join(tokens[opening + 1 : i])))
            font = opening = None
        elif opening is None and not token.isspace():
            font = None
    return groups


def without_fonts(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with a space in place of each font and of the braces of its group."""
    closing = closing_braces(tokens)
    dropped = set()
    plain = []
    for i, token in enumerate(tokens):
        if token in FONTS:
            opening = i + 1
            while opening < len(tokens) and tokens[opening].isspace():
                opening += 1
            if opening in closing:
                dropped |= {opening, closing[opening]}
        if token in FONTS or i in dropped:
            plain.append(" ")
        else:
            plain.append(token)
    return plain


def with_single_spaces(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with one space for any spacing, and none for `\!`."""
    single: list[str] = [""]
    glued = False
    for token in tokens:
        if token == r"\!":
            glued = True
            continue
        if token in SPACING or token.isspace():
            token = " "
        if glued and is_digits(token) and is_digits(single[-1]):
            single[-1] += token
        elif token != " " or single[-1] != " ":
            single.append(token)
        glued = False
    return strip_spaces(single[1:])


def unfonted(text: str) -> str:
    r"""The text with `\text{…}` and the like replaced by their contents."""
    return "".join(without_fonts(tokenize(text)))


_PLAIN = {r"\$": "$", r"\%": "%", "\u2212": "-", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac"}
_SPACELESS = frozenset("^_{}")  # spaces beside them mean nothing
_PAIRS = {"$": "$", r"\(": r"\)", r"\[": r"\]", "(": ")", "{": "}"}
Rules = dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]


def rules(table: dict[tuple[str, ...], tuple[str, ...]]) -> Rules:
    """What `rewritten` needs: the sequences and their replacements, by the first token."""
    by_first: Rules = {}
    for sequence, replacement in table.items():
        by_first.setdefault(sequence[0], []).append((sequence, replacement))
    return by_first


def rewritten(tokens: Sequence[str], by_first: Rules) -> list[str]:
    """The tokens with each sequence of the rules replaced, from left to right."""
    written: list[str] = []
    i = 0
    while i < len(tokens):
        for sequence, replacement in by_first.get(tokens[i], ()):
            if tuple(tokens[i : i + len(sequence)]) == sequence:
                written += replacement
                i += len(sequence)
                break
        else:
            written.append(tokens[i])
            i += 1
    return written


_DEGREES = (" ", "degrees", " ")
_PLAIN_RULES = rules(
    {
        ("^", r"\circ"): _DEGREES,
        ("^", "{", r"\circ", "}"): _DEGREES,
        ("°",): _DEGREES,
        (r"\degree",): _DEGREES,
        (r"\degrees",): _DEGREES,
        ("{", ",", "}"): (",",),
        (" ", "–", " "): (" ", "-", " "),
    }
)


def plain_tokens(text: str) -> list[str]:
    r"""The tokens without typesetting: fonts, spacing, outer dollars and brackets, a final period. `1{,}000` is `1,000`,
    `^\circ` the word degrees, `\tfrac12` is `\frac{1}{2}`."""
    tokens = [_PLAIN.get(token, token) for token in without_fonts(tokenize(text))]
    tokens = rewritten(_without_idle_spaces(with_single_spaces(tokens)), _PLAIN_RULES)
    return _without_outer_brackets(_with_braced_fractions(with_single_spaces(tokens)))


def plain_text(text: str) -> str:
    """The text without typesetting; see `plain_tokens`."""
    return "".join(plain_tokens(text))


def _without_idle_spaces(tokens: Sequence[str]) -> list[str]:
    kept = []
    for i, token in enumerate(tokens):
        beside = tokens[i - 1 : i] + tokens[i + 1 : i + 2]
        if token != " " or _SPACELESS.isdisjoint(beside):
            kept.append(token)
    return kept


def _with_braced_fractions(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with braces around the digits that are an argument: `\frac{1}{2}` for `\frac12` and `\frac{1}2`."""
    braced: list[str] = []
    due = [0]  # arguments that a fraction still needs, at each depth of braces
    for token in tokens:
        rest = token
        while due[-1] and is_digits(rest):
            braced += ["{", rest[0], "}"]
            rest = rest[1:]
            due[-1] -= 1
        if not rest or (due[-1] and rest == " "):
            continue
        braced.append(rest)
        if rest == r"\frac":
            due[-1] = 2
        elif rest == "{":
            due.append(0)
        elif rest == "}" and len(due) > 1:
            due.pop()
            due[-1] = max(0, due[-1] - 1)
        else:
            due[-1] = 0
    return braced


def _without_outer_brackets(tokens: list[str]) -> list[str]:
    tokens = _stripped(tokens, (" ", "*"), (" ", "*"))
    for _ in range(3):
        tokens = _stripped(tokens, (" ",), (" ", ".", "..."))
        for opening, closing in _PAIRS.items():
            inside = tokens[1:-1]
            enclosed = len(tokens) > 2 and tokens[0] == opening and tokens[-1] == closing
            if enclosed and opening not in inside and closing not in inside:
                tokens = _stripped(inside, (" ",), (" ",))
    return tokens


def _stripped(tokens: list[str], left: Sequence[str], right: Sequence[str]) -> list[str]:
    start, end = 0, len(tokens)
    while start < end and tokens[start] in left:
        start += 1
    while start < end and tokens[end - 1] in right:
        end -= 1
    return tokens[start:end]


class Reader:
    """Reads tokens from left to right; the parsers take from it what they know."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        self.position = 0

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self.ahead(0)

    @property
    def ended(self) -> bool:
        return self.position >= len(self.tokens)

    def ahead(self, count: int) -> str:
        at = self.position + count
        return self.tokens[at] if at < len(self.tokens) else ""

    def skip_spaces(self) -> None:
        while self.next.isspace():
            self.position += 1

    def take(self, *wanted: str) -> str:
        """The next token, after spaces, if it is one of these; else empty, and nothing is taken."""
        before = self.position
        self.skip_spaces()
        if self.next in wanted and not self.ended:
            self.position += 1
            return self.tokens[self.position - 1]
        self.position = before
        return ""

    def take_all(self, *wanted: str) -> bool:
        """Take these tokens, with spaces between them or without; all of them, or none."""
        before = self.position
        for token in wanted:
            if not self.take(token):
                self.position = before
                return False
        return True

    def take_digits(self, most: int | None = None) -> str:
        """The next run of digits, of `most` digits at most; else empty, and nothing is taken."""
        digits = self.next
        if not is_digits(digits) or (most is not None and len(digits) > most):
            return ""
        self.position += 1
        return digits
