"""What the recipes of the cases name: an optimizer that hides nothing, and a reward that needs no learning."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from proxima.data import Completion, Prompt, Score
from proxima.reward import WeightedReward
from proxima.reward.base import Where


@dataclass(frozen=True)
class Sgd:
    """AdamW hides what is small beside its epsilon, and makes a whole step of what is rounding."""

    lr: float = 0.05

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class Even(WeightedReward):
    """The share of even token ids; with `constant`, the same for every completion. Correct: more than half."""

    constant: bool = False

    kind: ClassVar[str] = "even"
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        if self.constant:
            return Score(value=0.25, correct=False)
        share = sum(token % 2 == 0 for token in completion.tokens) / max(1, len(completion.tokens))
        return Score(value=share, correct=share > 0.5)
