"""What a run does about the mismatch that it measures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.correction.weight_statistics import CATASTROPHIC, LossTokens
from proxima.core.metrics import k3
from proxima.data import PolicyBatch, check_choices, require

OnMismatch = Literal["warn", "reject", "stop"]


@dataclass(frozen=True)
class MismatchGuard:
    """Measures rollout engine against trainer at each step's first forward, and acts when they are too far apart.

        exceeded  iff  mismatch/k3_kl > max_k3_kl  or  mismatch/rollout_is_catastrophic_seq_fraction > max_catastrophic

    Args:
        measure: report the `mismatch/` metrics of the first forward; False also turns the guard off.
        on_mismatch: `warn` writes a line; `reject` leaves the offending sequences of such a step out of its loss, at
            the cost of one extra forward pass per step; `stop` ends the run after such a step, with a checkpoint.
        max_k3_kl: k3 of KL(mu || pi), nats a token, mean over the step's loss tokens; > 0.
        max_catastrophic: share of sequences that hold a token with pi / mu < 1e-4, in [0, 1].
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: `reject` drops nothing in a step that is not exceeded; in one that is, it drops each sequence whose own
        mean k3 is above max_k3_kl or that holds such a token, so that what is left is within both limits. Rejected
        sequences leave the denominators.
    """

    measure: bool = True
    on_mismatch: OnMismatch = "warn"
    max_k3_kl: float = 0.05
    max_catastrophic: float = 0.05

    def __post_init__(self) -> None:
        check_choices(self)
        bound = "must be warn while measure is false: what is not measured can't be acted on"
        require(self.measure or self.on_mismatch == "warn", "on_mismatch", self.on_mismatch, bound)
        require(self.max_k3_kl > 0, "max_k3_kl", self.max_k3_kl, "must be > 0 nats a token")
        require(0 <= self.max_catastrophic <= 1, "max_catastrophic", self.max_catastrophic, "must be in [0, 1]")

    def exceeded(self, values: Mapping[str, object]) -> str | None:
        """The first metric of a step that is above its limit, with value and limit; None if the step is within."""
        limits = (
            ("mismatch/k3_kl", "max_k3_kl", self.max_k3_kl),
            ("mismatch/rollout_is_catastrophic_seq_fraction", "max_catastrophic", self.max_catastrophic),
        )
        for metric, field, limit in limits:
            value = values.get(metric)
            if isinstance(value, int | float) and value > limit:
                return f"{metric} is {value:.3g}, above algorithm.mismatch.{field}={limit:g}"
        return None

    @torch.no_grad()
    def rejects(self, b: PolicyBatch) -> Tensor:
        """The sequences that `reject` leaves out of the step.

        Args:
            b: all tokens of the step; `log_prob` of its first forward and `behavior_log_prob` [N], nats.
        Returns: [S] bool, False everywhere where the step is within the limits.
        """
        if b.behavior_log_prob is None:
            raise ValueError("on_mismatch=reject needs `behavior_log_prob`, which the batch lacks.")
        tokens = LossTokens.of(b)
        rho = tokens.select(b.log_prob) - tokens.select(b.behavior_log_prob)
        distance = k3(rho)
        far = tokens.means(distance) > self.max_k3_kl
        catastrophic = tokens.sums((rho < math.log(CATASTROPHIC)).double()) > 0
        out = torch.zeros(b.sequences, dtype=torch.bool, device=rho.device)
        figures = float(distance.mean()), float(catastrophic.double().mean())  # NaN without a loss token
        if figures[0] > self.max_k3_kl or figures[1] > self.max_catastrophic:
            out[tokens.sequences] = far | catastrophic
        return out
