"""Check the answers of servers before they are used: reject impossible ones, and find out what their log-probs refer
to."""

from collections.abc import Mapping

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.sampling_mask import SamplingMask
from proxima.engine.http.dialect import Chunk, LogProbMode
from proxima.engine.protocol import Sampling

SLACK = 1e-3  # nats above 0 that rounding can give a log-prob


class WrongAnswerError(ValueError):
    """The answer of a server is impossible; nothing of it is used."""

    @property
    def reason(self) -> str:
        """One line, without the address."""
        return str(self)


def mask_of(chunk: Chunk) -> SamplingMask:
    """The sets of a chunk's tokens, checked."""
    mask, count = chunk.sampling_mask, len(chunk.tokens)
    if mask is None or len(mask) != count:
        raise WrongAnswerError(f"{0 if mask is None else len(mask)} sampling masks of {count} tokens")
    try:
        mask.check(chunk.tokens)
    except ValueError as error:
        raise WrongAnswerError(str(error)) from error
    return mask


def check_routes(chunk: Chunk, fed: int) -> None:
    """WrongAnswerError unless the last chunk of an answer has the experts of each of the tokens that were fed."""
    rows = 0 if chunk.routes is None else len(chunk.routes)
    if rows != fed:
        raise WrongAnswerError(f"routed experts of {rows} tokens, where {fed} were fed")


def check_sampling(sampling: Sampling, mode: LogProbMode) -> None:
    """UserError if the servers' log-probs are of no distribution that this sampling has."""
    if mode == "raw" and sampling.temperature not in (0, 1):
        raise UserError(
            f"sampling.temperature={sampling.temperature:g}, and the server reports log-probs of temperature 1 "
            "(raw_logprobs), not of what it samples from",
            remedy="restart it with --logprobs-mode processed_logprobs, or set sampling.temperature=1",
        )


def log_prob_columns(
    reported: Floats, mode: LogProbMode, sampling: Sampling, scored: Floats | None = None
) -> tuple[Floats, Floats]:
    """The two log-probs of a completion; NaN where the server does not say it.

    Args:
        reported: [T] what the server gave.
        mode: what that is of.
        sampling: of the completion.
        scored: [T] what it gave for the same tokens when asked to score them, at temperature 1.

    Returns: [T] under the distribution really sampled, and [T] at the temperature alone.
    """
    if not sampling.truncates or not sampling.temperature:
        return reported, reported
    absent = np.full_like(reported, np.nan)
    if mode != "processed":
        return absent, reported
    return reported, absent if scored is None else scored


def spans_of(
    spans: tuple[tuple[str, int, int], ...], length: int, labels: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """Versions of the tokens by the server's word, checked."""
    at, checked = 0, list[tuple[int, int, int]]()
    for label, start, end in spans:
        if label not in labels:
            raise WrongAnswerError(f"sampled by weights {label!r}, not by {' or '.join(map(repr, labels))}")
        if start != at or end < start:
            raise WrongAnswerError(f"versions of tokens {start} to {end} after those up to {at}")
        at = end
        checked.append((labels[label], start, end))
    if at != length:
        raise WrongAnswerError(f"versions of {at} of {length} tokens")
    return checked
