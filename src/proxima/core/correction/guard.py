"""The reaction of a run to the mismatch that it measures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.core.correction.weight_statistics import CATASTROPHIC, LossTokens
from proxima.core.metrics import k3
from proxima.data import UserError, require
from proxima.data.field_checks import check_choices
from proxima.data.policy_batch import PolicyBatch

UNEXPECTED = "the engine reports another distribution, or samples from other weights"
LIMITS = {"mismatch/k3_kl": "max_k3_kl", "mismatch/rollout_is_catastrophic_seq_fraction": "max_catastrophic"}
FEWEST = 32  # fresh tokens: one rare token can dominate the mean of fewer


class MismatchError(UserError):
    """The engine's log-probs of tokens sampled by the current weights are not those of the current weights."""


@dataclass(frozen=True)
class MismatchGuard:
    """Compares rollout engine and trainer at each step's first forward pass, and acts if they are too far apart.

        exceeded  iff  mismatch/k3_kl > max_k3_kl  or  mismatch/rollout_is_catastrophic_seq_fraction > max_catastrophic

    Args:
        measure: report the `mismatch/` metrics of the first forward pass; False also turns the guard off.
        on_mismatch: `auto` acts as `warn`, and stops the run before a step's first update if its fresh tokens are too
            far apart (`max_fresh`): the engine then reports another distribution; `warn` writes a line; `reject`
            leaves the offending sequences of such a step out of its loss, at the cost of one extra forward pass per
            step; `stop` stops the run after such a step, with a checkpoint.
        max_k3_kl: k3 of KL(mu || pi), nats per token, mean over the step's loss tokens; > 0.
        max_catastrophic: share of sequences that hold a token with pi / mu < 1e-4, in [0, 1].
        max_fresh: mean of |log pi - log mu|, nats per token, over the step's loss tokens that the current weights
            sampled, so that the age of data plays no part; > 0. Correct engines are at 1e-5 (float32) to 0.05
            (bfloat16).
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: `reject` drops nothing in a step that is not exceeded; in one that is, it drops each sequence whose own
        mean k3 is above max_k3_kl or that holds such a token, so that the rest is within both limits. Rejected
        sequences leave the denominators.
    """

    measure: bool = True
    on_mismatch: Literal["auto", "warn", "reject", "stop"] = "auto"
    max_k3_kl: float = 0.05
    max_catastrophic: float = 0.05
    max_fresh: float = 0.2

    def __post_init__(self) -> None:
        check_choices(self)
        bound = "must be auto or warn while measure is false: what is not measured can't be acted on"
        require(self.measure or self.on_mismatch in ("auto", "warn"), "on_mismatch", self.on_mismatch, bound)
        require(self.max_k3_kl > 0, "max_k3_kl", self.max_k3_kl, "must be > 0 nats a token")
        require(self.max_fresh > 0, "max_fresh", self.max_fresh, "must be > 0 nats a token")
        require(0 <= self.max_catastrophic <= 1, "max_catastrophic", self.max_catastrophic, "must be in [0, 1]")

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """What `auto` of a field does, and when; None for another field."""
        if field != "on_mismatch":
            return None
        if not self.measure:
            return "warn", "nothing is measured that could end the run (measure=false)"
        ends = f"the run ends only where those of a step's own tokens differ by more than {self.max_fresh:g} nats"
        return "warn", f"log-probs of the engine that differ from the trainer's are a warning; {ends}"

    @property
    def judges_fresh(self) -> bool:
        """True if `check_fresh` is to be called."""
        return self.measure and self.on_mismatch == "auto"

    def check_fresh(self, distances: Tensor, settings: str = "") -> None:
        """Raise `MismatchError` if the log-probs can't be those of the engine's own tokens.

        Args:
            distances: [n] |log pi - log mu| of the step's fresh tokens, nats. Fewer than `FEWEST` prove nothing; nor
                does NaN, which means that the engine does not know a log-prob.
            settings: those of the engine that move its log-probs on purpose, for the message.
        """
        gaps = distances[~distances.isnan()].double()
        if len(gaps) < FEWEST:
            return
        mean = float(gaps.mean())
        if mean <= self.max_fresh:
            return

        cause = f"expected with {settings}" if settings else UNEXPECTED
        raise MismatchError(
            f"the engine's log-probs of {len(gaps)} tokens are {mean:.3g} nats from the trainer's on average, with "
            f"the same weights; algorithm.mismatch.max_fresh={self.max_fresh:g} is allowed, and sound engines stay "
            "within 0.05",
            remedy=f"{cause}: see docs/mismatch.md; resume (--resume) with "
            "algorithm.mismatch.on_mismatch=warn to train on them anyway",
        )

    def exceeded(self, values: Mapping[str, object]) -> str | None:
        """The first metric of a step that is above its limit, with value and limit; None if the step is within."""
        for metric, field in LIMITS.items():
            value = values.get(metric)
            limit = getattr(self, field)
            if isinstance(value, int | float) and value > limit:
                return f"{metric} is {value:.3g}, above algorithm.mismatch.{field}={limit:g}"
        return None

    @torch.no_grad()
    def rejects(self, b: PolicyBatch) -> Tensor:
        """The sequences that `reject` leaves out of the step.

        Args:
            b: all tokens of the step; `log_prob` of its first forward pass and `behavior_log_prob` [N], nats.
        Returns: [S] bool, all False if the step is within the limits.
        """
        if b.behavior_log_prob is None:
            raise ValueError("on_mismatch=reject needs `behavior_log_prob`, which the batch lacks.")
        tokens = LossTokens.of(b)
        rho = tokens.log_probs(b.log_prob) - tokens.log_probs(b.behavior_log_prob)
        distance = k3(rho)
        far = tokens.means(distance) > self.max_k3_kl
        catastrophic = tokens.sums((rho < math.log(CATASTROPHIC)).double()) > 0
        out = torch.zeros(b.sequences, dtype=torch.bool, device=rho.device)
        k3_kl = float(distance.mean())  # NaN without a loss token, as is the share
        catastrophic_share = float(catastrophic.double().mean())
        if k3_kl > self.max_k3_kl or catastrophic_share > self.max_catastrophic:
            out[tokens.sequences] = far | catastrophic
        return out
