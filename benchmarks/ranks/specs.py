"""Specs for the recipes of the cases: an optimizer that hides no deviation, and a reward that needs no learning."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, Where


@dataclass(frozen=True)
class Sgd:
    """Plain SGD, since AdamW hides what is small relative to its epsilon, and turns rounding into a whole step.

    Args:
        squares: a folder in which each rank writes a line per update: the sum of the squares of its gradients, float64.
    """

    lr: float = 0.05
    squares: str | None = None

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=self.lr)
        if self.squares is not None:
            folder = Path(self.squares)

            def write(*_: Any) -> None:
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                own = [getattr(gradient, "_local_tensor", gradient).double() for gradient in gradients]
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / os.environ.get("RANK", "0")).open("a", encoding="utf-8") as file:
                    file.write(f"{sum(float(x.square().sum()) for x in own)!r}\n")

            optimizer.register_step_pre_hook(write)
        return optimizer


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
