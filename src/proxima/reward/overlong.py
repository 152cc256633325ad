"""DAPO's soft penalty for completions close to the length limit."""

from dataclasses import dataclass
from typing import ClassVar

from proxima.data import Completion, Prompt, Score, require
from proxima.reward.base import WeightedReward
from proxima.reward.protocol import Where


@dataclass(frozen=True, kw_only=True)
class Overlong(WeightedReward):
    """0 up to a safe length, then a penalty that grows linearly to `factor` at the limit, where it stays.

        value = -factor * min(1, max(0, n - (max_tokens - buffer_tokens)) / buffer_tokens)
        n: tokens of the completion

    Args:
        max_tokens: the length with the full penalty, in tokens including the stop token; usually `sampling.max_tokens`.
        buffer_tokens: tokens before `max_tokens` at which the penalty begins; in [1, max_tokens].
        factor: the full penalty, in reward units; >= 0.
    Returns: Score of value in [-factor, 0]; does not set `correct`.
    Raises: FieldError at construction for an empty buffer, or one larger than the limit.
    Edge cases: a completion longer than `max_tokens` (a limit below that of the sampling) costs `factor`, no more.
    Source: DAPO (arXiv 2503.14476), Eq. 13: 20480 and 4096 give 0 at 16384 tokens, -0.5 at 18432, -1 at 20480.
    Differs: verl's line has no floor: a completion beyond the limit costs more than the factor.
    """

    max_tokens: int
    buffer_tokens: int
    factor: float = 1.0

    kind: ClassVar[str] = "overlong"
    where: ClassVar[Where] = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be >= 1")
        fits = 1 <= self.buffer_tokens <= self.max_tokens
        require(fits, "buffer_tokens", self.buffer_tokens, f"must be in [1, max_tokens={self.max_tokens}]")
        require(0 <= self.factor < float("inf"), "factor", self.factor, "must be >= 0 and finite; it is subtracted")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        over = len(completion.tokens) - (self.max_tokens - self.buffer_tokens)
        return Score(value=0.0 - self.factor * min(1.0, max(0.0, over / self.buffer_tokens)))
