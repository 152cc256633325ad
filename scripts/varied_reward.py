"""A reward that differs among completions, so that a random model has something to train on."""

from dataclasses import dataclass
from typing import ClassVar

from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, Where


@dataclass(frozen=True, kw_only=True)
class Varied(WeightedReward):
    """The sum of the token ids, modulo 7."""

    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(value=float(sum(map(int, completion.tokens)) % 7))
