r"""Finds unmarked answers; recognises words, intervals, equations, unfinished operations, and options such as
`\textbf{(B)}\ 12`."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from proxima.reward.math.notation import without_range, without_words
from proxima.reward.math.numeric_answer import DOTS, HEDGES, is_name, strip_markup, unwrap_fonts

_NUMBER = (
    r"(?:[0-9]++ [0-9]++/[0-9]++|[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?%?"
)
_OPERATION = r"[ (){}$]*+(?:[-+*/^=×÷·\u2212\u2013]|x(?=[ $]*[0-9]))[-+*/^=×÷·\u2212\u2013 (){}$]*+"
_RUN = rf"(?<![0-9.])[-+\u2212]?\$?[-\u2212]?{_NUMBER}(?:{_OPERATION}{_NUMBER})*+"
_CANDIDATE = re.compile(
    rf"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<dollars>(?:\\[$]|[^$\n])+)(?<!\\)\$(?![0-9])|\\\((?P<parentheses>(?:(?!\\\)).)+)\\\)"
    rf"|\\\[(?P<brackets>(?:(?!\\\]).)+)\\\]|(?P<fraction>-?\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}})|(?P<run>{_RUN})",
    re.DOTALL,
)
_ANSWER_MARKER = re.compile(r"(?i:answer)(?: to [^.\n]{1,80}?)?\s*(?:is|:|=)\s*:?\s*(?:\*\*)?\s*|####\s*")
_CHOICE_MARKER = re.compile(r"####\s*|(?i:answer|option|choice)(?: to [^.\n]{1,80}?)?\s*(?:is|:|=)\s*:?\s*(?:\*\*)?\s*")
_DOUBTS = r"(?:,? ?(?:maybe|perhaps|possibly|probably|else|even|rather|alternatively|also|both))*"
_ALTERNATIVE = re.compile(rf"[ *,;()]*(?P<word>or){_DOUBTS}[ *($]*", re.IGNORECASE)
_NEXT = re.compile(
    rf"[ *,;()]*(?P<word>(?:and/or|or|and|maybe|perhaps|possibly|alternatively|but|to){_DOUBTS})[ *($]*"
    r"| *[,;] *(?P<list>)",
    re.IGNORECASE,
)
_LIST_ENDS = re.compile(r"[ *)]*(?:[.,;!?]|\Z|\n|(?:and|or)\b)")
_SECOND_THOUGHT = re.compile(
    r"[.;!?*\s]{1,9}(?:(?:or|maybe|perhaps|possibly|alternatively|wait|sorry|actually)\b|no[,:;.] )"
    r"|;[ $]{1,3}[-\u2212]?[0-9]",
    re.IGNORECASE,
)
_SECOND_LETTER = re.compile(r"[.;] {1,3}(?:or )?\(?[A-J]\)?(?:[.,;)]| *(?:\n|\Z))")
_DENIED = re.compile(
    r"(?i:\b(?:not|never|neither|either|between|unknown|unclear|except|below|above|exceeds?|cannot)\b"
    r"|n['’]t\b|\b(?:less|more|fewer|greater|larger|smaller|other|rather|different) (?:than|from)\b"
    r"|\bat (?:most|least)\b)"
)
_SENTENCE = re.compile(r"[.;!?](?=\s|\Z)|\n")
_CONTINUES = re.compile(
    r"[ )]*(?:(?:[-+*/^×÷·]|plus|minus|times|mod|choose|(?:divided|multiplied) by)[ ({$]*[0-9]|\\(?:times|cdot|div)"
    r"|[,;] ?\$?(?:\.\.\.|…|\\[lc]?dots)| ?(?:\.\.\.|…) ?\$?[0-9]"
    r"|(?:squared|cubed|factorial|hundred|thousand|million|billion|trillion|dozen)(?![A-Za-z])"
    r"|or (?:more|less|fewer|greater|higher|above|below)\b"
    r"|and (?:an?|one|two|three) (?:half|third|quarter|fifth|eighth)s?\b)"
    r"|[A-Za-z_](?![A-Za-z])(?<![mgsLKCFVWJN])"
)
_CONTINUED = re.compile(
    r"(?:[A-Za-z0-9)}][ ]?[+/^×÷·]|(?:[0-9)}][ ]?|[A-Za-z])(?:\*\*?|[-\u2212])|\\(?:times|cdot|div)"
    r"|[0-9)}] (?:plus|minus|times|(?:divided|multiplied) by)|(?:\.\.\.|…|dots\$?)[,;])[ ($]*\Z"
)

_LETTERS = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]+")
_FUNCTION_NAME = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|max|min|gcd|lcm|deg|infty|frac|pi|or|and"
)
_QUANTITY = re.compile(r"[^-+*/^0-9<>]*(?:_ ?\{?[A-Za-z0-9]+\}?)?'*(?:\([A-Za-z, ]+\))?")
_EQUALITY = re.compile(r"(?<![<>!:\\])=(?!=)")
_UNFINISHED = {
    "an integral": re.compile(r"\\i*int(?![a-z])|∫"),
    "a sum over an index": re.compile(r"\\sum(?![a-z])|∑"),
    "a product over an index": re.compile(r"\\prod(?![a-z])|∏"),
    "a limit": re.compile(r"\\lim(?![a-z])"),
    "a derivative": re.compile(r"\\frac ?\{ ?(?:\\partial|d) ?\} ?\{ ?(?:\\partial|d) ?[a-z] ?\}"),
}


def find_unmarked_answer(text: str, number: bool) -> str | None:
    r"""The answer of a text without a box or tag; None if nothing looks like one.

    It is the formula between dollars or the plain number right after the last `answer is`, `Answer:` or `####`, else
    the last of either in the text. A number that is part of an operation is returned with the whole operation, and
    alternatives (`$x=1$ or $x=2$`, `61 or 62`) are returned together.

    Args:
        number: only return formulas with a digit.
    """
    marker = _last_marker(text, _ANSWER_MARKER)
    if marker is not None:
        sentence = _SENTENCE.search(text, marker.end())
        end = sentence.start() if sentence else len(text)
        candidates = _candidates(text, marker.end(), end, number)
        if candidates:
            denied = _DENIED.search(text, marker.end(), candidates[0].start) or _SECOND_THOUGHT.match(text, end)
            if denied:
                return None
            return _joined(text, candidates, _NEXT, _LIST_ENDS)
    candidates = _candidates(text, 0, len(text), number)
    last = max(len(candidates) - 1, 0)
    while last and _ALTERNATIVE.fullmatch(text, candidates[last - 1].end, candidates[last].start):
        last -= 1
    if candidates:
        return _joined(text, candidates[last:], _ALTERNATIVE)
    return None


def _last_marker(text: str, marker: re.Pattern[str]) -> re.Match[str] | None:
    return next(iter(deque(marker.finditer(text), maxlen=1)), None)


@dataclass(frozen=True)
class _Candidate:
    formula: str
    start: int
    end: int


def _joined(
    text: str, candidates: Sequence[_Candidate], connector: re.Pattern[str], list_ends: re.Pattern[str] | None = None
) -> str:
    """The first candidate, and those that follow it with nothing but a connector between."""
    joined, end = candidates[0].formula, candidates[0].end
    for candidate in candidates[1:]:
        match = connector.fullmatch(text, end, candidate.start)
        if match is None or (not match["word"] and list_ends and not list_ends.match(text, candidate.end)):
            break
        words = " ".join(match.group().strip(" *(,;$").split())
        joined += (rf" \text{{ {words} }} " if words else ", ") + candidate.formula
        end = candidate.end
    return joined


def _candidates(text: str, start: int, end: int, number: bool) -> list[_Candidate]:
    candidates = []
    for match in _CANDIDATE.finditer(text, start, end):
        formula = match["display"] or match["dollars"] or match["parentheses"] or match["brackets"]
        if formula is None:
            before = text[max(start, match.start() - 20) : match.start()]
            after = text[match.end() : match.end() + 20]
            number_text = match["fraction"] or match["run"].strip(" (){}")
            part = _CONTINUES.match(after) or _CONTINUED.search(before) or ("." in number_text and DOTS.match(after))
            if part:
                formula = f"operation {number_text}"
            else:
                formula = number_text
        elif number and not re.search("[0-9]", formula):
            continue
        candidates.append(_Candidate(formula, match.start(), match.end()))
    return candidates


def words_after_marker(text: str, choice: bool = False) -> str:
    """The text after the last `answer is` or `Answer:` up to the end of the sentence; empty without one, or if the next
    sentence names an alternative. `choice`: after `option is` and `choice:` too."""
    marker = _last_marker(text, _CHOICE_MARKER if choice else _ANSWER_MARKER)
    if marker is None:
        return ""
    sentence = _SENTENCE.search(text, marker.end())
    if sentence is None:
        return text[marker.end() :]
    end = sentence.start()
    denied = _SECOND_THOUGHT.match(text, end) or (choice and _SECOND_LETTER.match(text, end))
    return "" if denied else text[marker.end() : end]


def normalize_words(formula: str) -> str:
    """The text in lower case and without typesetting; see `strip_markup`."""
    return " ".join(strip_markup(formula).casefold().split())


def parse_words(formula: str) -> str | None:
    r"""The normalized words of a formula that is only words (`even`, `\text{no solution}`, `\text{(A)}`), else None.

    Outside of `\text` and the like, only a single word of two letters or more counts.
    """
    words = normalize_words(formula)
    if not re.fullmatch(r"[^\W\d_]+(?:[ ,.'/-]+[^\W\d_]+)*", words):
        return None
    bare = re.sub(r"\\[a-z]+\s*\{[^{}]*\}", "", formula).strip(" .$")
    one_word = len(words) > 1 and " " not in words and words.isascii() and "\\" not in bare
    return words if bare == "" or one_word else None


def is_prose(formula: str) -> bool:
    r"""True if a parser would read words of the formula as products of letters: several bare words, or a long one."""
    bare = re.sub(r"\\(?:begin|end|operatorname\*?)\s*\{[^{}]*\}", " ", formula)
    bare = re.sub(r"\\(?:text[a-z]*|math[a-z]*|mbox)\s*\{[^{}]*\}", " ", bare)
    words = [word for word in _LETTERS.findall(re.sub(r"\\[A-Za-z]+", " ", bare)) if not _FUNCTION_NAME.fullmatch(word)]
    return any(len(word) > 3 for word in words) or (
        any(len(word) > 1 for word in words)
        and re.fullmatch(r"[A-Za-z]+(?: +[A-Za-z']+)+[.!?]?", bare.strip()) is not None
    )


def unfinished_operation(answer: str, reference: str) -> str | None:
    """An operation that the answer leaves unfinished and the reference answer does not contain."""
    unfinished = (name for name, sign in _UNFINISHED.items() if sign.search(answer) and not sign.search(reference))
    return next(unfinished, None)


@lru_cache(maxsize=4096)
def only_text(formula: str) -> bool:
    r"""Return True if a row's answer has words that math-verify would drop with all that follows: of `2\text{ hours
    }30\text{ minutes}` it reads 2. Units, `and`, `or`, names before an equals sign and `where …` are none of them."""
    sides = equation_sides(without_range(formula), "")
    return any(without_words(side, "") is None for side in sides)


def is_equation(formula: str) -> bool:
    """Return True if a formula is an equation, such as `x+y = 5`, and not a value with a name, such as `y = 5`."""
    first, *others = _EQUALITY.split(formula)
    return bool(others) and not _QUANTITY.fullmatch(unwrap_fonts(first.strip()))


def equation_sides(answer: str, reference: str) -> list[str]:
    r"""The formulas that must equal the reference: both of `x = 2\sqrt{3} = \sqrt{12}`, the last one of
    `1+2+\cdots+n = n(n+1)/2`. The whole answer if the reference is an equation itself."""
    if _EQUALITY.search(reference) or re.search(r"[,;<>]|\\[lgn]eq?(?![a-z])", answer):
        return [answer]
    first, *others = [part.strip() for part in _EQUALITY.split(answer)]
    if not others:
        return [answer]
    named = _QUANTITY.fullmatch(unwrap_fonts(first)) or is_name(first)
    sides = others if named else [first, *others]
    return [side for side in sides[:-1] if not DOTS.search(side)] + sides[-1:]


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
    if others - {letter} or HEDGES.match(rest) or rest.startswith("or "):
        return None
    return letter


def _plain(text: str) -> str:
    """The text without fonts, dollars, asterisks, quotes and repeated spaces."""
    return " ".join(_SPACING.sub(" ", unwrap_fonts(text)).translate(_QUOTES).split())
