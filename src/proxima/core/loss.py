"""The policy loss of a batch: surrogate, correction, penalty, aggregation, in that order; the specs' protocols; and
`precompute`, the decisions over the whole batch before it is split."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, mul
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from proxima.core.band import Band
from proxima.core.divergence import TOP_K_NEEDS
from proxima.core.metrics import Metrics, Peak, SumCount, k3
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_log_ratio
from proxima.core.segment import segment_count, segment_mean
from proxima.core.spec import Spec
from proxima.data import NoFieldError, NotFiniteError
from proxima.data.policy_batch import PolicyBatch

NextMissing = Literal["decoupled", "drop_token", "drop_sample"]  # how a token without `next_log_prob` is treated
SUPPLIED_BY: dict[str, str] = {
    "advantage": "an advantage spec does (per sequence, spread over its tokens)",
    "behavior_log_prob": "the engine does: the log-prob of each sampled token",
    "proximal_log_prob": "`proximal: recompute` does, or behavior_log_prob, which is its default",
    "next_log_prob": "`proximal: next` does",
    "reference_log_prob": "a forward pass of the frozen reference model does",
    "entropy": "the model does, if its forward pass computes entropy",
    "token": "the caller does: the id of each response token",
    "top_k": "the engine does, with top-k log-probs switched on",
    "behavior_top_k_log_prob": "the engine does, with top-k log-probs switched on",
    "teacher_log_prob": "a forward pass of the teacher does",
    "bucket_log_prob": "the model does, given the token ids in `bucket_token`",
    "teacher_bucket_log_prob": "a forward pass of the teacher does",
    "top_k_log_prob": "the model does, given the token ids in `top_k`",
}


@dataclass(frozen=True)
class TokenLoss:
    """The result of a surrogate.

    Args:
        loss: [N] float, with gradient, to be minimised; 0 outside the loss mask.
        keep: [N] bool, False for clipped and masked tokens and outside the loss.
        metrics: the surrogate's own statistics; `policy_loss` adds the common ones (ratio, KL, masked fraction).
        unit: "sequence" if the loss of a token is that of its sequence; corrections then enter by their geometric mean.
    """

    loss: Tensor
    keep: Tensor
    metrics: Metrics
    unit: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class Corrected:
    """The result of a correction: `weight` [N] float, detached, 0 where rejected; `keep` [N] bool, False there."""

    weight: Tensor
    keep: Tensor
    metrics: Metrics


class Surrogate(Spec, Protocol):
    """A frozen dataclass whose fields are its config; calling it is the mathematics. Subclass it to get the defaults.

    zero_advantage_inert: an advantage of exactly 0 gives zero loss and zero gradient and enters no statistic, so such a
        sequence may skip forward and backward.
    whole_batch: `select_tokens` depends on all tokens of the optimizer batch (see `core.precompute`).
    unbounded: fields under which nothing bounds the update, so that the gradient is that of -A r; empty: no such
        fields.
    bounds: the fields that a `Hold` scales; empty: none that can be scaled together.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage", "proximal_log_prob"})
    zero_advantage_inert: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    unbounded: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    bounds: ClassVar[tuple[str, ...]] = ()

    def __call__(self, b: PolicyBatch) -> TokenLoss: ...

    def scaled(self, factor: float) -> Self:
        """The same with its `bounds` times a factor; those that are not set stay so."""
        given = {name: getattr(self, name) for name in self.bounds}
        return replace(self, **{name: value * factor for name, value in given.items() if value is not None})  # type: ignore[type-var]  # a protocol of dataclasses

    def select_tokens(self, b: PolicyBatch) -> Tensor | None:
        """[N] bool, the tokens that the surrogate selects by looking at the whole batch; None: it selects none."""
        return None

    def band(self, b: PolicyBatch) -> Band | None:
        """The measured value of each token and its bounds, for the viewer; None: not available. The `log_prob` of the
        batch is detached."""
        return None


class Aggregate(Spec, Protocol):
    """Sums per-token losses. The denominator needs no forward pass; both add up over micro-batches and ranks."""

    def __call__(self, loss: Tensor, b: PolicyBatch) -> Tensor: ...

    def denominator(self, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor: ...


class Correction(Spec, Protocol):
    """Weights and rejections from behavior to proximal policy. Subclass it to get the defaults.

    rejected: a rejected token stays in the denominator (`count`) or leaves it (`drop`).
    whole_batch: the result for a token depends on all tokens of the optimizer batch (see `core.precompute`).
    loss_term: [N] with gradient, 0 outside the loss, added to the loss that `surrogate` and all `corrections` give;
        None: it only weights and rejects.
    conflict: why it can't be combined with this surrogate and these corrections, itself among them, as the second half
        of a sentence; None: it can.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"behavior_log_prob", "proximal_log_prob"})

    @property
    def rejected(self) -> Literal["count", "drop"]: ...

    @property
    def whole_batch(self) -> bool:
        return self.rejected == "drop"

    def __call__(self, b: PolicyBatch) -> Corrected: ...

    def loss_term(self, b: PolicyBatch, surrogate: Surrogate, corrections: Sequence["Correction"]) -> Tensor | None:
        return None

    def conflict(self, surrogate: Surrogate | None, corrections: Sequence["Correction"]) -> str | None:
        return None


class Penalty(Spec, Protocol):
    """[N] per-token penalty, times its coefficient, added to the loss."""

    def __call__(self, b: PolicyBatch) -> Tensor: ...


@dataclass(frozen=True)
class Loss:
    """A loss as numerator and denominator, not yet divided.

    Args:
        numerator: [] float64, with gradient.
        denominator: [] float64. Add both over micro-batches and ranks, then divide once.
        metrics: mergeable statistics over the loss tokens.
    """

    numerator: Tensor
    denominator: Tensor
    metrics: Metrics

    @property
    def value(self) -> Tensor:
        """numerator / denominator, [] float64 with gradient; a denominator of 0 (no loss token, `token_sum`) counts as
        1."""
        return self.numerator / torch.where(self.denominator == 0, torch.ones_like(self.denominator), self.denominator)


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """A loss with `keep` [N] bool, the loss tokens that surrogate and corrections kept; `selected`, that of the batch;
    and, if the check is left to the caller, `invalid`, its `invalid_tokens`."""

    keep: Tensor
    invalid: Tensor | None = None
    selected: Tensor | None = None


def policy_loss(
    batch: PolicyBatch,
    *,
    surrogate: Surrogate,
    aggregate: Aggregate,
    correction: Correction | Sequence[Correction] | None = None,
    penalty: Penalty | Sequence[Penalty] | None = None,
    check: bool | Literal["later"] = True,
) -> PolicyLoss:
    """The loss of a batch, not yet divided, with its metrics.

        loss_t = w_t · surrogate_t + Σ penalty_t + Σ term_t        numerator, denominator = aggregate(loss)

    Args:
        batch: packed tokens. Positions outside the loss mask may hold NaN.
        surrogate, aggregate, correction, penalty: specs, as in SURROGATES, AGGREGATES, CORRECTIONS and PENALTIES; the
            last two may be sequences. Corrections see only this batch; if it holds `weight`, from `core.precompute` or
            your own, that is applied instead, with or without `correction`.
        check: refuse impossible log-probs; costs one device sync per call. `later` leaves it to the caller, who calls
            `require_valid` when it syncs anyway.
    Returns: `PolicyLoss`. In your own training loop:
        `policy_loss(b, surrogate=Cppo(), aggregate=TokenMean()).value.backward()`.
    Raises: ValueError if a spec needs a tensor that the batch lacks, naming what would supply it. Or, with `check`, if
        a log-prob of a sampled token is NaN, infinite or above 0, or the advantage of a loss token is not finite, with
        token, sequence and position.
    Edge cases: a batch without loss tokens gives numerator 0 with zero gradient, denominator 0 and value 0.
    Metrics over loss tokens, of the ratio π/π_prox: `ratio_mean`, `ratio_max`, `approx_kl` and `approx_kl_k1` (k3,
    k1 of KL(π_prox‖π)), `reference_kl/mean` (k3 of KL(π‖π_ref)), and `masked_fraction` (not kept); of π against μ see
    `core.mismatch_metrics`. A surrogate of unit "sequence" is weighted by the geometric mean of its kept tokens'
    weights.
    Differs: corrections do not weight penalties (nor in verl and TRL, T5). verl's `geo_mean` counts rejected tokens in
        the geometric mean, as 1e-10 (P10).
    """
    corrections = as_list(correction)
    penalties = as_list(penalty)
    for spec in (surrogate, *corrections, *penalties):
        check_needs(spec, batch)
    if check is True:
        check_values(batch)
    invalid = None
    if check == "later":
        invalid = invalid_tokens(batch)
    batch, accepted, measured = apply_corrections(batch, corrections)
    token = surrogate(batch)
    keep = token.keep & accepted
    metrics = common_metrics(batch, keep) | token.metrics | measured
    loss = token.loss
    if batch.weight is not None:
        weight = batch.weight
        if token.unit == "sequence":
            weight = _geometric_mean(batch, weight)
        loss = loss * weight
    terms = [spec.loss_term(batch, surrogate, corrections) for spec in corrections]
    for term in terms:
        if term is not None:
            loss = loss + term
    for spec in penalties:
        loss = loss + spec(batch)
    return PolicyLoss(
        numerator=aggregate(loss, batch),
        denominator=aggregate.denominator(batch.loss_mask, batch.cu_seqlens),
        metrics=metrics,
        keep=keep,
        invalid=invalid,
        selected=batch.selected,
    )


def needs_precompute(surrogate: Surrogate, corrections: Sequence[Correction] = ()) -> bool:
    """True when loss and gradient of micro-batches are only exact after `core.precompute`."""
    return surrogate.whole_batch or any(spec.whole_batch for spec in corrections)


@dataclass(frozen=True)
class Precomputed:
    """`batch` with `weight`, `selected` and a loss mask reduced where a correction drops; `metrics` of the corrections,
    counted once."""

    batch: PolicyBatch
    metrics: Metrics

    def take(self, sequences: Sequence[int]) -> "Precomputed":
        """The part for a micro-batch; the metrics stay with the whole."""
        return Precomputed(self.batch.take(sequences), {})


@torch.no_grad()
def precompute(
    batch: PolicyBatch, *, surrogate: Surrogate, correction: Correction | Sequence[Correction] | None = None
) -> Precomputed:
    """Make the decisions over the whole optimizer batch before it is split into micro-batches.

    Three things look at all tokens at once: surrogates that select tokens (`clip_cov`, `kl_cov`, `m2po`), corrections
    that normalise or rank (`normalise`, `second_moment`, `top_entropy`), and rejections that leave the denominator
    (`rejected: drop`). They are decided once, and the outcome is written into the batch: every split of it then gives
    the same loss and gradient. Other specs do not need it, but allow it.

    Args:
        batch: all tokens of one optimizer step, on all ranks. `log_prob` may be of an earlier forward: then `clip_cov`,
            `kl_cov`, `m2po` and `towards: current` decide by that forward, for the whole step.
        surrogate, correction: as for `policy_loss`; pass the same ones there.
    Returns: `Precomputed`; `take` micro-batches of it. Its metrics are complete: the micro-batches do not repeat
        them.
    Raises: ValueError as `policy_loss`, for a missing tensor.
    """
    corrections = as_list(correction)
    for spec in (surrogate, *corrections):
        check_needs(spec, batch)
    batch, _, metrics = apply_corrections(batch, corrections)
    return Precomputed(replace(batch, selected=surrogate.select_tokens(batch)), metrics)


def as_list(specs: Any) -> list[Any]:
    """None, one spec or several, as a list."""
    if specs is None:
        return []
    if isinstance(specs, (list, tuple)):
        return list(specs)
    return [specs]


@dataclass(frozen=True)
class CombinedCorrections:
    """The results of several corrections: weights multiply, rejections add up, and the order is irrelevant.

    Args:
        batch: what each of them read.
        results: each correction with its result.
    """

    batch: PolicyBatch
    results: Sequence[tuple[Correction, Corrected]]

    @classmethod
    def of(cls, batch: PolicyBatch, corrections: Sequence[Correction]) -> "CombinedCorrections":
        """Each correction sees the original batch; one that reads `next_log_prob` sees only the loss tokens that have
        it, and so rejects those where it is NaN."""
        known = batch
        if batch.next_log_prob is not None and any("next_log_prob" in spec.needs for spec in corrections):
            known = batch.with_loss_mask(batch.loss_mask & ~batch.next_log_prob.isnan())
        results: list[tuple[Correction, Corrected]] = []
        for spec in corrections:
            read = known if "next_log_prob" in spec.needs else batch
            results.append((spec, spec(read)))
        return cls(batch, results)

    @property
    def weight(self) -> Tensor | None:
        """[N] the product of the weights; None: there is no correction."""
        if not self.results:
            return None
        return reduce(mul, (corrected.weight for _, corrected in self.results))

    @property
    def keep(self) -> Tensor:
        """[N] bool, the loss tokens that no correction rejects."""
        return reduce(and_, (corrected.keep for _, corrected in self.results), self.batch.loss_mask)

    @property
    def reduced(self) -> PolicyBatch:
        """The batch without the loss tokens that a correction drops."""
        dropping = [corrected.keep for spec, corrected in self.results if spec.rejected == "drop"]
        if not dropping:
            return self.batch
        return self.batch.with_loss_mask(reduce(and_, dropping, self.batch.loss_mask))


@torch.no_grad()
def apply_corrections(batch: PolicyBatch, corrections: Sequence[Correction]) -> tuple[PolicyBatch, Tensor, Metrics]:
    """Combine corrections.

    Returns: the batch with its `weight`, None for 1, and without the loss tokens that a correction drops; [N] bool,
        the loss tokens that none rejects; and the metrics.
    """
    if batch.weight is not None:  # precomputed: the loss mask is already reduced and the metrics are counted
        keep = batch.loss_mask & (batch.weight > 0)
        return replace(batch, weight=batch.masked("weight").detach()), keep, {}
    if not corrections:
        return batch, batch.loss_mask, {}
    combined = CombinedCorrections.of(batch, corrections)
    keep = combined.keep
    metrics: Metrics = {}
    for _, corrected in combined.results:
        metrics |= corrected.metrics
    nonempty = segment_count(batch.loss_mask, batch.cu_seqlens) > 0
    hit = segment_count(batch.loss_mask & ~keep, batch.cu_seqlens) > 0
    metrics["correction/rejected_fraction"] = SumCount.over(~keep, batch.loss_mask)
    metrics["correction/rejected_seq_fraction"] = SumCount.over(hit, nonempty)
    reduced = combined.reduced
    if reduced is not batch:
        metrics["correction/rejected_counted_fraction"] = SumCount.over(~keep, reduced.loss_mask)
    return replace(reduced, weight=combined.weight), keep, metrics


def _geometric_mean(b: PolicyBatch, weight: Tensor) -> Tensor:
    """[N]: the geometric mean of the sequence's positive weights at each of those tokens, 0 at the others."""
    kept = b.loss_mask & (weight > 0)
    log_weight = torch.where(kept, weight, torch.ones_like(weight)).log()
    mean = segment_mean(log_weight, kept, b.cu_seqlens).exp()
    return torch.where(kept, mean[b.sequence_index], 0.0)


def check_needs(spec: Spec, batch: PolicyBatch) -> None:
    """Raise NoFieldError naming the first tensor in `spec.needs` that the batch lacks, and what would supply it."""
    needs = spec.needs
    if batch.top_k_divergence is not None:
        needs = needs - TOP_K_NEEDS
    for name in sorted(needs):
        if getattr(batch, name) is None:
            source = SUPPLIED_BY.get(name, "the caller must set it")
            raise NoFieldError(f"{type(spec).__name__} needs `{name}`, which the batch lacks: {source}.")


OF_SAMPLED = ("log_prob", "behavior_log_prob", "proximal_log_prob")
CHECKED = (*OF_SAMPLED, "reference_log_prob", "advantage")
LOG_PROB_SLACK = 1e-4  # a log-prob up to this far above 0 is rounding (logit − logsumexp)


@torch.no_grad()
def check_values(b: PolicyBatch) -> None:
    """Raise ValueError for an impossible log-prob of a sampled token, or a loss token's advantage that isn't finite;
    NotFiniteError, a ValueError, if the policy's own log-prob is NaN."""
    codes = invalid_tokens(b)
    if bool(codes.any()):
        sequence = int(b.sequence_index[codes.nonzero()[0]])
        start, end = b.cu_seqlens[sequence : sequence + 2].tolist()
        of_sequence = codes[start:end].cpu().numpy()
        require_valid(of_sequence, lambda name, at: float(getattr(b, name)[start + at]), f"sequence {sequence}")


@torch.no_grad()
def invalid_tokens(b: PolicyBatch) -> Tensor:
    """[N] int8, on the device of the batch: 0, or 1 + the index in `CHECKED` of the first field whose value is
    impossible there."""
    assert b.sampled is not None
    codes = torch.zeros(len(b), dtype=torch.int8, device=b.log_prob.device)
    for i, name in reversed(list(enumerate(CHECKED))):
        value = getattr(b, name)
        if value is None:
            continue
        checked = b.sampled if name in OF_SAMPLED else b.loss_mask
        if name == "advantage":
            valid = value.isfinite()
        else:
            valid = (value <= LOG_PROB_SLACK) & (value > -torch.inf)
        codes.masked_fill_(checked & ~valid, i + 1)
    return codes


def require_valid(codes: Any, value_of: Callable[[str, int], float], label: str) -> None:
    """Raise as `check_values` does if one of the `codes` [T], numpy, from `invalid_tokens` is not 0; `value_of` gives
    the value of a field at a token, and `label` names the sequence."""
    if not codes.any():
        return
    at = int((codes != 0).argmax())
    name = CHECKED[int(codes[at]) - 1]
    wrong = value_of(name, at)
    count = int((codes == codes[at]).sum())
    remedy = "a log-prob is finite and at most 0; if no policy sampled the token, clear `sampled`"
    if name == "advantage":
        remedy = "mask the token out of the loss"
    message = f"PolicyBatch.{name}: {wrong} at token {at} of {label}, {count} such tokens in it: {remedy}"
    # The current policy's log-probs come from its weights; all others come from the caller.
    if name == "log_prob" and math.isnan(wrong):
        raise NotFiniteError(message)
    raise ValueError(message)


@torch.no_grad()
def common_metrics(b: PolicyBatch, keep: Tensor) -> Metrics:
    """The statistics common to all surrogates, over the loss tokens, as far as the batch has the tensors for them."""
    mask = b.loss_mask
    metrics: Metrics = {"masked_fraction": SumCount.over(~keep, mask)}
    if b.proximal_log_prob is not None:
        log_ratio = masked_log_ratio(b).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = log_ratio.exp()
        metrics["ratio_mean"] = SumCount.over(ratio, mask)
        metrics["ratio_max"] = Peak.over(ratio, mask)
        metrics["approx_kl"] = SumCount.over(k3(log_ratio), mask)
        metrics["approx_kl_k1"] = SumCount.over(-log_ratio, mask)
    if b.reference_log_prob is not None:
        d = (b.masked("reference_log_prob") - b.masked("log_prob")).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        metrics["reference_kl/mean"] = SumCount.over(k3(d), mask)
    if b.entropy is not None:
        metrics["entropy"] = SumCount.over(b.entropy, mask)
    return metrics
