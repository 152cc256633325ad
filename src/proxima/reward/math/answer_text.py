"""Finds unmarked answers; recognises words, intervals, equations and unfinished operations."""

import re
from collections import deque

from proxima.reward.math.numeric_answer import strip_markup, unwrap_fonts

_NUMBER = r"(?:[0-9]++ [0-9]++/[0-9]++|[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?|\.[0-9]++)%?"
_OPERATION = r"[ (){}$]*+(?:[-+*/^=×÷·\u2212\u2013]|x(?=[ $]*[0-9]))[-+*/^=×÷·\u2212\u2013 (){}$]*+"
_RUN = rf"(?<![0-9.])[-+\u2212]?\$?[-\u2212]?{_NUMBER}(?:{_OPERATION}{_NUMBER})*+"
_CANDIDATE = re.compile(
    rf"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<dollars>(?:\\[$]|[^$\n])+)(?<!\\)\$(?![0-9])|\\\((?P<parentheses>(?:(?!\\\)).)+)\\\)"
    rf"|\\\[(?P<brackets>(?:(?!\\\]).)+)\\\]|(?P<fraction>-?\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}})|(?P<run>{_RUN})",
    re.DOTALL,
)
_ANSWER_MARKER = re.compile(r"(?i:answer)(?: to [^.\n]{1,80}?)?\s*(?:is|:|=)\s*:?\s*(?:\*\*)?\s*")
_SENTENCE = re.compile(r"[.;!?](?=\s|\Z)|\n")
_CONTINUES = re.compile(
    r"[ )]*(?:(?:[-+*/^×÷·]|plus|minus|times|mod|choose|(?:divided|multiplied) by)[ ({$]*[0-9]|\\(?:times|cdot|div)"
    r"|(?:squared|cubed|factorial|hundred|thousand|million|billion|trillion|dozen)(?![A-Za-z]))|[A-Za-z_](?![A-Za-z])(?<![mgsLKCFVWJN])"
)
_CONTINUED = re.compile(
    r"(?:[A-Za-z0-9)}][ ]?[+/^×÷·]|(?:[0-9)}][ ]?|[A-Za-z])(?:\*\*?|[-\u2212])|\\(?:times|cdot|div)"
    r"|[0-9)}] (?:plus|minus|times|(?:divided|multiplied) by))[ ($]*\Z"
)

_LETTERS = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]+")
_FUNCTION_NAME = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|max|min|gcd|lcm|deg|infty|frac|pi|or|and"
)
_RELATION = re.compile(r"([<>]=?|[≤≥]|\\(?:l|g)(?:t|e|eq|eqslant)(?![a-z]))")
_CLOSED = re.compile(r"[<>]=|[≤≥]|\\.e")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:theta|alpha|lambda)")
_QUANTITY = re.compile(r"[^-+*/^0-9<>]*(?:_ ?\{?[A-Za-z0-9]+\}?)?'*(?:\([A-Za-z, ]+\))?")
_UNFINISHED = {
    "an integral": re.compile(r"\\i*int(?![a-z])|∫"),
    "a sum over an index": re.compile(r"\\sum(?![a-z])|∑"),
    "a product over an index": re.compile(r"\\prod(?![a-z])|∏"),
    "a limit": re.compile(r"\\lim(?![a-z])"),
    "a derivative": re.compile(r"\\frac ?\{ ?(?:\\partial|d) ?\} ?\{ ?(?:\\partial|d) ?[a-z] ?\}"),
}


def find_unmarked_answer(text: str, number: bool) -> str | None:
    r"""The answer of a text without a box or tag; None if nothing looks like one.

    It is the formula between dollars or the plain number right after the last `answer is` or `Answer:`, else the last
    of either in the text. A number that is part of an operation is returned with the whole operation.

    Args:
        number: only return formulas with a digit.
    """
    marker = _last_marker(text)
    if marker is not None:
        sentence = _SENTENCE.search(text, marker.end())
        formulas = _candidates(text[: sentence.start() if sentence else len(text)], marker.end(), number)
        if formulas:
            return formulas[0]
    formulas = _candidates(text, 0, number)
    return formulas[-1] if formulas else None


def _last_marker(text: str) -> re.Match[str] | None:
    return next(iter(deque(_ANSWER_MARKER.finditer(text), maxlen=1)), None)


def _candidates(text: str, start: int, number: bool) -> list[str]:
    formulas = []
    for match in _CANDIDATE.finditer(text, start):
        formula = match["display"] or match["dollars"] or match["parentheses"] or match["brackets"]
        if formula is None:
            before, after = text[max(start, match.start() - 20) : match.start()], text[match.end() : match.end() + 20]
            part = _CONTINUES.match(after) or _CONTINUED.search(before)
            number_text = match["fraction"] or match["run"].strip(" (){}")
            formulas.append(f"operation {number_text}" if part else number_text)
        elif not number or re.search("[0-9]", formula):
            formulas.append(formula)
    return formulas


def words_after_marker(text: str) -> str:
    """The text after the last `answer is` or `Answer:` up to the end of the sentence; empty without one."""
    marker = _last_marker(text)
    return "" if marker is None else _SENTENCE.split(text[marker.end() :], 1)[0]


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


def as_interval(answer: str, reference: str) -> str:
    r"""`[0,5)` for `0 \le x < 5`, `[5,\infty)` for `x \ge 5` if the reference is an interval; else the answer."""
    if not re.match(r"\s*(?:\\left\s*)?[\[(]", reference) or _RELATION.search(reference):
        return answer
    parts = [part.strip() for part in _RELATION.split(answer)]
    if len(parts) == 5 and _VARIABLE.fullmatch(parts[2]):
        low, left, _, right, high = parts
        if low and high and left[0] != ">" != right[0] and "\\g" not in left + right:
            return f"{'[' if _CLOSED.match(left) else '('}{low},{high}{']' if _CLOSED.match(right) else ')'}"
    if len(parts) == 3 and _VARIABLE.fullmatch(parts[0]) and parts[2]:
        _, sign, end = parts
        if sign.startswith((">", "\\g", "≥")):
            return f"{'[' if _CLOSED.match(sign) else '('}{end},\\infty)"
        return f"(-\\infty,{end}{']' if _CLOSED.match(sign) else ')'}"
    return answer


def equation_sides(answer: str, reference: str) -> list[str]:
    r"""The formulas that must equal the reference: both of `x = 2\sqrt{3} = \sqrt{12}`. The whole
    answer if the reference is an equation itself."""
    equality = re.compile(r"(?<![<>!:\\])=(?!=)")
    if equality.search(reference) or re.search(r"[,;<>]|\\(?:le|ge|ne|lt|gt)q?(?![a-z])", answer):
        return [answer]
    parts = [part.strip() for part in equality.split(answer)]
    return parts[1:] if len(parts) > 1 and _QUANTITY.fullmatch(unwrap_fonts(parts[0])) else parts
