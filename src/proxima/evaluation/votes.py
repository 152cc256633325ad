r"""The answer for which a text votes, in a canonical form; maj@k counts these votes.

A reward that extracts answers has a method `extract(text) -> str | None`; for built-in rewards without one,
`ANSWER_EXTRACTORS` has a function. The reward still decides: all answers that it accepts are one class, however they
are written (`estimators.maj_at_k`).
"""

import re
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Protocol, runtime_checkable

from proxima.data.flow import Completion
from proxima.reward import REWARDS
from proxima.reward.math.marked import (
    Gsm8kReward,
    as_fraction,
    as_number,
    final_number,
    last_boxed,
    last_number,
    last_tagged,
)
from proxima.reward.text import Exact

LONGEST = 200  # characters of an answer that is normalized as mathematics


def _number(reward: Any, text: str, own: str) -> str | None:
    number = last_number(own)
    if number is None:
        return None
    return str(number)


def _gsm8k(reward: "Gsm8kReward", text: str, own: str) -> str | None:
    _, marker, answer = text.rpartition("####")
    if marker:
        number = final_number(answer)
        return None if number is None else str(number)
    if reward.strict:
        return None
    return _number(reward, text, own)


def _math(reward: Any, text: str, own: str) -> str | None:
    """Like the reward: the last box, else the last tag, else the last formula or number."""
    answer = last_boxed(text)
    if answer is None:
        answer = last_tagged(text, "answer")
    if answer is not None:
        return _filled(answer)
    tail = own[-2000:]
    formulas = re.findall(r"\$([^$]{1,200})\$", tail)
    if formulas:
        return _filled(formulas[-1])
    return _number(reward, text, tail)


def _exact(reward: Exact, text: str, own: str) -> str | None:
    answer = _filled(own)
    if answer and reward.ignore_case:
        return answer.casefold()
    return answer


def _tagged(reward: Any, text: str, own: str) -> str | None:
    """The last text between the reward's tags; without a tag, all that the policy wrote."""
    if reward.tag is None:
        return _filled(own)
    return _filled(last_tagged(text, reward.tag))


def _filled(text: str | None) -> str | None:
    """The stripped text; None if nothing is left."""
    return (text or "").strip() or None


@runtime_checkable
class AnswerExtractor(Protocol):
    """A reward that extracts answers."""

    def extract(self, text: str) -> str | None: ...


# kind of reward → function of the reward, the text, and the part of it that the policy itself wrote
ANSWER_EXTRACTORS: dict[str, Callable[[Any, str, str], str | None]] = {
    "accuracy_1_5_2": _tagged,
    "boxed": lambda reward, text, own: _filled(last_boxed(text)),
    "exact": _exact,
    "gsm8k": _gsm8k,
    "math": _math,
    "number": _number,
}


Extract = Callable[[Completion, str], str | None]  # of a completion and `Prompt.begun`


def answer_extractor(rewards: Sequence[Any]) -> Extract | None:
    """Return the extraction function of the first reward that has one; None if none has, and then there is no vote."""
    for reward in rewards:
        if isinstance(reward, AnswerExtractor):
            return partial(_by_itself, reward)
        for kind, extract in ANSWER_EXTRACTORS.items():
            if REWARDS.holds(reward, kind):
                return partial(_by_kind, reward, extract)
    return None


def _by_itself(reward: AnswerExtractor, completion: Completion, begun: str) -> str | None:
    return reward.extract(completion.text)


def _by_kind(
    reward: Any, extract: Callable[[Any, str, str], str | None], completion: Completion, begun: str
) -> str | None:
    return extract(reward, completion.text, completion.own_text(begun))


_FRAC = re.compile(
    r"(?<![0-9}])\\[dt]?frac\s*(?:\{\s*(-?[0-9]{1,40})\s*\}|([0-9]))\s*(?:\{\s*([0-9]{1,40})\s*\}|([0-9]))"
)
_MARKUP = re.compile(r"\\(?:left\.?|right\.?|displaystyle|[,;:!%$ ])|\$|\\text\{\s*([^{}]*)\}|\^\{?\\circ\}?|[\s]+")
_COMMAS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def canonical(answer: str | None) -> Hashable | None:
    r"""Map obviously equal answers to the same value: 0.5, 1/2, .50, \frac12 and \dfrac{1}{2} are the fraction 1/2.

    A number becomes an exact fraction. Any other text loses dollar signs, spacing commands, `\left`, `\right`,
    `\text{…}` around words, degree signs, outer braces, a final period and a leading `x =`. Takes linear time; texts
    longer than 200 characters are only stripped. None for None or blank text.
    """
    if answer is None or not answer.strip():
        return None
    text = answer.strip()
    if len(text) > LONGEST:
        return text
    number = as_number(text)
    if number is not None:
        return Fraction(number)
    bare = _MARKUP.sub(lambda match: (match[1] or "").strip(), text).rstrip(".")
    bare = _COMMAS.sub("", re.sub(r"^[a-zA-Z]=", "", bare))
    while bare.startswith("{") and bare.endswith("}") and "}" not in bare[:-1]:
        bare = bare[1:-1]
    bare = _FRAC.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", bare)
    exact = as_fraction(bare)
    if exact is not None:
        return exact
    number = as_number(bare)
    if number is not None:
        return Fraction(number)
    return bare
