"""The distribution that a server's log-probs refer to, found from the two most probable tokens at two temperatures."""

import math
from collections.abc import Awaitable, Callable, Iterable

from proxima.engine.http.answer_values import number
from proxima.engine.http.dialect import LogProbMode

PROMPTS = ((17, 42, 9, 7), (30, 31, 32, 33), (5, 9, 31, 57))  # ids that every vocabulary has
CLOSE = 1e-3  # nats: tolerance between numbers that a server computed from the same logits in float32
Pair = tuple[float, float]


async def find_log_prob_mode(
    ask: Callable[[tuple[int, ...], float], Awaitable[Pair | None]],
) -> tuple[LogProbMode | None, str]:
    """Return the distribution that log-probs refer to, or None and the evidence against all modes.

    With top-k 2 at temperatures 1 and 2 the two remaining tokens have g = ln p1 - ln p2. Where the temperature counts,
    g at 2 is half of g at 1, else it does not change; under the distribution actually sampled from, p1 + p2 = 1, else
    it is less.

    Args:
        ask: gives, for a prompt and a temperature, the log-probs of the two most probable tokens of a draw with top-k
            2, the greater first; None: not reported.
    """
    for prompt in PROMPTS:
        cool, warm = [await ask(prompt, temperature) for temperature in (1.0, 2.0)]
        if cool is None or warm is None:
            return None, "the server reports none"
        gap, warm_gap, mass = cool[0] - cool[1], warm[0] - warm[1], math.exp(cool[0]) + math.exp(cool[1])
        certain, near = abs(mass - 1) < CLOSE, 0.1 * gap
        halved, same = abs(warm_gap - gap / 2) < near, abs(warm_gap - gap) < near
        if gap < 10 * CLOSE or (certain and same):
            continue  # two equally likely tokens, or no mass on others: try another prompt
        if halved and (certain or mass < 1):
            return "processed" if certain else "untruncated", ""
        if same and mass < 1:
            return "raw", ""
        return None, f"of no known distribution: gaps {gap:.4f} and {warm_gap:.4f} at temperatures 1 and 2"
    return None, "the server's answers do not say which distribution they are of"


def two_greatest(values: Callable[[], Iterable[object]]) -> Pair | None:
    """The two greatest of the log-probs in an answer, the greater first; None: it does not have them."""
    try:
        first, second, *_ = sorted((number(value, "a log-prob") for value in values()), reverse=True)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return first, second
