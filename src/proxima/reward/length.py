"""Penalties for the length of a completion, and for one that the length limit cut off."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward


@dataclass(frozen=True, kw_only=True)
class Length(WeightedReward):
    """A penalty in [-1, 0] for a completion longer than `tokens` (with `mode: target`, of any other length).

        penalty: -min(1, max(0, n - tokens) / tokens)      target: -min(1, |n - tokens| / tokens)
        n: tokens that the model wrote

    Args:
        tokens: the length without penalty, in tokens including the stop token; >= 1.
        mode: `penalty` penalizes longer completions only, `target` also shorter ones.
    Returns: Score of value in [-1, 0]; does not set `correct`.
    """

    tokens: int = 256
    mode: Literal["penalty", "target"] = "penalty"

    kind = "length"
    where = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens >= 1, "tokens", self.tokens, "must be >= 1")
        require(self.mode in ("penalty", "target"), "mode", self.mode, "must be 'penalty' or 'target'")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        excess = completion.generated - self.tokens
        if self.mode == "target":
            distance = abs(excess)
        else:
            distance = max(0, excess)
        return Score(value=0.0 - min(1.0, distance / self.tokens))


@dataclass(frozen=True, kw_only=True)
class Overlong(WeightedReward):
    """0 up to a safe length, then a penalty that grows linearly to `factor` at the limit, where it stays.

        value = -factor * min(1, max(0, n - (max_tokens - buffer_tokens)) / buffer_tokens)
        n: tokens that the model wrote

    Args:
        max_tokens: the length with the full penalty, in tokens including the stop token; usually `sampling.max_tokens`.
        buffer_tokens: tokens before `max_tokens` at which the penalty begins; in [1, max_tokens].
        factor: the full penalty, in reward units; >= 0.
    Returns: Score of value in [-factor, 0]; does not set `correct`.
    Raises: FieldError at construction for an empty buffer, or one larger than the limit.
    Edge cases: a completion longer than `max_tokens` (if the sampling allows it) costs `factor`, no more.
    Source: DAPO (arXiv 2503.14476), Eq. 13: 20480 and 4096 give 0 at 16384 tokens, -0.5 at 18432, -1 at 20480.
    Differs: verl's line has no floor: a completion beyond the limit costs more than the factor.
    """

    max_tokens: int
    buffer_tokens: int
    factor: float = 1.0

    kind = "overlong"
    where = "inline"
    example_fields = MappingProxyType({"max_tokens": 8, "buffer_tokens": 4})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be >= 1")
        fits = 1 <= self.buffer_tokens <= self.max_tokens
        require(fits, "buffer_tokens", self.buffer_tokens, f"must be in [1, max_tokens={self.max_tokens}]")
        require(0 <= self.factor < float("inf"), "factor", self.factor, "must be >= 0 and finite; it is subtracted")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        over = completion.generated - (self.max_tokens - self.buffer_tokens)
        return Score(value=0.0 - self.factor * min(1.0, max(0.0, over / self.buffer_tokens)))


@dataclass(frozen=True, kw_only=True)
class MissingEos(WeightedReward):
    """-1 for a completion that the length limit cut off, 0 for one that ended by itself; `weight` is the penalty.

    Returns: Score of value -1 or 0; does not set `correct`.
    Edge cases: a completion that a stop string ended counts as ended by itself.
    Source: TRL `missing_eos_penalty` of its PPO, RLOO and online DPO trainers.
    Differs: TRL looks for the end token, so it also penalizes completions that a stop string ended.
    """

    kind = "missing_eos"
    where = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        if completion.truncated:
            return Score(value=-1.0)
        return Score(value=0.0)
