"""Finds the final answer of a text: what is marked, what follows `answer is`, else the last number or formula."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from proxima.reward.math.latex import DOTS, is_digits, tokenize
from proxima.reward.math.marked import last_boxed, last_tagged

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


@dataclass(frozen=True)
class FinalAnswer:
    """The final answer of a text, as candidates in the order in which they are tried.

    Args:
        text: the whole text.
        max_chars: of a text without a box, only the last characters are read.
    """

    text: str
    max_chars: int

    def formulas(self, number: bool = False) -> list[str]:
        """What is in the box; else what is in the tag `answer`, and the formula found in it or in the text.
        `number`: only formulas with a digit are found."""
        if self._has_box:
            return self._boxed
        tagged = self._tagged
        unmarked = find_unmarked_answer(self._end if tagged is None else tagged[-self.max_chars :], number)
        return [text for text in (tagged, unmarked) if text is not None]

    def words(self, choice: bool = False) -> list[str]:
        """What is in the box, or in the tag `answer`, or after `answer is`. `choice`: after `option is` too."""
        if self._has_box:
            return self._boxed
        tagged = self._tagged
        return [words_after_marker(self._end, choice) if tagged is None else tagged]

    @cached_property
    def _boxed(self) -> list[str]:
        boxed = last_boxed(self.text)
        return [] if boxed is None else [boxed]

    @property
    def _has_box(self) -> bool:
        return "\\boxed{" in self.text or "\\fbox{" in self.text

    @property
    def _tagged(self) -> str | None:
        return last_tagged(self.text, "answer")

    @property
    def _end(self) -> str:
        return self.text[-self.max_chars :]


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
    joined = candidates[0].formula
    end = candidates[0].end
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
            part = (
                _CONTINUES.match(after)
                or _CONTINUED.search(before)
                or ("." in number_text and after and tokenize(after)[0] in DOTS)
            )
            if part:
                formula = f"operation {number_text}"
            else:
                formula = number_text
        elif number and not any(map(is_digits, tokenize(formula))):
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
