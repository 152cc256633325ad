"""Penalizes the length of the completion."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from proxima.data import Completion, Prompt, Score, require
from proxima.reward.base import WeightedReward
from proxima.reward.protocol import Where


@dataclass(frozen=True, kw_only=True)
class Length(WeightedReward):
    """A penalty in [-1, 0] for a completion longer than `tokens` (or, as a target, of any other length).

        penalty: -min(1, max(0, n - tokens) / tokens)      target: -min(1, |n - tokens| / tokens)
        n: tokens of the completion

    Args:
        tokens: the length without penalty, in tokens including the stop token; >= 1.
        mode: `penalty` penalizes longer completions only, `target` also shorter ones.
    Returns: Score of value in [-1, 0]; does not set `correct`.
    """

    tokens: int = 256
    mode: Literal["penalty", "target"] = "penalty"

    kind: ClassVar[str] = "length"
    where: ClassVar[Where] = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens >= 1, "tokens", self.tokens, "must be >= 1")
        require(self.mode in ("penalty", "target"), "mode", self.mode, "must be 'penalty' or 'target'")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        excess = len(completion.tokens) - self.tokens
        distance = abs(excess) if self.mode == "target" else max(0, excess)
        return Score(value=0.0 - min(1.0, distance / self.tokens))
