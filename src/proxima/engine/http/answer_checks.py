"""Checks of server responses before they are used: validity, and the distribution that the log-probs refer to."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Floats, SamplingMask
from proxima.engine.http.answer_values import number
from proxima.engine.http.dialect import Chunk, LogProbMode
from proxima.engine.protocol import Sampling

SLACK = 1e-3  # nats by which rounding can raise a log-prob above 0
PROMPTS = ((17, 42, 9, 7), (30, 31, 32, 33), (5, 9, 31, 57))  # ids that every vocabulary has
CLOSE = 1e-3  # nats: tolerance between numbers that a server computed from the same logits in float32
Pair = tuple[float, float]


class WrongAnswerError(ValueError):
    """A server's response is not a valid answer; it is discarded entirely."""

    @property
    def reason(self) -> str:
        """One line, without the address."""
        return str(self)


def checked_log_probs(values: Floats) -> Floats:
    """The log-probs of an answer, 0 where rounding has raised one above it: `core` takes less of that for rounding, and
    would refuse to train on it.

    Raises:
        WrongAnswerError: one of them is not finite, or more than `SLACK` above 0.
    """
    if not np.isfinite(values).all():
        raise WrongAnswerError(f"a log-prob is {values[~np.isfinite(values)][0]}")
    if len(values) and values.max() > SLACK:
        raise WrongAnswerError(f"a log-prob is {values.max():g}, above 0")
    return np.minimum(values, 0)


def mask_of(chunk: Chunk) -> SamplingMask:
    """Validate and return the sampling masks of a chunk's tokens."""
    mask = chunk.sampling_mask
    count = len(chunk.tokens)
    if mask is None:
        raise WrongAnswerError(f"0 sampling masks of {count} tokens")
    if len(mask) != count:
        raise WrongAnswerError(f"{len(mask)} sampling masks of {count} tokens")
    try:
        mask.check(chunk.tokens)
    except ValueError as error:
        raise WrongAnswerError(str(error)) from error
    return mask


def spans_of(
    spans: tuple[tuple[str, int, int], ...], length: int, labels: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """Validate the token versions that the server reported, as (version, start, end)."""
    at = 0
    checked = list[tuple[int, int, int]]()
    for label, start, end in spans:
        if label not in labels:
            ours = " or ".join(map(repr, labels))
            raise WrongAnswerError(f"sampled by weights {label!r}, not by {ours}")
        if start != at or end < start:
            raise WrongAnswerError(f"versions of tokens {start} to {end} after those up to {at}")
        at = end
        checked.append((labels[label], start, end))
    if at != length:
        raise WrongAnswerError(f"versions of {at} of {length} tokens")
    return checked


def check_sampling(sampling: Sampling, mode: LogProbMode) -> None:
    """Raise UserError if the servers' log-probs refer to no distribution of this sampling."""
    if mode == "raw" and sampling.temperature not in (0, 1):
        raise UserError(
            f"sampling.temperature={sampling.temperature:g}, and the server reports log-probs of temperature 1 "
            "(raw_logprobs), not of what it samples from",
            remedy="restart it with --logprobs-mode processed_logprobs, or set sampling.temperature=1",
        )


def log_prob_columns(
    reported: Floats, mode: LogProbMode, sampling: Sampling, scored: Floats | None = None
) -> tuple[Floats, Floats]:
    """The two log-probs of a completion; NaN where the server does not report one.

    Args:
        reported: [T] the server's log-probs.
        mode: the distribution they refer to.
        sampling: the completion's sampling settings.
        scored: [T] its log-probs when asked to score the same tokens, at temperature 1.

    Returns: [T] under the distribution actually sampled from, and [T] at the temperature without truncation.
    """
    if not sampling.truncates or not sampling.temperature:
        return reported, reported
    absent = np.full_like(reported, np.nan)
    if mode != "processed":
        return absent, reported
    if scored is None:
        return reported, absent
    return reported, scored


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
        cool = await ask(prompt, 1.0)
        warm = await ask(prompt, 2.0)
        if cool is None or warm is None:
            return None, "the server reports none"
        gap = cool[0] - cool[1]
        warm_gap = warm[0] - warm[1]
        mass = math.exp(cool[0]) + math.exp(cool[1])
        certain = abs(mass - 1) < CLOSE
        near = 0.1 * gap
        halved = abs(warm_gap - gap / 2) < near
        same = abs(warm_gap - gap) < near
        if gap < 10 * CLOSE or (certain and same):
            continue  # two equally likely tokens, or no mass on others: try another prompt
        if halved and certain:
            return "processed", ""
        if halved and mass < 1:
            return "untruncated", ""
        if same and mass < 1:
            return "raw", ""
        return None, f"of no known distribution: gaps {gap:.4f} and {warm_gap:.4f} at temperatures 1 and 2"
    return None, "the server's answers do not say which distribution they are of"


def two_greatest(values: Callable[[], Iterable[object]]) -> Pair | None:
    """The two greatest of the log-probs in an answer, the greater first; None: it does not have them."""
    try:
        numbers = [number(value, "a log-prob") for value in values()]
        first, second, *_ = sorted(numbers, reverse=True)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return first, second
