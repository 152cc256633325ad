r"""LaTeX as tokens, and the one list of each kind of names: fonts, spacing, functions, dots, signs.

A token is a command (`\frac`), a run of letters, of digits or of white space, `...`, `{,}` or any other character. The
tokens of a text, joined, are the text, but for a backslash too many. Everything here takes linear time.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# 25^\circC is a common slip for 25^\circ C
_TOKEN = re.compile(r"\\(?:circ(?=[A-Za-z])|[A-Za-z]+\*?|.)?|[A-Za-z]+|[0-9]+|\.\.\.|\{,\}|\s+|.", re.DOTALL)
_BACKSLASH_TOO_MANY = re.compile(r"\\\\(?=[A-Za-z{}%$,;:!])")


def listed_names(text: str) -> frozenset[str]:
    """The names that a text lists, with spaces between."""
    return frozenset(text.split())


# The fonts of words, of single letters, and those that hold for the rest of a group: {\rm e}
TEXT_FONTS = frozenset(
    {rf"\text{kind}" for kind in ("", "rm", "normal", "up", "bf", "it", "sf", "tt", "sl", "sc", "md")}
    | {r"\mathrm", r"\mbox", r"\rm"}
)
SWITCHES = frozenset({r"\rm", r"\bf", r"\it", r"\sf", r"\tt"})
BOLD = frozenset({r"\textbf", r"\mathbf", r"\boldsymbol", r"\bf"})
FONTS = (
    TEXT_FONTS
    | SWITCHES
    | BOLD
    | {r"\mathit", r"\mathsf", r"\mathtt", r"\mathnormal", r"\operatorname", r"\operatorname*"}
)
SPACING = frozenset(
    {r"\!", r"\,", r"\;", r"\:", "\\ ", "~", r"\quad", r"\qquad", r"\left", r"\right", r"\displaystyle"}
)
DOTS = frozenset(
    {"...", "…", "⋯", r"\mathellipsis", r"\textellipsis"}
    | {rf"\{kind}dots" for kind in ("", "l", "c", "d", "v", "h")}
    | {rf"\dots{kind}" for kind in "bcmio"}
)

_CIRCULAR = listed_names("sin cos tan cot sec csc ctg tg")
_HYPERBOLIC = listed_names("sinh cosh tanh coth sech csch sh ch th")
FUNCTIONS = (
    _CIRCULAR
    | _HYPERBOLIC
    | {f"{arc}{name}" for arc in ("a", "ar", "arc") for name in _CIRCULAR | _HYPERBOLIC}
    | listed_names("ln lg log exp sqrt max min inf sup gcd lcm hcf deg mod sgn sign det dim tr rank ker adj")
    | listed_names("Re Im arg cis erf curl div grad Var Cov Pr")
)
# The functions that LaTeX has a command for
COMMANDS = listed_names(
    "arccos arcsin arctan cos sin tan cot cosh sinh tanh coth arg csc deg det dim exp gcd inf ker lg ln log max min sec"
    " sup"
)


def tokenize(text: str) -> list[str]:
    r"""The tokens of a text. `\\frac` is `\frac`, as to math-verify: two backslashes begin a row only in a matrix."""
    if "\\\\" in text and "matrix" not in text:
        text = _BACKSLASH_TOO_MANY.sub(r"\\", text)
    return _TOKEN.findall(text)


def is_word(token: str) -> bool:
    """Return True for a run of the letters A to Z, in either case."""
    return token.isascii() and token.isalpha()


def is_letter(token: str) -> bool:
    """Return True for a single letter from A to Z, in either case."""
    return len(token) == 1 and is_word(token)


def is_command(token: str) -> bool:
    r"""Return True for a command with a name: `\frac`, not `\,`."""
    return token.startswith("\\") and is_word(token[1:])


def is_digits(token: str) -> bool:
    """Return True for a run of the digits 0 to 9."""
    return token.isascii() and token.isdigit()


def has_dots(text: str) -> bool:
    r"""Return True if a text has dots for what is not written: `\ldots`, `...`."""
    return not DOTS.isdisjoint(tokenize(text))


def strip_tokens(tokens: Sequence[str], left: Sequence[str], right: Sequence[str] | None = None) -> list[str]:
    """The tokens without those at the beginning that are in `left`, and those at the end that are in `right`; None: in
    `left`."""
    right = left if right is None else right
    start = 0
    end = len(tokens)
    while start < end and tokens[start] in left:
        start += 1
    while start < end and tokens[end - 1] in right:
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
class BracedGroup:
    r"""`\text{ cm}`: the positions of the command and of the closing brace, and the text between the braces."""

    command: int
    closing: int
    text: str


def font_groups(tokens: Sequence[str]) -> list[BracedGroup]:
    """The groups in a font in which there are no further braces, from left to right."""
    if FONTS.isdisjoint(tokens):
        return []
    return groups_of(tokens, FONTS.__contains__)


def groups_of(tokens: Sequence[str], is_wanted: Callable[[str], bool]) -> list[BracedGroup]:
    """The groups behind these commands in which there are no further braces, from left to right."""
    groups: list[BracedGroup] = []
    before = command = None  # positions of the last token that is no space, and of the command of the open group
    opening = 0
    for i, token in enumerate(tokens):
        if token == "{":
            opening = i
            command = before if before is not None and is_wanted(tokens[before]) else None
        elif token == "}" and command is not None:
            groups.append(BracedGroup(command, i, "".join(tokens[opening + 1 : i])))
            command = None
        if not token.isspace():
            before = i
    return groups


def with_replaced_groups(
    tokens: Sequence[str], groups: Sequence[BracedGroup], replacements: Sequence[str | None]
) -> str:
    """The text with a replacement for each of the groups; None: as it is."""
    text = ""
    end = 0
    for group, replacement in zip(groups, replacements, strict=True):
        if replacement is not None:
            text += "".join(tokens[end : group.command]) + replacement
            end = group.closing + 1
    return text + "".join(tokens[end:])


def without_groups(tokens: Sequence[str], groups: Sequence[BracedGroup]) -> str:
    """The text with a space in place of each of the groups."""
    return with_replaced_groups(tokens, groups, [" "] * len(groups))


def without_fonts(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with a space in place of each font and of the braces of its group."""
    if FONTS.isdisjoint(tokens):
        return list(tokens)
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
    single: list[str] = []
    for token in _glued(tokens):
        if token not in SPACING and not token.isspace():
            single.append(token)
        elif single and single[-1] != " ":
            single.append(" ")
    return strip_tokens(single, (" ",))


def _glued(tokens: Sequence[str]) -> list[str]:
    r"""The tokens without `\!`, which joins the digits around it."""
    if r"\!" not in tokens:
        return list(tokens)
    return tokenize("".join(token for token in tokens if token != r"\!"))


def unfonted(text: str) -> str:
    r"""The text with `\text{…}` and the like replaced by their contents."""
    return "".join(without_fonts(tokenize(text)))


_PLAIN = {
    r"\$": "$",
    r"\%": "%",
    "\u2212": "-",
    "–": "-",
    "{,}": ",",
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
}
_PAIRS = {"$": "$", r"\(": r"\)", r"\[": r"\]", "(": ")", "{": "}"}
Rules = dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]


def rules(table: dict[tuple[str, ...], tuple[str, ...]]) -> Rules:
    """What `rewritten` needs: the sequences and their replacements, by the first token."""
    by_first: Rules = {}
    for sequence, replacement in table.items():
        by_first.setdefault(sequence[0], []).append((sequence, replacement))
    return by_first


def rewritten(tokens: Sequence[str], by_first: Rules) -> list[str]:
    """The tokens with each sequence of the rules replaced, from left to right, also with spaces inside."""
    if by_first.keys().isdisjoint(tokens):
        return list(tokens)
    written: list[str] = []
    i = 0
    while i < len(tokens):
        for sequence, replacement in by_first.get(tokens[i], ()):
            end = _end_of(sequence, tokens, i)
            if end is not None:
                written += replacement
                i = end
                break
        else:
            written.append(tokens[i])
            i += 1
    return written


def _end_of(sequence: Sequence[str], tokens: Sequence[str], start: int) -> int | None:
    """Where the sequence ends that begins at `start`; None if another one does."""
    at = start
    for token in sequence:
        while at < len(tokens) and tokens[at] != token and tokens[at].isspace():
            at += 1
        if at == len(tokens) or tokens[at] != token:
            return None
        at += 1
    return at


_DEGREES = (" ", "degrees", " ")
_PLAIN_RULES = rules(
    {
        ("^", r"\circ"): _DEGREES,
        ("^", "{", r"\circ", "}"): _DEGREES,
        ("°",): _DEGREES,
        (r"\degree",): _DEGREES,
        (r"\degrees",): _DEGREES,
    }
)


def plain_tokens(text: str) -> list[str]:
    r"""The tokens without typesetting: fonts, spacing, outer dollars and brackets, a final period.

    `1{,}000` is `1,000`, `^\circ` the word degrees, `\tfrac12` is `\frac{1}{2}`.
    """
    tokens = [_PLAIN.get(token, token) for token in without_fonts(tokenize(text))]
    tokens = rewritten(with_single_spaces(tokens), _PLAIN_RULES)
    return _without_outer_brackets(_with_braced_fractions(with_single_spaces(tokens)))


def plain_text(text: str) -> str:
    """The text without typesetting; see `plain_tokens`."""
    return "".join(plain_tokens(text))


def _with_braced_fractions(tokens: Sequence[str]) -> list[str]:
    r"""The tokens with braces around the digits that are an argument: `\frac{1}{2}` for `\frac12` and `\frac{1}2`."""
    if r"\frac" not in tokens:
        return list(tokens)
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
    tokens = strip_tokens(tokens, (" ", "*"))
    while True:
        tokens = strip_tokens(tokens, (" ",), (" ", "."))
        if len(tokens) < 3 or _PAIRS.get(tokens[0]) != tokens[-1]:
            return tokens
        opening, *inside, closing = tokens
        if opening in inside or closing in inside:
            return tokens
        tokens = inside


class TokenReader:
    """Reads tokens from left to right; the parsers take from it what they know."""

    def __init__(self, tokens: Sequence[str], position: int = 0) -> None:
        self.tokens = tokens
        self.position = position

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self.ahead(0)

    @property
    def ended(self) -> bool:
        """True if no token is left."""
        return self.position >= len(self.tokens)

    def ahead(self, count: int) -> str:
        """The token `count` tokens behind the next one; empty after the end."""
        at = self.position + count
        return self.tokens[at] if at < len(self.tokens) else ""

    def skip_spaces(self) -> None:
        """Take all spaces that come next."""
        tokens = self.tokens
        while self.position < len(tokens) and tokens[self.position].isspace():
            self.position += 1

    def take(self, *wanted: str) -> str:
        """The next token, after spaces, if it is one of these; else empty, and nothing is taken."""
        tokens = self.tokens
        at = self.position
        while at < len(tokens) and tokens[at].isspace():
            at += 1
        if at == len(tokens) or tokens[at] not in wanted:
            return ""
        self.position = at + 1
        return tokens[at]

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

    def take_index(self) -> bool:
        """Take `_1`, `_n` or `_{12}`; else nothing is taken."""
        before = self.position
        if self.take("_"):
            braced = self.take("{")
            self.skip_spaces()
            index = self.next
            self.position += 1
            while braced and (is_word(self.next) or is_digits(self.next)):
                self.position += 1
            if (is_word(index) or is_digits(index)) and (not braced or self.take("}")):
                return True
        self.position = before
        return False
