r"""One notation for formulas: signs, upright constants, sets, inequalities as intervals; and the words in a formula.

`x \le 2 \text{ or } x \ge 3` is the set `(-\infty,2]\cup[3,\infty)`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from proxima.reward.math.numeric_answer import HEDGES, is_unit, strip_markup, unwrap_fonts

_FONTS = r"\\(?:math(?:rm|it|sf|normal)|text(?:rm|it|normal|sf)?|operatorname\*?|mbox|rm)"
_UPRIGHT = re.compile(
    rf"{_FONTS}\s*\{{\s*(?P<braced>[ei]|\\pi\s*[ei]?|[ei]\s*\\pi)\s*\}}|\{{\s*\\rm\s+(?P<grouped>[ei]|\\pi)\s*\}}"
    rf"|{_FONTS}(?:\s+(?P<bare>[ei])(?![A-Za-z])|\s*(?P<pi>\\pi)(?![A-Za-z]))"
)
_TIMES_I = re.compile(r"(?<=[0-9])i(?![A-Za-z])")
_SIGNS = {
    "\u2212": "-",
    "≤": r"\leq ",
    "⩽": r"\leq ",
    "≥": r"\geq ",
    "⩾": r"\geq ",
    "≠": r"\neq ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∖": r"\setminus ",
    "∞": r"\infty ",
    "∈": r"\in ",
    "ℝ": r"\mathbb{R}",
    "√": r"\sqrt",
    "ℯ": "e",
    "ⅇ": "e",
    "ⅈ": "i",
    "∅": r"\emptyset ",
}
_SIGN = re.compile("|".join(_SIGNS))
_RELATIONS = re.compile(
    r"\\(?P<sign>[lg])(?:e|eqq|eqslant)(?![A-Za-z])|\\(?P<strict>[lg])t(?![A-Za-z])|\\(?:ne|not\s*=)(?![A-Za-z])"
)
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])|\\(?:left\s*)?\\\{\s*\\(?:right\s*)?\\\}|\\\{\s*\\\}")
_REALS = re.compile(
    r"(?:[A-Za-z]\s*\\in\s*)?(?:\\(?:mathbb|mathbf|Bbb)\s*(?:\{\s*R\s*\}|R)|\\R(?![A-Za-z]))"
    r"|(?i:(?:[a-z] (?:is|can be|=) )?(?:(?:the )?set of (?:all )?|all (?:of )?(?:the )?|any |every )"
    r"real(?:s| numbers?| values?)(?: (?:of )?[a-z])?)"
)
_REALS_BUT = re.compile(
    r"(?i:(?:all )?real numbers(?: [a-z])? (?:except|excluding|but|other than)(?: for)?) (?:[A-Za-z] ?= ?)?"
    r"([-0-9./]+(?:(?:, ?| and | or |, and )[-0-9./]+)*)"
)
_NO_MEMBERS = re.compile(r"(?:the )?(?:empty|null) set", re.IGNORECASE)

_TEXT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname\*?|rm|bf|it)"
_WORDS_IN_FORMULA = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_UNIT_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox|rm)\s*\{")
_CONNECTOR = re.compile(r"[\s,;~\\]*(?:and|or)[\s,;~\\]*")
_COMMAND = re.compile(
    r"arc(?:cos|sin|tan)|(?:cos|sin|tan|cot)h?|arg|csc|deg|det|dim|exp|gcd|inf|ker|lg|ln|log|max|min|sec|sup"
)
_RANGE_FOLLOWS = re.compile(r"[\s,]*(?:where|for|with)\b")
_POWER = re.compile(r"\s*(?:\^\s*(?:[23]|\{[23]\}))?[\s.]*")
_RANGE = re.compile(
    r"(?:[A-Za-z,\s<>=0-9$~()]|\\(?:in|leq|geq|neq|ldots|,|;|:|quad| |mathbb|mathbf|Z|N|R|Q|C)(?![a-z])"
    r"|\{[ZNQRC]\}(?:\^[+*]|_\{?[A-Za-z0-9><= ]++\}?)?)*+"
)
_QUALIFIERS = re.compile(
    r"(?:all|any|every|some|each|integers?|reals?|numbers?|constants?|arbitrary|natural|positive|negative|nonnegative|non|is|an?|are|the"
    r"|being|and|in|of|integration|where|for|with|values?|whole|complex|rational|[A-Za-z])"
)
_LONG_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTION = re.compile(
    r"a?r?c?(?:sin|cos|tan|cot|sec|csc|ctg|tg|sh|ch|th|sinh|cosh|tanh|coth)|ln|lg|log|exp|sqrt|max|min|gcd|lcm|deg|det|dim|Re|Im|arg|mod|sgn|sign"
    r"|tr|rank|ker|inf|sup|ar(?:c|sinh|cosh|tanh)|hcf|adj|curl|div|grad|erf|Var|Cov|Pr|cis"
)


SETS_IN_WORDS = (r"\emptyset", r"(-\infty,\infty)")
_SAME_DOTS = re.compile(r"[,\s]{0,9}(?:\\(?:[lcdvh]?dots[bcmio]?)(?![A-Za-z])|\.\.\.|[…⋯])[,\s]{0,9}")


def same_text(first: str, second: str) -> bool:
    """Return True if two formulas are the same text, apart from typesetting, spaces and the kind of dots."""
    texts = [strip_markup(_SAME_DOTS.sub("…", text)) for text in (first, second) if len(text) <= 4000]
    return len(texts) == 2 and texts[0].replace(" ", "") == texts[1].replace(" ", "") != ""


def normalize_formula(formula: str) -> str:
    r"""The formula with one sign for each relation and set, and `e`, `i` and `\pi` for upright ones (`\mathrm{e}`).

    `\varnothing`, `\{\}` and `\text{the empty set}` become `\emptyset`, `\mathbb{R}` and `\text{all real numbers}`
    the interval from minus to plus infinity.
    """
    formula = _SIGN.sub(lambda sign: _SIGNS[sign.group()], formula)
    formula = _UPRIGHT.sub(_slanted, formula)
    formula = _TIMES_I.sub(" i", formula)  # math-verify takes 2+3i for real, and 2+3 i not
    formula = _EMPTY.sub(r"\\emptyset ", _RELATIONS.sub(_relation, formula))
    words = " ".join(unwrap_fonts(formula).replace("$", "").split()).strip(" .")
    if _REALS.fullmatch(words) or _REALS.fullmatch(formula.strip(" .$")):
        return r"(-\infty,\infty)"
    match = _REALS_BUT.fullmatch(words)
    if match:
        return rf"(-\infty,\infty)\setminus\{{{re.sub(',? (?:and|or) ', ',', match[1])}\}}"
    return r"\emptyset" if _NO_MEMBERS.fullmatch(words) else formula


def _slanted(match: re.Match[str]) -> str:
    constant = match["braced"] or match["grouped"] or match["bare"] or match["pi"]
    before = match.string[: match.start()].rstrip()[-1:]
    after = match.string[match.end() : match.end() + 1]
    if before in ("^", "_") or match["grouped"]:
        return f"{{{constant}}}"
    return (" " if before.isalnum() else "") + constant + (" " if after.isalpha() else "")


def _relation(match: re.Match[str]) -> str:
    if match["sign"]:
        return rf"\{match['sign']}eq "
    return {"l": "<", "g": ">", None: r"\neq "}[match["strict"]]


def without_range(formula: str) -> str:
    r"""The formula without the values that a letter takes: `k\pi` for `k\pi\text{ where }k\in\mathbb{Z}`."""
    for text in _WORDS_IN_FORMULA.finditer(formula):
        if _RANGE_FOLLOWS.match(text[1]) and _is_range(text[1], formula[text.end() :]):
            return formula[: text.start()].rstrip(" ,;")
    return formula


def without_words(formula: str, reference: str) -> str | None:
    r"""The formula without a unit at its end (`\text{ cm}^2`); None if it has other words, apart from `and`, `or` and
    those of the reference. math-verify would drop everything from the first word on: to it, `\sqrt{2}\text{ or maybe
    }\sqrt{3}` is `\sqrt{2}`, and `2\mathrm{ln}\frac12` is 2. So letters and functions lose their fonts."""
    texts = list(_WORDS_IN_FORMULA.finditer(formula))
    if (
        texts
        and _UNIT_TEXT.match(texts[-1].group())
        and (head := formula[: texts[-1].start()].strip())
        and _POWER.fullmatch(formula, texts[-1].end())
    ):
        words = re.sub(r"[~\\ $]+", " ", texts[-1][1]).strip()
        if words and is_unit(words) and not head.endswith(("=", "<", ">")):
            formula = head
            texts = texts[:-1]
    reference_words = _WORDS_IN_FORMULA.findall(reference)
    if HEDGES.search(unwrap_fonts(formula)) and not HEDGES.search(unwrap_fonts(reference)):
        return None
    foreign = [text[1] for text in texts if not _CONNECTOR.fullmatch(text[1]) and text[1] not in reference_words]
    if not _long_words(foreign) <= _long_words(reference_words) or any(re.search("[0-9,;=]", text) for text in foreign):
        return None
    if texts:
        return _WORDS_IN_FORMULA.sub(_unwrapped, formula)
    return formula


def _unwrapped(match: re.Match[str]) -> str:
    """A letter, or a function as its command; other words, `and` and `or` among them, unchanged."""
    word = match[1].strip()
    if len(word) == 1:
        return f" {word} "
    if _COMMAND.fullmatch(word):
        return f"\\{word} "
    if _FUNCTION.fullmatch(word):
        return f"\\operatorname{{{word}}}"
    return match.group()


def _long_words(texts: Iterable[str]) -> set[str]:
    words = (word for text in texts for word in _LONG_WORD.findall(text))
    return {word.casefold() for word in words if not _FUNCTION.fullmatch(word)}


def _is_range(words: str, rest: str) -> bool:
    """Return True if `where …` only says which values a letter takes."""
    rest_words = [word for text in _WORDS_IN_FORMULA.findall(rest) for word in text.split()]
    bare = _WORDS_IN_FORMULA.sub(" ", rest)
    named = words.replace(",", " ").replace(".", " ").split() + [word.strip(",.") for word in rest_words]
    return _RANGE.fullmatch(bare) is not None and all(_QUALIFIERS.fullmatch(word) for word in named if word)


_INEQUALITY = re.compile(r"(<=|>=|<|>|\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|\\neq(?![A-Za-z]))")
_OPPOSITE = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}
_WORD = r"\\(?:text[a-z]*|mbox|mathrm)\s*\{{[\s,]*{0}[\s,]*\}}|(?<![A-Za-z\\]){0}(?![A-Za-z])"
_OR = re.compile(rf"[\s,;]*(?:{_WORD.format('or')}|\\lor(?![a-z])|\\vee(?![a-z])|\\cup(?![a-z])|∨)\s*")
_AND = re.compile(rf"[\s,;]*(?:{_WORD.format('and')}|\\land(?![a-z])|\\wedge(?![a-z])|\\cap(?![a-z])|∧|&)\s*")
_COMMA = re.compile(r"\s*[,;]\s*|\s*\\text\s*\{\s*[,;]\s*\}\s*")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad(?![a-z])|~|\\(?:left|right)(?![A-Za-z])\.?|\s+")
_BUILDER = re.compile(
    r"\\\{\s*(?P<name>[^{}|:,]{1,30}?)\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:|\\colon(?![a-z]))(?P<condition>.*)\\\}"
)
_VARIABLE = re.compile(
    r"(?:[A-Za-z]|\\(?!infty|pi(?![a-z]))[a-z]+)(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?'*(?:\([A-Za-z]\))?"
    r"|\\text\s*\{\s*[A-Za-z ]+\s*\}"
)
_MEMBER = re.compile(r"\s*(?P<name>[A-Za-z]|\\[a-z]+)\s*\\in(?![a-z])\s*(?P<set>.*)", re.DOTALL)
_SET = re.compile(r"\s*(?:\\left\s*)?[\[(]|\s*\\(?:emptyset|mathbb)")
_INFINITE = re.compile(r"(?P<sign>[-+]?) ?\\infty")


INFINITY, MINUS_INFINITY = r"\infty", r"-\infty"


@dataclass(frozen=True)
class Condition:
    r"""`low < x < high`, `\leq` in place of `<` where `closed`, an end of None for infinity; or `x \neq excluded`."""

    name: str
    low: str | None = None
    high: str | None = None
    closed: tuple[bool, bool] = (False, False)
    excluded: str | None = None

    def interval(self) -> str:
        left = "[" if self.closed[0] and self.low else "("
        right = "]" if self.closed[1] and self.high else ")"
        return f"{left}{self.low or MINUS_INFINITY},{self.high or INFINITY}{right}"


def as_same_kind(answer: str, reference: str) -> tuple[str, str]:
    r"""Both as intervals where one is an inequality and the other an inequality of the same letter, or an interval;
    else unchanged.

    A comma between inequalities stands for `or` if the reference is a union, else for `and`. Inequalities that `and`
    connects are the interval between them, whatever its ends; a letter in the ends, or several letters with conditions,
    leave both unchanged, and so does a system that needs to be solved.
    """
    if not (_INEQUALITY.search(answer) or _INEQUALITY.search(reference)):
        return answer, reference
    union = _OR.search(reference) is not None
    of_reference = _solutions(reference, union, "")
    of_answer = _solutions(answer, union, "" if of_reference and of_reference[0] else reference)
    if of_answer is None or of_reference is None:
        return answer, reference
    same_unknown = not (of_answer[0] and of_reference[0]) or of_answer[0] == of_reference[0]
    if same_unknown:
        return (of_answer[1], of_reference[1])
    return (answer, reference)


def _solutions(text: str, comma_is_or: bool, known: str) -> tuple[str, str] | None:
    """Unknown and set of inequalities, of `x \\in [2,5]` or, without an unknown, of a set."""
    if _INEQUALITY.search(text):
        return inequality_set(text, comma_is_or, known)
    member = _MEMBER.fullmatch(text)
    if member is not None:
        if _SET.match(member["set"]):
            return (member["name"], member["set"])
        return None
    return ("", text) if _SET.match(text) else None


@lru_cache(maxsize=4096)
def inequality_set(text: str, comma_is_or: bool, known: str) -> tuple[str, str] | None:
    """Name of the unknown, and the set of its values as intervals; None for anything but inequalities of one unknown.
    `known` are formulas whose letters are not the unknown."""
    text = " ".join(_SPACING.sub(" ", text).split()).strip("$. ").replace("<=", r"\leq").replace(">=", r"\geq")
    match = _BUILDER.fullmatch(text)
    if match is not None:
        text = match["condition"]
    alternatives = _OR.split(text)
    if len(alternatives) == 1 and comma_is_or and not _AND.search(text) and "\\neq" not in text:
        alternatives = _COMMA.split(text)
    sets = [_intersection(part, known) for part in alternatives]
    names = {found[0] for found in sets if found is not None}
    if None in sets or len(names) != 1:
        return None
    if len(sets) > 1 and any(found is not None and "setminus" in found[1] for found in sets):
        return None
    return names.pop(), r"\cup".join(found[1] for found in sets if found is not None)


def _intersection(text: str, known: str) -> tuple[str, str] | None:
    conditions: list[Condition] = []
    for part in (part for parts in _AND.split(text) for part in _COMMA.split(parts)):
        previous = conditions[-1] if conditions else None
        if previous is not None and previous.excluded is not None and not _INEQUALITY.search(part) and part:
            conditions.append(Condition(previous.name, excluded=part))  # x \neq 1, 2
            continue
        condition = _condition(part, known)
        if condition is None:
            return None
        conditions.append(condition)
    if len({condition.name for condition in conditions}) != 1:
        return None
    lows = [condition for condition in conditions if condition.low]
    highs = [condition for condition in conditions if condition.high]
    if len(lows) > 1 or len(highs) > 1:
        return None
    line = Condition(conditions[0].name)
    low, high = (lows or [line])[0], (highs or [line])[0]
    interval = Condition(line.name, low.low, high.high, (low.closed[0], high.closed[1])).interval()
    excluded = [c.excluded for c in conditions if c.excluded is not None]
    return conditions[0].name, rf"{interval}\setminus\{{{','.join(excluded)}\}}" if excluded else interval


def _condition(text: str, known: str) -> Condition | None:
    parts = [part.strip() for part in _INEQUALITY.split(text)]
    if not all(parts) or len(parts) not in (3, 5):
        return None
    if len(parts) == 5:
        first, left, name, right, last = parts
        if r"\neq" in (left, right) or not _is_unknown(name, known) or _rises(left) != _rises(right):
            return None
        if not _rises(left):
            first, left, right, last = last, right, left, first
        return _between(name, first, last, (left.endswith("eq"), right.endswith("eq")))
    name, sign, end = parts
    if not _is_unknown(name, known):
        name, sign, end = end, _OPPOSITE[sign], name
    if not _is_unknown(name, known) or _contains(end, name):
        return None
    if sign == r"\neq":
        return Condition(name, excluded=end)
    closed = sign.endswith("eq")
    if _rises(sign):
        return _between(name, MINUS_INFINITY, end, (False, closed))
    return _between(name, end, INFINITY, (closed, False))


def _between(name: str, low: str, high: str, closed: tuple[bool, bool]) -> Condition | None:
    ends = [_INFINITE.fullmatch(end) for end in (low, high)]
    if (
        _contains(low + " " + high, name)
        or (ends[0] and ends[0]["sign"] != "-")
        or (ends[1] and ends[1]["sign"] == "-")
    ):
        return None
    return Condition(name, None if ends[0] else low, None if ends[1] else high, closed)


def _rises(sign: str) -> bool:
    return sign in ("<", r"\leq")


def _is_unknown(name: str, known: str) -> bool:
    return _VARIABLE.fullmatch(name) is not None and not _contains(known, name)


def _contains(formula: str, name: str) -> bool:
    return re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", formula) is not None
