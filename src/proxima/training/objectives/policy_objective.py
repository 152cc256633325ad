"""The objective of RL: surrogate, corrections, penalties and aggregation over trajectories with advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from proxima.core.correction.weight_statistics import mismatch_metrics
from proxima.core.distillation import Distillation, distillation_loss
from proxima.core.divergence import divergence
from proxima.core.hold import DRIFT
from proxima.core.loss import (
    Aggregate,
    Correction,
    Loss,
    NextMissing,
    Penalty,
    PolicyLoss,
    Precomputed,
    Surrogate,
    needs_precompute,
    policy_loss,
    precompute,
)
from proxima.core.metrics import Metrics, Peak, SumCount
from proxima.core.proximal import VersionChain, chained_log_prob, interpolated_proximal, segment_wise_log_prob
from proxima.core.segment import segment_count, segment_index, segment_sum
from proxima.data.columns import Floats
from proxima.data.packed_batch import PackedBatch
from proxima.data.policy_batch import HostCounts, PolicyBatch
from proxima.data.trajectory import Trajectory, loss_tokens
from proxima.data.transfer import to_device
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.protocol import INVALID, FirstForward, Objective, loss_masks
from proxima.training.objectives.router_balance import fallback_metrics, replay_metrics

ProximalSource = Literal["given", "first_forward", "loglinear"]


@dataclass(frozen=True, kw_only=True)
class DistillationTerm:
    """The arguments of `proxima.core.distillation_loss`."""

    divergence: Distillation
    aggregate: Aggregate
    coefficient: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective[Trajectory]):
    """`proxima.core.policy_loss` over whole updates.

    Args:
        surrogate, aggregate, corrections, penalties: the loss, see `proxima.core.policy_loss`.
        proximal: `given` by the trajectories (the behavior policy if they have none); `first_forward`: the policy from
            which the update starts, by the update's forward pass, detached (`proximal: recompute` with one update per
            step); `loglinear`: interpolated between behavior and current policy by the token's age (`core.proximal`).
        current_version: of the weights, which `loglinear` and `next_missing` read.
        next_missing: compute `next_log_prob` by `core.segment_wise_log_prob` from the trajectories' cached values, NaN
            where missing. A loss token without it gets the proximal policy's (`decoupled`), weight 0 in the
            corrections that read it (`drop_token`), or weight 0 with its whole sequence (`drop_sample`). None: off.
        chain: compute `next_log_prob` by `core.chained_log_prob` instead; no token lacks it.
        skip_zero_advantage: skip trajectories whose advantage is exactly 0. No effect unless the surrogate declares
            `zero_advantage_inert`, there are no penalties, `distillation` or `terms`, and nothing depends on the whole
            batch.
        distillation: a loss that pulls the policy towards a teacher, added to that of the rewards, over the same tokens
            with its own denominator; the trajectories must have the teacher's columns. None: off. Of trajectories with
            `taught`, each token is in one of the two alone, and in the denominator and the metrics of that one.
        terms: further losses of the same forward pass, each with its own denominator: that of a value head on the
            policy's trunk, `RouterBalance` of an MoE model.
        replays_routes: the policy replays the trajectories' `routed_experts`; the share of tokens without them is a
            metric.
        measures_drift: report `hold/drift`, the sum of |π − μ| over the tokens of a completion, mean over completions.
        measure_mismatch: report `core.mismatch_metrics` of engine and trainer in the first update, before the weights
            move.
    """

    surrogate: Surrogate
    aggregate: Aggregate
    corrections: Sequence[Correction] = ()
    penalties: Sequence[Penalty] = ()
    proximal: ProximalSource = "given"
    current_version: int = 0
    next_missing: NextMissing | None = None
    chain: VersionChain | None = None
    skip_zero_advantage: bool = True
    distillation: DistillationTerm | None = None
    terms: Sequence[Objective[Any]] = ()
    replays_routes: bool = False
    measures_drift: bool = False
    measure_mismatch: bool = True

    @property
    def outputs(self) -> frozenset[str]:
        tokenwise = {"entropy"}  # also a metric
        tokenwise |= {"entropy_gradient" for penalty in self.penalties if "entropy" in penalty.needs}
        tokenwise |= {"top_k_gradient" for spec in self.corrections if "top_k_log_prob" in spec.needs}
        return frozenset(tokenwise).union(*(term.outputs for term in self.terms))

    @property
    def statistics_outputs(self) -> frozenset[str]:
        return self.surrogate.needs.union(*(spec.needs for spec in self.corrections)) & {"entropy"}

    @cached_property
    def has_batch_statistics(self) -> bool:
        return needs_precompute(self.surrogate, self.corrections)

    @cached_property
    def skips_zero_advantage(self) -> bool:
        inert = self.surrogate.zero_advantage_inert and not self.penalties and not self.has_batch_statistics
        other_losses = self.distillation is not None or self.terms
        return self.skip_zero_advantage and inert and not other_losses

    def at_version(self, version: int) -> "PolicyObjective":
        return replace(self, current_version=version)

    def skippable(self, item: Trajectory) -> bool:
        return self.skips_zero_advantage and not item.advantage.any()

    def batch_statistics(self, parts: Sequence[tuple[PackedBatch, TokenOutputs]]) -> Precomputed:
        batch = PolicyBatch.cat([self._policy_batch(packed, outputs) for packed, outputs in parts])
        return precompute(batch, surrogate=self.surrogate, correction=self.corrections)

    def denominators(self, items: Sequence[Trajectory], statistics: Precomputed | None = None) -> list[Tensor]:
        mask, edges = loss_masks(items)
        of_rewards = (mask, edges)
        if statistics is not None:
            of_rewards = (statistics.batch.loss_mask, statistics.batch.cu_seqlens)
        of_teacher = of_rewards
        taught = taught_tokens(items)
        if taught is not None:
            of_teacher = (mask & taught, edges)
            if statistics is None:
                of_rewards = (mask & ~taught, edges)
        denominators = [self.aggregate.denominator(*of_rewards)]
        if self.distillation is not None:
            denominators.append(self.distillation.aggregate.denominator(*of_teacher))
        for term in self.terms:
            denominators += term.denominators(items)
        return denominators

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Precomputed | None = None) -> list[Loss]:
        if statistics is None:
            policy_batch = self._policy_batch(batch, outputs)
        else:
            policy_batch = replace(
                statistics.batch,
                log_prob=outputs.need("log_prob"),
                entropy=outputs.entropy,
                top_k_log_prob=outputs.top_k_log_prob,
                bucket_log_prob=outputs.bucket_log_prob,
            )
        check: bool | Literal["later"] = True
        if batch.target.device.type != "cpu":
            check = "later"  # without a wait for the device
        policy = policy_loss(
            policy_batch,
            surrogate=self.surrogate,
            aggregate=self.aggregate,
            correction=self.corrections or None,
            penalty=self.penalties or None,
            check=check,
        )
        metrics = dict(policy.metrics)
        if self.measures_drift:
            metrics[DRIFT] = drift(policy_batch)
        if outputs.route_counts is not None:
            metrics |= replay_metrics(outputs.route_counts)
        losses: list[Loss] = [replace(policy, metrics=metrics)]
        term = self.distillation
        if term is not None:
            of_teacher = policy_batch
            if batch.taught is not None:
                of_teacher = policy_batch.with_loss_mask(batch.loss_mask & (batch.taught > 0))
            distilled = distillation_loss(
                of_teacher, divergence=term.divergence, aggregate=term.aggregate, coefficient=term.coefficient
            )
            losses.append(distilled)
        for further in self.terms:
            losses += further.losses(batch, outputs)
        return losses

    def measure_first(self, first: FirstForward, device: torch.device) -> Metrics:
        trajectories = [trajectory for trajectory, _ in first]
        sizes = mask_sizes(trajectories)
        if self.replays_routes:
            sizes |= fallback_metrics(trajectories)
        if not self.measure_mismatch or any(item.behavior_log_prob is None for item in trajectories):
            return sizes
        log_probs = [statistics.log_prob for _, statistics in first]
        return sizes | mismatch_metrics(first_forward(trajectories, log_probs, device))

    def token_statistics(self, batch: PackedBatch, outputs: TokenOutputs, losses: Sequence[Loss]) -> dict[str, Tensor]:
        policy = losses[0]
        assert isinstance(policy, PolicyLoss)
        keep = policy.keep
        if batch.taught is not None:
            keep = keep | (batch.loss_mask & (batch.taught > 0))
        columns = {
            "log_prob": outputs.need("log_prob"),
            "keep": keep,
            "entropy": outputs.entropy,
            "proximal_log_prob": batch.proximal_log_prob,
            "selected": policy.selected,
        }
        kind = getattr(self.surrogate, "divergence", None)
        if kind is not None and "top_k_log_prob" in self.surrogate.needs:
            columns["top_k_divergence"] = divergence(self._policy_batch(batch, outputs), kind)
        columns[INVALID] = policy.invalid
        return {name: values for name, values in columns.items() if values is not None}

    def _policy_batch(self, batch: PackedBatch, outputs: TokenOutputs) -> PolicyBatch:
        """The input of the loss of rewards from a forward pass, with the proximal policy filled in."""
        log_prob = outputs.need("log_prob")
        if self.proximal == "first_forward":
            batch = replace(batch, proximal_log_prob=log_prob.detach())
        elif self.proximal == "loglinear":
            batch = replace(batch, proximal_log_prob=loglinear_proximal(batch, log_prob, self.current_version))
        if self.chain is not None:
            batch = replace(batch, next_log_prob=chained(batch, self.chain, self.current_version))
        elif self.next_missing is not None:
            batch = replace(batch, next_log_prob=next_log_prob(batch, self.next_missing, self.current_version))
        made = batch.policy_batch(log_prob, outputs.entropy, outputs.top_k_log_prob, outputs.bucket_log_prob)
        if batch.taught is None:
            return made
        return made.with_loss_mask(made.loss_mask & (batch.taught == 0))


def drift(batch: PolicyBatch) -> SumCount:
    """The mean over completions with a loss token of Σ_t |π − μ| over their loss tokens."""
    far = torch.where(batch.loss_mask, divergence(batch, "binary_tv"), 0.0)
    some = segment_count(batch.loss_mask, batch.cu_seqlens) > 0
    return SumCount.over(segment_sum(far.double(), batch.cu_seqlens), some)


def taught_tokens(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """[N] bool, the joined response tokens that learn from the teacher alone; None: all learn from both."""
    columns = [item.taught for item in trajectories if item.taught is not None]
    if columns:
        return torch.from_numpy(np.concatenate(columns) > 0)
    return None


def mask_sizes(trajectories: Sequence[Trajectory]) -> Metrics:
    """Metrics `sampling_mask/…` over all tokens with a set: the mean and the largest size of the sets, and the share of
    sets with a single token, which have no gradient. Empty without sampling masks."""
    masks = [item.sampling_mask for item in trajectories if item.sampling_mask is not None]
    if not masks:
        return {}
    size = torch.from_numpy(np.concatenate([mask.counts for mask in masks]))
    truncated = size > 0
    return {
        "sampling_mask/size_mean": SumCount.over(size, truncated),
        "sampling_mask/size_max": Peak.over(size, truncated),
        "sampling_mask/one_fraction": SumCount.over(size == 1, truncated),
    }


def first_forward(
    trajectories: Sequence[Trajectory], log_probs: Sequence[Floats], device: torch.device | str = "cpu"
) -> PolicyBatch:
    """The input of `mismatch_metrics` and the guard: both log-probs and the loss mask of every response token. Tokens
    that a correction rejects are included.

    Raises:
        ValueError: a trajectory has no `behavior_log_prob`.
    """
    behavior = [item.behavior_log_prob for item in trajectories if item.behavior_log_prob is not None]
    if len(behavior) < len(trajectories):
        raise ValueError("the mismatch needs the engine's log-probs in every trajectory")
    mask, edges = (to_device(column, device) for column in loss_masks(trajectories))
    sampled = torch.ones_like(mask)
    lengths = tuple(len(item.tokens) for item in trajectories)
    in_loss = tuple(map(loss_tokens, trajectories))
    return PolicyBatch(
        log_prob=_joined(log_probs, device),
        behavior_log_prob=_joined(behavior, device),
        loss_mask=mask,
        cu_seqlens=edges,
        sampled=sampled,
        host_counts=HostCounts(lengths, lengths, in_loss, edges, sampled, mask),
    )


def _joined(columns: Sequence[Floats], device: torch.device | str) -> Tensor:
    return to_device(torch.from_numpy(np.concatenate(columns)), device)


def loglinear_proximal(batch: PackedBatch, log_prob: Tensor, current_version: int) -> Tensor:
    """[N] nats, the centre of `proximal: loglinear`: interpolated between the behavior policy and the current one,
    `log_prob`, by each token's age.

    Raises:
        ValueError: the batch lacks `behavior_log_prob` or `policy_version`, or has a version after the current one.
    """
    if batch.behavior_log_prob is None or batch.policy_version is None:
        raise ValueError("proximal=loglinear needs behavior_log_prob and policy_version in every trajectory.")
    _require_past(batch, current_version)
    return interpolated_proximal(batch.behavior_log_prob, log_prob, batch.policy_version, current_version, check=False)


def next_log_prob(batch: PackedBatch, missing: NextMissing, current_version: int) -> Tensor:
    """[N] nats, the column `next_log_prob` of `proximal: next`; NaN where a token is to be dropped.

    Raises:
        ValueError: the batch lacks a column, or has a version after the current one.
    """
    behavior = _required(batch, "behavior_log_prob")
    proximal = _required(batch, "proximal_log_prob")
    cached = _required(batch, "next_log_prob")
    version = _required(batch, "policy_version")
    _require_past(batch, current_version)
    log_prob = segment_wise_log_prob(behavior, proximal, cached, version, current_version, check=False)
    lacking = batch.loss_mask & log_prob.isnan()
    if missing == "decoupled":
        return torch.where(lacking, proximal, log_prob)
    if missing == "drop_token":
        return log_prob
    dropped = segment_count(lacking, batch.cu_seqlens) > 0
    sequence = segment_index(batch.cu_seqlens, len(log_prob))
    return torch.where(dropped[sequence], torch.nan, log_prob)


def chained(batch: PackedBatch, chain: VersionChain, current_version: int) -> Tensor:
    """[N] nats, the column `next_log_prob` of `proximal: next` with a chain.

    Raises:
        ValueError: the batch lacks a column, or has a version after the current one.
    """
    behavior = _required(batch, "behavior_log_prob")
    proximal = _required(batch, "proximal_log_prob")
    cached = _required(batch, "next_log_prob")
    steps = _required(batch, "chained_log_ratio")
    version = _required(batch, "policy_version")
    _require_past(batch, current_version)
    return chained_log_prob(behavior, proximal, cached, steps, version, current_version, chain, check=False)


def _require_past(batch: PackedBatch, current_version: int) -> None:
    """The version check of `core.proximal`, without waiting for the device."""
    if batch.newest_version > current_version:
        latest = f"policy_version {batch.newest_version}"
        raise ValueError(f"proximal: {latest} is later than current_version {current_version}.")


def _required(batch: PackedBatch, name: str) -> Tensor:
    value: Tensor | None = getattr(batch, name)
    if value is None:
        raise ValueError(f"proximal=next needs {name} in every trajectory.")
    return value
