r"""Finds marked answers (`\boxed{…}`, a tag, after `####`) and numbers in a text, in linear time; and the rewards that
compare them with the row's answer."""

import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from proxima.data.flow import Completion, Prompt, Score, prompt_name
from proxima.reward.base import WeightedReward, binary_score, missing_answer, required_answer

# Commas count only between groups of three; an exponent has at most three digits, which bounds the value.
NUMBER = re.compile(
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
JOINS_ANOTHER = re.compile(
    r"(?:[ $]{0,3}(?:[-+*/^x×÷,;=\u2212\u2013]|(?:and|or|to)\b)[ $(]{0,3}(?:maybe |perhaps |possibly |even |else )?"
    r"|[ ][ $]{0,2})[-\u2212]?\.?[0-9]"
)
_DENIED = re.compile(
    r"(?i:\b(?:not|never|neither|either|between)\b|n['’]t\b|\b(?:less|more) than\b|\bat (?:most|least)\b)"
)
MINUS = "-\u2212"
_SUBTRACTS_FROM = re.compile(r"[\w.)\]}]")  # a minus after one of these is a subtraction, not a sign


def last_number(text: str) -> Decimal | None:
    """The last number of a text: 1234.50 for `$1,234.50.`, -5 for `-$5`, 3 for `10-7=3`, 2 for `1/2`; None if there is
    none."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    return number_at(text, last[0]) if last else None


def final_number(text: str) -> Decimal | None:
    """The first number of a text; None if another one is joined to it (`61 or 62`, `61/2`, `61, 62`), if it is denied
    (`not 61`), or if there is none."""
    match = NUMBER.search(text)
    if match is None or JOINS_ANOTHER.match(text, match.end()) or _DENIED.search(text, 0, match.start()):
        return None
    return number_at(text, match)


def number_at(text: str, match: re.Match[str]) -> Decimal:
    """The value of a `NUMBER` found in a text, with the sign before it."""
    before = match.start() - 1
    if before >= 0 and text[before] == "$":
        before -= 1
    negative = before >= 0 and text[before] in MINUS and (before == 0 or not _SUBTRACTS_FROM.match(text[before - 1]))
    number = Decimal(match.group().replace(",", ""))
    return number.copy_negate() if negative else number


def as_number(value: object) -> Decimal | None:
    """The exact value of a text that is one number (or of a JSON number); `$`, commas and a final period are allowed.
    None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    text = str(value).strip().replace("\u2212", "-").removesuffix(".")
    digits = text.lstrip("+-$ ")
    prefix = text[: len(text) - len(digits)]
    if NUMBER.fullmatch(digits) is None or len(prefix) > 3:
        return None
    number = Decimal(digits.replace(",", ""))
    return number.copy_negate() if "-" in prefix else number


_BRACE = re.compile(r"[{}]")


def last_boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{…}` or `\fbox{…}`; None without a box, or if its braces never close."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    opening = text.index("{", start)
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[opening + 1 : brace.start()]
    return None


def solution_hint(answer: str, reads_box: bool = False) -> str | None:
    r"""For a row's answer that is a whole solution, with text around a `\boxed{…}` or with `####`, say which reward or
    field reads it; None for any other answer. `reads_box`: the reward has the field `answer_in_box`."""
    boxed = last_boxed(answer)
    if boxed is not None and answer.strip(" $.\n") not in (f"\\boxed{{{boxed}}}", f"\\fbox{{{boxed}}}"):
        shown = boxed if len(boxed) <= 40 else f"{boxed[:40]}…"
        if reads_box:
            remedy = "set answer_in_box=true in the reward"
        else:
            remedy = "use 'math' or 'boxed' with answer_in_box=true"
        return f"is a whole solution; for the answer in its \\boxed{{{shown}}}, {remedy}"
    if "####" in answer:
        return "is a whole solution; use 'gsm8k' for the number after its ####"
    return None


def row_answer(answer: object, in_box: bool) -> str:
    r"""The row's answer as text, without a `\boxed{…}` around it; with `in_box`, the contents of the last box.
    ValueError for a whole solution without `in_box`, or if `in_box` is set and there is no box."""
    text = str(answer)
    boxed = last_boxed(text)
    if in_box and boxed is None:
        raise ValueError("has no \\boxed{…}, which answer_in_box=true reads")
    if not in_box and (hint := solution_hint(text, reads_box=True)) is not None:
        raise ValueError(hint)
    return text if boxed is None else boxed


def last_tagged(text: str, tag: str) -> str | None:
    """The contents of the last `<tag>…</tag>`; None without one."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


_FRACTION = re.compile(
    r"(?P<sign>-?)(?:\\[dt]?frac\s?\{(?P<over>[0-9]{1,40})\}\s?\{(?P<under>[0-9]{1,40})\}|(?P<integer>[0-9]{1,40})(?:/(?P<divisor>[0-9]{1,40}))?)"
)


def as_fraction(text: str) -> Fraction | None:
    r"""The exact value of a text that is an integer, `a/b` or `\frac{a}{b}` of digits; None for anything else."""
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return None
    over, under = int(match["over"] or match["integer"]), int(match["under"] or match["divisor"] or 1)
    if under == 0:
        return None
    return Fraction(-over if match["sign"] else over, under)


def same_answer(text: str, answer: object) -> bool:
    """Compare as numbers if both are numbers, else as text without outer whitespace."""
    left, right = as_number(text), as_number(answer)
    if left is not None and right is not None:
        return left == right
    return text.strip() == str(answer).strip()


@dataclass(frozen=True, kw_only=True)
class Gsm8kReward(WeightedReward):
    """1 if the number after the last `####` equals the answer; without `####`, the last number of the text.

    After `####`, a number to which another one is joined (`61 or 62`, `61/2`), or which is denied (`not 61`), is wrong.
    The row's answer may be a whole GSM8K solution; the text after its `####` counts.

    Args:
        strict: count a text without `####` as wrong.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row's answer is missing or not a number.
    Source: Cobbe et al., arXiv 2110.14168: solutions end in `#### number`.
    """

    strict: bool = False

    kind = "gsm8k"
    needs_answer = True
    where = "inline"

    def unreadable_one(self, answer: object) -> str | None:
        text = str(answer)
        if (missing := missing_answer(answer)) or as_number(text.rpartition("####")[2]) is not None:
            return missing
        hint = None if "####" in text else solution_hint(text)
        return hint or "not a number after '####'"

    @property
    def text_patterns(self) -> tuple[str, ...]:
        return ("####",) if self.strict else ()

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = required_answer(prompt, self.kind)
        expected = as_number(str(answer).rpartition("####")[2])
        if expected is None:
            raise ValueError(f"answer {answer!r:.80} of {prompt_name(prompt.uid)} is not a number after '####'")
        _, marker, final = completion.text.rpartition("####")
        if marker:
            return binary_score(final_number(final) == expected)
        number = last_number(completion.own_text(prompt.begun))
        return binary_score(not self.strict and number == expected)


@dataclass(frozen=True, kw_only=True)
class Boxed(WeightedReward):
    r"""1 if the last `\boxed{…}` contains the answer, as a number or as the same text, else 0; sets `correct`.

    Args:
        answer_in_box: the row's answer is the text of a whole solution; the contents of its last `\boxed{…}` count.
    Returns: Score of value 0 or 1, `correct` set. No box, or an unclosed one: 0.
    Raises: ValueError if the row's answer is missing, a whole solution without `answer_in_box`, or has no box with it.
    Differs: `math` accepts 1/2 for 0.5; this compares only numbers and text, and needs no worker.
    """

    answer_in_box: bool = False

    kind = "boxed"
    needs_answer = True
    where = "inline"

    def unreadable_one(self, answer: object) -> str | None:
        try:
            return missing_answer(answer) or (row_answer(answer, self.answer_in_box) and None)
        except ValueError as error:
            return str(error)

    @property
    def text_patterns(self) -> tuple[str, ...]:
        return (r"\\(?:boxed|fbox)\{",)

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        answer = row_answer(required_answer(prompt, self.kind), self.answer_in_box)
        boxed = last_boxed(completion.text)
        return binary_score(boxed is not None and same_answer(boxed, answer))
