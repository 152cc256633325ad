"""KTO: completions labeled good or bad, without pairs."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.preference.protocol import log_ratio
from proxima.core.ratio import either
from proxima.data import require
from proxima.data.field_checks import check_choices


@dataclass(frozen=True)
class Kto:
    """Kahneman-Tversky optimisation: completions labeled good or bad, without pairs.

        good: 1 − σ(β (x − z))    bad: 1 − σ(β (z − x))        x = log π − log π_ref, z = max(0, mean KL), detached

    Args:
        beta: larger values stay closer to the reference, > 0.
        good_weight, bad_weight: weights of the losses of each kind, >= 0 and not both 0.
        anchor: the choice of z: `kl`, the formula above, or `zero`, z = 0, TRL's `apo_zero_unpaired`.
    Source: arXiv 2402.01306. TRL KTOTrainer; z comes from mismatched prompts and completions of the same batch.
    """

    beta: float = 0.1
    good_weight: float = 1.0
    bad_weight: float = 1.0
    anchor: Literal["kl", "zero"] = "kl"

    def __post_init__(self) -> None:
        require(0 < self.beta < math.inf, "beta", self.beta, "must be > 0 and finite")
        require(self.good_weight >= 0, "good_weight", self.good_weight, "must be >= 0")
        bound = "must be >= 0, and > 0 if good_weight is 0"
        require(self.bad_weight >= 0 < self.good_weight + self.bad_weight, "bad_weight", self.bad_weight, bound)
        check_choices(self)

    def __call__(self, log_prob: Tensor, reference_log_prob: Tensor, good: Tensor, kl: Tensor | float = 0.0) -> Tensor:
        """[S] loss of each completion, to be averaged.

        Args:
            log_prob: [S] float, nats, summed, with gradient. reference_log_prob: [S]. good: [S] bool.
            kl: [] or a number, mean of log π − log π_ref over mismatched completions of the step; clamped to >= 0.
        """
        x = log_ratio(log_prob, reference_log_prob.detach())
        if self.anchor != "kl":
            kl = 0.0
        zero = torch.as_tensor(kl, dtype=x.dtype, device=x.device).detach().clamp(min=0)
        weight = either(good, self.good_weight, self.bad_weight, x)
        return weight * torch.sigmoid(either(good, -self.beta, self.beta, x) * (x - zero))
