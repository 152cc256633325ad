"""The objectives of preference learning: DPO's family over pairs, and KTO over labeled completions."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from proxima.core.correction.weight_statistics import mismatch_metrics
from proxima.core.loss import Loss
from proxima.core.metrics import Metrics, SumCount
from proxima.core.preference.kto import Kto
from proxima.core.preference.protocol import Pairwise, PreferencePairs, completion_log_prob, wpo_weight
from proxima.core.preference.two_sided import Sft
from proxima.core.segment import segment_count
from proxima.data import UserError, require
from proxima.data.field_checks import check_choices
from proxima.data.flow import Key, prompt_name
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import LabeledCompletion, PreferencePair, Trajectory, paths_of, trained_tokens
from proxima.data.transfer import to_device
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.policy_objective import first_forward
from proxima.training.objectives.protocol import FirstForward, Objective


@dataclass(frozen=True)
class PairGradients:
    """The terms of a `PreferenceObjective` that depend on the whole update, by the term's position.

    Args:
        terms: losses, and the derivatives of their sum with respect to the log-probs of both sides, [S] float each; S
            pairs.
    """

    terms: dict[int, tuple[Tensor, ...]]
    metrics: Metrics

    def take(self, rows: Sequence[int]) -> "PairGradients":
        index = torch.tensor(rows, dtype=torch.long)
        parts = {i: tuple(x[to_device(index, x.device)] for x in term) for i, term in self.terms.items()}
        return PairGradients(parts, {})


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective(Objective[PreferencePair]):
    """A weighted sum of `proxima.core.preference` losses, each averaged over the pairs of an update.

        log π(y) = Σ_t log π(y_t)  (`reduce: sum`)   or   its mean over the tokens of y  (`reduce: mean`)

    The sum is the log-prob of the completion, as in DPO's derivation: longer completions have larger log-ratios, and β
    is per nat. The mean removes the effect of the length: for the same pull, β must be larger by about the length of a
    completion, and the implicit reward is no longer that of a KL-regularised optimum.

    Args:
        terms: the losses. The metrics of implicit rewards come from the first.
        weights: one for each loss; (): all 1.
        reduce: see above. `ipo` and `sigmoid_norm` divide by the lengths themselves; `sft` always takes the sum.
        ld_alpha: weight of the tokens beyond the length of the shorter completion, see `completion_log_prob`; 1: off.
        on_policy_weights: multiply a pair's loss by the `wpo_weight` of both sides.
        measure_mismatch: report the mismatch of engine and trainer, if the pairs come from an engine.

    `reference_log_prob` of the pairs is the reference; without it, log π_ref is 0. A term that depends on the whole
    update (`aot`, which sorts) costs another forward pass: its derivatives with respect to the log-probs are computed
    before the split into micro-batches, so the split changes nothing.

    Raises: FieldError for settings that contradict one another.
    """

    terms: Sequence[Pairwise]
    weights: Sequence[float] = ()
    reduce: Literal["sum", "mean"] = "sum"
    ld_alpha: float = 1.0
    on_policy_weights: bool = False
    measure_mismatch: bool = False

    def __post_init__(self) -> None:
        kinds = [type(term).__name__ for term in self.terms]
        require(len(kinds) > 0, "terms", kinds, "must name a loss")
        fits = len(self.weights) in (0, len(kinds)) and all(0 <= weight < float("inf") for weight in self.weights)
        require(fits, "weights", self.weights, f"must be finite numbers >= 0, one for each of the {len(kinds)} losses")
        require(
            not self.weights or any(self.weights),
            "weights",
            self.weights,
            "must not all be 0: nothing would be trained",
        )
        require(0 <= self.ld_alpha <= 1, "ld_alpha", self.ld_alpha, "must be in [0, 1]")
        check_choices(self)
        divides = next((name for term, name in zip(self.terms, kinds, strict=True) if term.by_length), None)
        require(self.reduce == "sum" or not divides, "reduce", self.reduce, f"must be sum: {divides} takes the mean")
        bound = "must be 1 with reduce=mean, which has no sum to cut"
        require(self.reduce == "sum" or self.ld_alpha == 1, "ld_alpha", self.ld_alpha, bound)
        sorts = next((name for term, name in zip(self.terms, kinds, strict=True) if term.whole_batch), None)
        weighted = self.on_policy_weights and sorts is not None
        bound = f"must be false: the losses of {sorts} are not those of single pairs"
        require(not weighted, "on_policy_weights", self.on_policy_weights, bound)

    @property
    def outputs(self) -> frozenset[str]:
        if self.on_policy_weights:
            return frozenset({"log_sum_square"})
        return frozenset()

    @property
    def has_batch_statistics(self) -> bool:
        return any(term.whole_batch for term in self.terms)

    def items(self, trajectories: Sequence[Trajectory], updates: Sequence[Sequence[Key]]) -> list[list[PreferencePair]]:
        """For online DPO: the pairs of `best_against_worst`; an update gets the pairs of the groups that its keys
        name."""
        pairs = best_against_worst(trajectories)
        group = {trajectory.key: trajectory.group for trajectory in trajectories}
        items: list[list[PreferencePair]] = []
        for keys in updates:
            numbers = dict.fromkeys(group[key] for key in keys)  # each once, in order
            items.append([pairs[number] for number in numbers])
        return items

    def sequences(self, item: PreferencePair) -> Sequence[Trajectory]:
        return item.sides

    def batch_statistics(self, parts: Sequence[tuple[PackedBatch, TokenOutputs]]) -> PairGradients:
        pairs = _joined([self.pairs(batch, outputs.need("log_prob")) for batch, outputs in parts])
        chosen = pairs.chosen.detach().requires_grad_()
        rejected = pairs.rejected.detach().requires_grad_()
        pairs = replace(pairs, chosen=chosen, rejected=rejected)
        terms: dict[int, tuple[Tensor, ...]] = {}
        for i, term in enumerate(self.terms):
            if term.whole_batch:
                with torch.enable_grad():
                    loss = term(pairs)
                    slopes = torch.autograd.grad(loss.sum(), (chosen, rejected))
                terms[i] = (loss.detach(), *slopes)
        return PairGradients(terms, {})

    def denominators(self, items: Sequence[PreferencePair], statistics: PairGradients | None = None) -> list[Tensor]:
        lengths = torch.tensor([trained_tokens(item.chosen) for item in items])
        return [term.denominator(lengths) for term in self.terms]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: PairGradients | None = None) -> list[Loss]:
        pairs = self.pairs(batch, outputs.need("log_prob"))
        summed = pairs
        if self.reduce != "sum" or self.ld_alpha != 1:
            summed = _summed(batch, outputs.need("log_prob"))
        on_policy = self._on_policy(batch, outputs)
        metrics = self.terms[0].metrics(pairs) | _log_probs(summed)
        weights = self.weights or [1.0] * len(self.terms)
        losses: list[Loss] = []
        for i, (term, weight) in enumerate(zip(self.terms, weights, strict=True)):
            denominator = term.denominator(pairs.chosen_length)
            if statistics is not None and i in statistics.terms:
                numerator = _passed_on(pairs, *statistics.terms[i])
            else:
                read = summed if isinstance(term, Sft) else pairs
                loss = term(read) * on_policy
                numerator = loss.mean(dtype=torch.float64) * denominator
            losses.append(Loss(weight * numerator, denominator, metrics))
            metrics = {}
        return losses

    def token_statistics(self, batch: PackedBatch, outputs: TokenOutputs, losses: Sequence[Loss]) -> dict[str, Tensor]:
        log_prob = outputs.need("log_prob")
        return {"log_prob": log_prob, "keep": torch.ones_like(log_prob, dtype=torch.bool)}

    def measure_first(self, first: FirstForward, device: torch.device) -> Metrics:
        if not self.measure_mismatch:
            return {}
        sides = [side for side, _ in first]
        log_probs = [statistics.log_prob for _, statistics in first]
        return mismatch_metrics(first_forward(sides, log_probs, device))

    def pairs(self, batch: PackedBatch, log_prob: Tensor) -> PreferencePairs:
        """The log-probs of the pairs of a batch in which chosen and rejected completions alternate."""
        if self.reduce == "sum":
            return _summed(batch, log_prob, self.ld_alpha)
        pairs = _summed(batch, log_prob)
        chosen = pairs.chosen_length.clamp(min=1)
        rejected = pairs.rejected_length.clamp(min=1)
        return replace(
            pairs,
            chosen=pairs.chosen / chosen,
            rejected=pairs.rejected / rejected,
            reference_chosen=pairs.reference_chosen / chosen,
            reference_rejected=pairs.reference_rejected / rejected,
        )

    def _on_policy(self, batch: PackedBatch, outputs: TokenOutputs) -> Tensor | float:
        if not self.on_policy_weights:
            return 1.0
        log_prob = outputs.need("log_prob")
        log_sum_square = outputs.need("log_sum_square")
        weight = wpo_weight(log_prob, log_sum_square, batch.loss_mask, batch.cu_completions)
        return weight[0::2] * weight[1::2]


def best_against_worst(trajectories: Sequence[Trajectory]) -> dict[int, PreferencePair]:
    """The two trajectories of each group as a pair, by group; the one with the larger mean advantage is chosen.

    Raises:
        ValueError: a group does not have exactly two trajectories, or both have the same advantage.
        UserError: a completion of a group is a forked episode.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.turn:
            reason = (
                f"an episode of {prompt_name(trajectory.uid)} has several paths, and a preference compares single ones"
            )
            raise UserError(reason, remedy="set episode.forks=refuse")
        groups.setdefault(trajectory.group, []).append(trajectory)
    pairs: dict[int, PreferencePair] = {}
    for number, members in groups.items():
        members.sort(key=lambda trajectory: -float(trajectory.advantage.mean()))
        advantages = {float(trajectory.advantage.mean()) for trajectory in members}
        if len(members) != 2 or len(advantages) != 2:
            got = f"{len(members)} completions with advantages {sorted(advantages)}"
            raise ValueError(f"group {number} has {got}; a pair is two that differ: select with best_and_worst")
        pairs[number] = PreferencePair(row=number, chosen=members[0], rejected=members[1])
    return pairs


def reference_log_prob(batch: PackedBatch) -> Tensor:
    """[N] float, nats, log-probs of the reference; 0 without one."""
    reference = batch.reference_log_prob
    if reference is None:
        return torch.zeros_like(batch.advantage)
    return reference


def _summed(batch: PackedBatch, log_prob: Tensor, alpha: float = 1.0) -> PreferencePairs:
    """The pairs of a batch in which chosen and rejected completions alternate."""
    edges = batch.cu_completions
    length = segment_count(batch.loss_mask, edges)
    other = length.view(-1, 2).flip(1).flatten()
    ours = completion_log_prob(log_prob, batch.loss_mask, edges, other, alpha)
    reference = completion_log_prob(reference_log_prob(batch), batch.loss_mask, edges, other, alpha)
    return PreferencePairs(
        chosen=ours[0::2],
        rejected=ours[1::2],
        reference_chosen=reference[0::2],
        reference_rejected=reference[1::2],
        chosen_length=length[0::2],
        rejected_length=length[1::2],
    )


def _joined(parts: Sequence[PreferencePairs]) -> PreferencePairs:
    names = [each.name for each in fields(PreferencePairs)]
    return PreferencePairs(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _passed_on(pairs: PreferencePairs, loss: Tensor, *slopes: Tensor) -> Tensor:
    """[] float64 with the given value of the losses, and the given derivatives with respect to the log-probs of both
    sides."""
    sides = (pairs.chosen, pairs.rejected)
    steps = [slope * (side - side.detach()) for slope, side in zip(slopes, sides, strict=True)]
    return (loss + steps[0] + steps[1]).sum(dtype=torch.float64)


def _log_probs(pairs: PreferencePairs) -> Metrics:
    """The log-prob of a completion, nats, summed over its tokens."""
    every = torch.ones_like(pairs.chosen, dtype=torch.bool)
    return {f"logps/{side}": SumCount.over(getattr(pairs, side), every) for side in ("chosen", "rejected")}


@dataclass(frozen=True)
class KlAnchor:
    """KTO's z before clamping, [] float; the same for every micro-batch."""

    value: Tensor
    metrics: Metrics

    def take(self, rows: Sequence[int]) -> "KlAnchor":
        return self


@dataclass(frozen=True, kw_only=True)
class KtoObjective(Objective[LabeledCompletion]):
    """`proxima.core.preference.kto.Kto` over whole updates of completions labeled good or bad.

    With `anchor: kl`, z is the mean of log π − log π_ref over the update's prompts, each with the completion of another
    row, from a forward pass without gradient before the update; otherwise it is 0.
    """

    spec: Kto

    @property
    def has_batch_statistics(self) -> bool:
        return self.spec.anchor == "kl"

    def sequences(self, item: LabeledCompletion) -> Sequence[Trajectory]:
        """The completion, with the label as the sign of its advantage."""
        sign = 1 if item.good else -1
        label = np.asarray(sign, np.float32)
        return [replace(path, advantage=label) for path in paths_of(item.completion)]

    def statistics_sequences(self, item: LabeledCompletion) -> Sequence[Trajectory]:
        if item.mismatched is None:
            raise ValueError(f"KTO needs a mismatched completion in every item; row {item.row} lacks it.")
        return paths_of(item.mismatched)

    def batch_statistics(self, parts: Sequence[tuple[PackedBatch, TokenOutputs]]) -> KlAnchor:
        gap = torch.cat([_log_ratio(batch, outputs.need("log_prob")) for batch, outputs in parts])
        return KlAnchor(gap.mean(), {"kl": SumCount.over(gap, torch.ones_like(gap, dtype=torch.bool))})

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: KlAnchor | None = None) -> list[Loss]:
        edges = batch.cu_completions
        good = batch.advantage[edges[:-1]] > 0
        ours = completion_log_prob(outputs.need("log_prob"), batch.loss_mask, edges)
        reference = completion_log_prob(reference_log_prob(batch), batch.loss_mask, edges)
        kl = 0.0 if statistics is None else statistics.value
        loss = self.spec(ours, reference, good, kl)
        reward = self.spec.beta * (ours - reference)
        metrics: Metrics = {}
        for side, members in (("chosen", good), ("rejected", ~good)):
            metrics[f"rewards/{side}"] = SumCount.over(reward, members)
            metrics[f"logps/{side}"] = SumCount.over(ours, members)
        count = good.new_full((), len(good), dtype=torch.float64)
        return [Loss(loss.sum(dtype=torch.float64), count, metrics)]


def _log_ratio(batch: PackedBatch, log_prob: Tensor) -> Tensor:
    """[C] nats, log π − log π_ref of the completions."""
    return completion_log_prob(log_prob - reference_log_prob(batch), batch.loss_mask, batch.cu_completions)
