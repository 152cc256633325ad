r"""Answers that choose among options: `B`, `(B)`, `\textbf{(B)}\ 12`, `Option B`."""

import re
from dataclasses import dataclass

from proxima.reward.math.numeric_answer import HEDGES, unwrap_fonts

_SPACING = re.compile(r"\\[,;:! ]|\\q?quad(?![a-z])|~|\s+")
_NO_OPERATOR = r"(?! ?(?:[-+*/^=<>!|_{]|\\(?:cup|cap|times|cdot|[lg]eq?|to|in|pm|div|sub|set|oplus)))"
_OPTION = re.compile(
    rf"(?:\((?P<bracketed>[A-J])\)[.:]?|(?P<marked>[A-J])[).:]){_NO_OPERATOR}(?: ?(?P<value>\S.*))?|(?P<bare>[A-Z])\.?"
)
_PREFIX = (
    r"(?i:(?:thus|therefore|hence|clearly|simply|just|then|so),? )?(?i:the )?"
    r"(?i:(?:correct |right |best |final )?(?:answer|option|choice|letter)(?: is| choice)?:? ){0,3}"
)
_CHOSEN = re.compile(
    rf"{_PREFIX}(?:\( ?(?P<bracketed>[A-Za-z]) ?\){_NO_OPERATOR}(?P<text>.*)"
    rf"|(?:(?P<marked>[A-Za-z])(?=[).:](?: |\Z))|(?P<bare>[A-Z])|(?P<small>[a-z])(?= ?\Z))"
    r"(?P<rest>[).:,;]? ?|[).:,;] .*|,? (?:because|since|as|which|for|i\.e\.|is (?:correct|right))\b.*"
    r"| \(.*\)| [-–—] .*))"
)
_OTHER = re.compile(
    r"(?:\A|\b(?:or|and|nor|not|versus|vs)\b|[,;/&|+])[\W_]{0,9}(?:(?:option|choice|answer|letter) )?"
    r"\(?(?P<plain>[A-J])(?=\)|[.,:;!?/&]|\Z| (?:or|and)\b)|\((?P<bracketed>[A-J])\)"
)
_MAX_CHARS = 400
_QUOTES = str.maketrans("", "", '$*`"“”')
_REASON = re.compile(r",? (?:because|since|as|which|for|i\.e\.) ")


@dataclass(frozen=True)
class Choice:
    """The letter of an option, in upper case, and what the option says, where the row's answer has both."""

    letter: str
    value: str | None = None
    bare: bool = False


def parse_choice(answer: str) -> Choice | None:
    r"""The option that a row's answer names: a single capital letter, or one from A to J in brackets or before `)`,
    `.` or `:`, also with the text of the option. None for anything else, a small letter (a variable) among it."""
    match = _OPTION.fullmatch(_plain(answer))
    if match is None:
        return None
    letter = match["bracketed"] or match["marked"] or match["bare"]
    return Choice(letter, match["value"], match["bare"] is not None)


def chosen_letter(text: str) -> str | None:
    r"""The letter that a boxed or marked answer names: `B`, `(b)`, `B) 12`, `Option B`, `B, because …`. None if it
    names none (`A triangle`), or another one too (`B or C`)."""
    match = _CHOSEN.fullmatch(_plain(text)) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    letter = (match["bracketed"] or match["marked"] or match["bare"] or match["small"]).upper()
    rest = match["text"] if match["bracketed"] else match["rest"]
    if _REASON.match(rest):
        return letter
    rest = rest.lstrip("().:,; -–—")
    others = {other["plain"] or other["bracketed"] for other in _OTHER.finditer(rest)}
    return None if others - {letter} or HEDGES.match(rest) or rest.startswith("or ") else letter


def _plain(text: str) -> str:
    """The text without fonts, dollars, asterisks, quotes and repeated spaces."""
    return " ".join(_SPACING.sub(" ", unwrap_fonts(text)).translate(_QUOTES).split())
