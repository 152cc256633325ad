r"""Options: the letter that a row's answer names (`B`, `\textbf{(B)}\ 12`), and the one that an answer chooses."""

import re

from proxima.reward.math.equations import has_doubts
from proxima.reward.math.forms import Choice
from proxima.reward.math.latex import tokenize, with_single_spaces, without_fonts

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
    match = None
    if len(text) <= _MAX_CHARS:
        match = _CHOSEN.fullmatch(_plain(text))
    if match is None:
        return None
    letter = (match["bracketed"] or match["marked"] or match["bare"] or match["small"]).upper()
    if match["bracketed"]:
        rest = match["text"]
    else:
        rest = match["rest"]
    if _REASON.match(rest):
        return letter
    rest = rest.lstrip("().:,; -–—")
    others = {other["plain"] or other["bracketed"] for other in _OTHER.finditer(rest)}
    if others - {letter} or has_doubts(tokenize(rest)[:1]) or rest.startswith("or "):
        return None
    return letter


def _plain(text: str) -> str:
    """The text without fonts, dollars, asterisks, quotes, line ends and repeated spaces."""
    tokens = [" " if token == "\\\\" else token for token in without_fonts(tokenize(text))]
    text = "".join(with_single_spaces(tokens))
    return " ".join(text.translate(_QUOTES).split())
