"""Explains why surrogate and corrections kept or dropped each token of a batch, and gives its weight; `gradient_weight`
gives the weight as a function of the ratio.

Training does not use this; it inspects a finished step or a surrogate. `core.band` has the surrogate's part. Weights
come from autograd, so they cannot disagree with the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from proxima.core.aggregate import TokenSum
from proxima.core.band import Band, format_distinct, outside
from proxima.core.correction.importance import Importance, log_ratio_to, log_weight
from proxima.core.correction.rejection import OffPolicySequence, Rejection, SecondMoment, TopEntropy
from proxima.core.correction.weight_statistics import safe_exp
from proxima.core.loss import CombinedCorrections, Correction, Surrogate, policy_loss
from proxima.data.policy_batch import PolicyBatch

OF_BATCH = (SecondMoment, TopEntropy)  # their rejections depend on all tokens of the optimizer batch
POLICIES = {"proximal": "π_prox", "current": "π", "next": "π_next"}


@dataclass(frozen=True, kw_only=True)
class TokenReasons:
    """The decisions about the tokens of an optimizer batch, or of some of its sequences.

    Args:
        batch: the tokens as `policy_loss` read them. A part of an optimizer batch needs `selected` of a surrogate that
            selects over the whole batch; the whole-batch decisions of corrections are in `recorded`.
        surrogate, corrections: as for `policy_loss`.
        recorded: [N] bool, `keep` as the trainer recorded it; None: the batch is the whole optimizer batch, and
            whole-batch decisions are recomputed.
    """

    batch: PolicyBatch
    surrogate: Surrogate
    corrections: Sequence[Correction] = ()
    recorded: Tensor | None = None

    @cached_property
    def corrected(self) -> CombinedCorrections:
        """The decisions of the corrections, without `OF_BATCH` if the trainer's are recorded, and without those that
        read top-k log-probs if the batch has none."""
        applicable = [spec for spec in self.corrections if self.recorded is None or not isinstance(spec, OF_BATCH)]
        if self.batch.top_k_log_prob is None:  # it is not stored, and what reads it rejects nothing
            applicable = [spec for spec in applicable if "top_k_log_prob" not in spec.needs]
        return CombinedCorrections.of(self.batch, applicable)

    @cached_property
    def reduced(self) -> PolicyBatch:
        """The batch as the surrogate reads it: without the tokens that a correction took out of the loss, and with
        `selected`."""
        b = self.corrected.reduced
        if not self.surrogate.whole_batch or b.selected is not None:
            return b
        return replace(b, selected=self.surrogate.select_tokens(b))

    @cached_property
    def band(self) -> Band | None:
        """The surrogate's band; None if it does not define one."""
        return band_of(self.surrogate, self.reduced)

    @cached_property
    def keep(self) -> Tensor:
        """[N] bool, the tokens that the rules keep; with a correction of `OF_BATCH`, only those also in `recorded`."""
        keep = self.corrected.keep
        if self.band is not None:
            keep = keep & self.band.keep
        if self._recorded_by_batch is not None:
            keep = keep & self._recorded_by_batch
        return keep

    @property
    def _recorded_by_batch(self) -> Tensor | None:
        """[N] bool, what a correction of `OF_BATCH` kept, among others; None without such a correction or a record."""
        if any(isinstance(spec, OF_BATCH) for spec in self.corrections):
            return self.recorded
        return None

    @cached_property
    def weight(self) -> Tensor:
        """[N] −(∂loss/∂log π)/A, a token's gradient relative to the policy gradient, before aggregation: 0 for a masked
        token, NaN where A is 0. The division of a correction's weights by their batch mean is left out."""
        leaf = self.reduced.log_prob.detach().clone().requires_grad_()
        weight = None
        if self.corrections:  # `corrected` has none of those of a whole batch, which drop what is not in `recorded`
            weight = torch.ones_like(leaf)
            if self.corrected.weight is not None:
                weight = self.corrected.weight
            if self._recorded_by_batch is not None:
                weight = torch.where(self._recorded_by_batch, weight, 0.0)
            weight = weight.detach()
        b = replace(self.reduced, log_prob=leaf, weight=weight)
        loss = policy_loss(b, surrogate=self.surrogate, aggregate=TokenSum(), check=False).numerator
        (gradient,) = torch.autograd.grad(loss, leaf)
        advantage = b.masked("advantage")
        return torch.where(advantage == 0, torch.nan, -gradient / advantage)

    def reason(self, token: int) -> str:
        """Explain one token in words: name every rule that dropped it, or say why the surrogate kept it."""
        if not bool(self.batch.loss_mask[token]):
            return "not in the loss"
        rejections: list[str] = []
        for spec, result in self.corrected.results:
            if not bool(result.keep[token]):
                rejections.append(self._rejection(spec, token))
        verdict = "masked"
        if self.band is not None and not bool(self.band.keep[token]):
            if bool(self.reduced.loss_mask[token]):
                _, _, why = self.band.reason(token).partition(": ")
                rejections.append(why)
            if len(rejections) == 1:
                verdict = self.band.verdict
        if rejections:
            return f"{verdict}: {'; '.join(rejections)}"
        if self.recorded is not None and not bool(self.recorded[token]):
            names = [type(spec).__name__ for spec in self.corrections if isinstance(spec, OF_BATCH)]
            if names:
                return f"masked: {self._over_the_batch(token)}"
            return self._disagreement(token)
        if self.band is None:
            return "kept"
        return self.band.reason(token)

    def _disagreement(self, token: int) -> str:
        """Describe a token that the trainer masked but the rules keep on the stored figures: rounding, at a bound."""
        if self.band is None:
            return "masked: the trainer recorded so"
        return f"masked: the trainer recorded so, which the stored figures put at the bound: {self.band.reason(token)}"

    def _over_the_batch(self, token: int) -> str:
        entropy = self.batch.entropy
        for spec in self.corrections:
            if isinstance(spec, TopEntropy) and entropy is not None:
                return f"its entropy {float(entropy[token]):.3g} is not among the highest {spec.share:.0%} of the batch"
            if isinstance(spec, SecondMoment):
                square = float(log_ratio_to(self.batch)[token].square())
                return f"its squared log-ratio {square:.3g} of π_prox to μ is among the largest of the batch"
        return "decided over the whole batch"

    def _rejection(self, spec: Correction, token: int) -> str:
        """Explain why a correction rejected the token."""
        b = self.batch
        at = int(self.batch.sequence_index[token])
        name = type(spec).__name__
        if "next_log_prob" in spec.needs and b.next_log_prob is not None and bool(b.next_log_prob[token].isnan()):
            return f"{name}: the log-prob of the version after the sampling one is missing"
        if isinstance(spec, Importance):
            rho = log_ratio_to(b, spec.towards)
            if spec.veto is not None and bool(spec.vetoed(rho, b)[at]):
                inside = b.loss_mask & (b.sequence_index == at)
                least = float(rho[inside].min().exp())
                left, right = format_distinct(least, spec.veto)
                return f"{name}: {left} < {right}, the veto, at a token of the sequence"
            weight = float(safe_exp(log_weight(rho, b, spec.level))[token])
            unit = "token" if spec.level == "token" else "sequence"
            return f"{name}: {outside(weight, spec.floor, spec.upper)}, {POLICIES[spec.towards]}/μ of the {unit}"
        if isinstance(spec, Rejection):
            values = spec.values(b)
            if spec.level == "token":
                value = float(values[token])
                what = f"{spec.statistic} of the token"
            else:
                value = float(values[at])
                what = f"{spec.statistic} of the sequence ({spec.reduce})"
            if spec.keep_returning:
                what += ", and the update moves the token away"
            return f"{name}: {outside(value, spec.floor, spec.ceiling)}, {what}"
        if isinstance(spec, OffPolicySequence):
            left, right = format_distinct(float(spec.drift(b)[token]), spec.threshold)
            return f"{name}: {left} > {right}, the mean of log μ - log π over the sequence, and A < 0"
        if isinstance(spec, OF_BATCH):
            return f"{name}: {self._over_the_batch(token)}"
        return name


def band_of(surrogate: Surrogate, b: PolicyBatch) -> Band | None:
    """The band of each token of a batch; None for a surrogate that does not define one.

    Args:
        b: the batch as the surrogate reads it; without `selected`, it is taken to be the whole optimizer batch.
    """
    return surrogate.band(replace(b, log_prob=b.log_prob.detach()))


def gradient_weight(surrogate: Surrogate, log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor) -> Tensor:
    """−(∂loss/∂log π) / A, with each token as its own sequence and the behavior policy as the centre.

    Args:
        surrogate: a spec of SURROGATES. `clip_cov`, `kl_cov` and `m2po` select from these N tokens.
        log_prob, behavior_log_prob: [N] float, nats, ≤ 0. advantage: [N] float, not 0.
    Returns: [N]: 1 for the policy gradient, the ratio for an unclipped surrogate, 0 for a masked token.
    Raises: ValueError if an advantage is 0, or the surrogate needs more than these (top-k).
    """
    if bool((advantage == 0).any()):
        raise ValueError("gradient_weight: an advantage is 0; the weight is the gradient divided by it.")
    b = alone(log_prob.detach().clone().requires_grad_(), behavior_log_prob, advantage)
    (gradient,) = torch.autograd.grad(surrogate(b).loss.sum(), b.log_prob)
    return -gradient / advantage.detach()


def alone(log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor) -> PolicyBatch:
    """A batch in which every token is its own sequence."""
    return PolicyBatch(
        log_prob=log_prob,
        behavior_log_prob=behavior_log_prob,
        advantage=advantage,
        loss_mask=torch.ones_like(log_prob, dtype=torch.bool),
        cu_seqlens=torch.arange(len(log_prob) + 1, device=log_prob.device),
    )
