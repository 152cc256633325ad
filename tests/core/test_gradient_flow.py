"""Where a gradient may go: into the policy's own log-probs and entropy, and into nothing else; and what a token of
probability 0 does to it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from proxima.core import (
    ADVANTAGES,
    AGGREGATES,
    CORRECTIONS,
    DISTILLATIONS,
    PENALTIES,
    PREFERENCES,
    SURROGATES,
    Dppo,
    Importance,
    PpoClip,
    PreferencePairs,
    Reinforce,
    Rejection,
    RewardLoss,
    TokenMean,
    TokenRewards,
    TokenSum,
    ValueLoss,
    distillation_loss,
    gradient_weight,
    interpolated_proximal,
    mismatch_metrics,
    policy_loss,
    precompute,
    segment_wise_log_prob,
)
from proxima.core.correction.guard import MismatchGuard
from proxima.core.penalty import K1, K3, EntropyBonus
from proxima.core.preference.kto import Kto
from proxima.core.reward_kl import RewardKl
from proxima.data.policy_batch import GRADIENT, PolicyBatch
from proxima.laws.batches import make_batch
from tests.core.batches import packed, variants

INFINITY = float("inf")
SPECS, CORRECTED = variants(SURROGATES), variants(CORRECTIONS)
PENALISED, DISTILLED = variants(PENALTIES), variants(DISTILLATIONS)
READS_GRADIENT = {"entropy": {"entropy"}, "score_centering": {"top_k_log_prob"}}  # in addition to log_prob


def with_leaves(make: Callable[..., PolicyBatch] = PolicyBatch) -> tuple[PolicyBatch, dict[str, Tensor]]:
    """A batch of which every float tensor came with a gradient, and these tensors."""
    b = make_batch([4, 1, 6], seed=5, garbage=False)
    columns = {f.name: getattr(b, f.name) for f in fields(b) if isinstance(getattr(b, f.name), Tensor)}
    leaves = {k: v.detach().clone().requires_grad_() for k, v in columns.items() if v.is_floating_point()}
    return make(**columns | leaves), leaves


def padded(**columns: Tensor) -> PolicyBatch:
    """The same batch by way of `from_padded`."""
    b = PolicyBatch(**{k: v.detach() for k, v in columns.items()})
    index = torch.full((b.sequences, int(b.lengths.max())), -1, dtype=torch.long)
    index = index.masked_scatter(torch.arange(index.shape[1]) < b.lengths[:, None], torch.arange(len(b)))
    inside = index >= 0
    rows = {k: columns[k][index.clamp(min=0)] for k in b.token_fields() if k != "loss_mask"}
    rows["sampled"] = rows["sampled"] & inside
    return PolicyBatch.from_padded(b.loss_mask[index.clamp(min=0)] & inside, **rows)


def reached(value: Tensor, leaves: Mapping[str, Tensor]) -> set[str]:
    """The tensors into which the gradient of `value` flows."""
    value.sum().backward()
    return {name for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("entrance", [PolicyBatch, padded, "changed", "taken"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_surrogate_moves_log_prob_alone(name: str, entrance: Any) -> None:
    make = entrance if callable(entrance) else PolicyBatch
    b, leaves = with_leaves(make)
    if entrance == "changed":
        b = replace(b.with_loss_mask(b.loss_mask), **leaves)
    if entrance == "taken":
        b = PolicyBatch.cat([b.take([1, 0]), b.take([2])])
    assert reached(SPECS[name](b).loss, leaves) == {"log_prob"}
    b, leaves = with_leaves(make)
    assert reached(policy_loss(b, surrogate=SPECS[name], aggregate=TokenMean()).value, leaves) == {"log_prob"}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_nothing_of_a_batch_gets_a_gradient_later(name: str) -> None:
    """Not even a column that somebody asks a gradient of in the batch itself."""
    b, _ = with_leaves()
    columns = {k: v for k, v in b.token_fields().items() if v.is_floating_point() and k not in GRADIENT}
    for value in columns.values():
        value.requires_grad_()
    policy_loss(b, surrogate=SPECS[name], aggregate=TokenSum()).numerator.backward()
    assert [k for k, v in columns.items() if v.grad is not None] == []


@pytest.mark.parametrize("name", sorted(CORRECTED))
@pytest.mark.parametrize("prepared", [False, True])
def test_a_correction_moves_nothing_but_what_it_reads_of_the_policy(name: str, prepared: bool) -> None:
    spec = CORRECTED[name]
    surrogate: Any = Reinforce() if name.startswith("score_centering") else SPECS["drpo"]
    b, leaves = with_leaves()
    assert not spec(b).weight.requires_grad
    if prepared:
        b = precompute(b, surrogate=surrogate, correction=spec).batch
        assert b.weight is not None
        leaves["weight"] = b.weight.clone().requires_grad_()
        b = replace(b, weight=leaves["weight"])
    loss = policy_loss(b, surrogate=surrogate, correction=spec, aggregate=TokenMean())
    assert reached(loss.value, leaves) == {"log_prob"} | READS_GRADIENT.get(name, set())


@pytest.mark.parametrize("name", sorted(PENALISED))
def test_a_penalty_moves_nothing_but_what_it_reads_of_the_policy(name: str) -> None:
    b, leaves = with_leaves()
    expected = READS_GRADIENT.get(name, {"log_prob"})
    assert reached(PENALISED[name](b), leaves) == expected
    b, leaves = with_leaves()
    loss = policy_loss(b, surrogate=PpoClip(), penalty=PENALISED[name], aggregate=TokenMean())
    assert reached(loss.value, leaves) == {"log_prob"} | expected


@pytest.mark.parametrize("name", sorted(DISTILLED))
@pytest.mark.parametrize("aggregate", sorted(AGGREGATES))
def test_a_distillation_moves_the_student_alone(name: str, aggregate: str) -> None:
    b, leaves = with_leaves()
    loss = distillation_loss(b, divergence=DISTILLED[name], aggregate=AGGREGATES[aggregate]())
    assert reached(loss.value, leaves) == ({"bucket_log_prob"} if DISTILLED[name].top_k else {"log_prob"})


@pytest.mark.parametrize("kind", sorted(PREFERENCES))
def test_a_preference_does_not_move_the_reference(kind: str) -> None:
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    leaves = {name: torch.tensor([-3.0, -5.0]).mul(i + 1).requires_grad_() for i, name in enumerate(names)}
    lengths = torch.tensor([3, 4])
    pairs = PreferencePairs(**leaves, chosen_length=lengths, rejected_length=lengths)
    assert reached(PREFERENCES[kind]()(pairs), leaves) == {"chosen", "rejected"} - (
        {"rejected"} if kind == "sft" else set()
    )


def test_the_other_losses_move_what_is_trained() -> None:
    log_prob, reference, kl = (torch.tensor([x, x], requires_grad=True) for x in (-2.0, -3.0, 0.1))
    leaves = {"log_prob": log_prob, "reference": reference, "kl": kl}
    assert reached(Kto()(log_prob, reference, torch.tensor([True, False]), kl.mean()), leaves) == {"log_prob"}
    value, before, returns = (torch.tensor([x, x], requires_grad=True) for x in (0.5, 0.4, 1.0))
    loss, _ = ValueLoss()(value, before, returns, torch.tensor([True, True]))
    assert reached(loss, {"value": value, "before": before, "returns": returns}) == {"value"}
    chosen, rejected, margin = (torch.tensor([x, x], requires_grad=True) for x in (0.5, 0.4, 1.0))
    loss, _ = RewardLoss(center=0.1)(chosen, rejected, margin)
    assert reached(loss, {"chosen": chosen, "rejected": rejected, "margin": margin}) == {"chosen", "rejected"}


@pytest.mark.parametrize("kind", sorted(k for k, cls in ADVANTAGES.items() if cls.per_token))
def test_an_advantage_of_tokens_is_data(kind: str) -> None:
    mask, each = torch.ones(4, dtype=torch.bool), torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)
    rewards = TokenRewards(
        reward=each, loss_mask=mask, cu_seqlens=torch.tensor([0, 2, 4]), value=each, score_variance=each,
        bootstrap=torch.zeros(2, requires_grad=True), group=torch.zeros(2, dtype=torch.long),
        turn=torch.zeros(4, dtype=torch.long), state=torch.zeros(4, dtype=torch.long),
    )  # fmt: skip
    assert not ADVANTAGES[kind]()(rewards).requires_grad


def test_intermediate_policies_and_gradient_weights_are_data() -> None:
    pi, mu, version = (
        torch.tensor([-1.0], requires_grad=True),
        torch.tensor([-2.0], requires_grad=True),
        torch.tensor([0]),
    )
    assert not interpolated_proximal(mu, pi, version, 2).requires_grad
    assert not segment_wise_log_prob(mu, pi, mu, version, 2).requires_grad
    assert not gradient_weight(PpoClip(), pi, mu, torch.ones(1, requires_grad=True)).requires_grad


# A log-prob of -inf: the policy excludes the token. Three tokens in the loss, of which the middle one is at stake.
BOTH, ONE = (-INFINITY, -INFINITY), (-1.0, -INFINITY)


def excluded(pi: float, others: float, **columns: Any) -> tuple[PolicyBatch, Tensor]:
    leaf = torch.tensor([-1.0, pi, -0.5], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-1.1, others, -0.6], dtype=torch.float64)
    top = torch.tensor([[-1.0, -2.0], [-INFINITY, -INFINITY], [-0.5, -INFINITY]], dtype=torch.float64)
    names = ("behavior_log_prob", "proximal_log_prob", "next_log_prob", "reference_log_prob", "teacher_log_prob")
    return packed(
        log_prob=leaf, entropy=leaf.detach().neg().clamp(max=9).requires_grad_(), **dict.fromkeys(names, other),
        advantage=torch.tensor([1.0, -0.5, 0.5], dtype=torch.float64), token=torch.tensor([0, 1, 0]),
        top_k=torch.tensor([[0, 1]] * 3), top_k_log_prob=top, behavior_top_k_log_prob=top,
        bucket_log_prob=top.clone().requires_grad_(), teacher_bucket_log_prob=top, **columns,
    ), leaf  # fmt: skip


EVERYTHING = [("surrogate", n) for n in sorted(SPECS)] + [("penalty", n) for n in sorted(PENALISED)]
EVERYTHING += [("distillation", n) for n in sorted(DISTILLED)] + [("correction", n) for n in sorted(CORRECTED)]


@pytest.mark.parametrize("at", [BOTH, ONE, ONE[::-1]], ids=["both", "centre", "policy"])
@pytest.mark.parametrize(("slot", "name"), EVERYTHING)
def test_an_excluded_token_gives_no_nan(slot: str, name: str, at: tuple[float, float]) -> None:
    b, leaf = excluded(*at)
    spec = {"surrogate": SPECS, "penalty": PENALISED, "distillation": DISTILLED, "correction": CORRECTED}[slot][name]
    metrics: dict[str, Any] = {}
    if slot == "surrogate":
        loss = policy_loss(b, surrogate=spec, aggregate=TokenSum(), check=False)
        value, metrics = loss.numerator, loss.metrics
    elif slot == "correction":
        corrected = spec(b)
        assert bool(corrected.weight.isfinite().all())
        surrogate: Any = Reinforce() if name.startswith("score_centering") else PpoClip()
        loss = policy_loss(b, surrogate=surrogate, correction=spec, aggregate=TokenSum(), check=False)
        value, metrics = loss.numerator, loss.metrics
    else:
        value = spec(b).sum()
    assert bool(value.isfinite())
    value.backward()
    assert leaf.grad is None or bool(leaf.grad.isfinite().all())
    if at[0] == -INFINITY and leaf.grad is not None:
        assert float(leaf.grad[1]) == 0
    assert [key for key, metric in metrics.items() if math.isnan(metric.value)] == []


def test_an_excluded_token_by_hand() -> None:
    """Both policies exclude it: they agree, ratio 1. One does: the weight is at the bound of its exponent."""
    for level in ("token", "sequence", "geometric"):
        b, _ = excluded(*BOTH)
        rho = {"token": [0.1, 0.0, 0.1], "sequence": [0.2] * 3, "geometric": [0.2 / 3] * 3}[level]
        weight = Importance(level=level, bound="none", towards="current")(b).weight  # type: ignore[arg-type]
        torch.testing.assert_close(weight, torch.tensor(rho, dtype=torch.float64).exp())
    assert Importance(bound="none", towards="current")(excluded(*ONE)[0]).weight[1] == pytest.approx(math.exp(20))
    assert Importance(towards="current")(excluded(*ONE)[0]).weight[1] == 2.0
    vetoed = Importance(towards="current", veto=1e-4)
    assert vetoed(excluded(*BOTH)[0]).keep.tolist() == [True] * 3
    assert vetoed(excluded(*ONE[::-1])[0]).keep.tolist() == [False] * 3
    for statistic, upper in (("ratio", 2.0), ("k1", 2.0), ("k2", 2.0), ("k3", 2.0), ("tv", 0.3), ("binary_kl", 0.3)):
        spec = Rejection(statistic=statistic, upper=upper, towards="current")  # type: ignore[arg-type]
        assert spec(excluded(*BOTH)[0]).keep.tolist() == [True] * 3, statistic
        assert spec(excluded(*ONE)[0]).keep.tolist() == [True, False, True], statistic


def test_a_mismatch_with_an_excluded_token() -> None:
    metrics = mismatch_metrics(excluded(*BOTH)[0])
    assert metrics["mismatch/rollout_is_mean"].value == pytest.approx((2 * math.exp(0.1) + 1) / 3)
    assert metrics["mismatch/log_prob_absdiff_max"].value == pytest.approx(0.1)
    assert metrics["mismatch/k3_kl"].value == pytest.approx(2 * (math.expm1(0.1) - 0.1) / 3)
    assert not MismatchGuard().rejects(excluded(*BOTH)[0]).any()
    for at in (ONE, ONE[::-1]):
        assert MismatchGuard().rejects(excluded(*at)[0]).all()
        assert math.isfinite(mismatch_metrics(excluded(*at)[0])["mismatch/rollout_is_mean"].value)


@pytest.mark.parametrize("kind", sorted(PREFERENCES))
def test_a_completion_that_both_policies_exclude_is_no_nan(kind: str) -> None:
    both, other = torch.tensor([-INFINITY, -4.0]), torch.tensor([-3.0, -INFINITY])
    chosen, rejected = (x.clone().requires_grad_() for x in (both, other))
    pairs = PreferencePairs(
        chosen=chosen, rejected=rejected, reference_chosen=both, reference_rejected=other,
        chosen_length=torch.tensor([2, 2]), rejected_length=torch.tensor([3, 1]),
    )  # fmt: skip
    loss, metrics = PREFERENCES[kind]()(pairs), PREFERENCES[kind]().metrics(pairs)
    loss.sum().backward()
    if kind != "sft":  # whose loss is the log-prob itself
        assert bool(loss.isfinite().all())
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in (chosen, rejected))
    assert all(metric.value == 0 for metric in metrics.values())
    x = both.clone().requires_grad_()
    kto = Kto()(x, both, torch.tensor([True, False]))
    assert kto.tolist() == [0.5, 0.5]


def test_a_kl_in_the_reward_of_an_excluded_token_is_zero() -> None:
    x, mask = torch.tensor([-1.0, -INFINITY]), torch.ones(2, dtype=torch.bool)
    for estimator in ("k1", "k2", "k3", "abs"):
        shaped = RewardKl(estimator=estimator)(torch.ones(1), x, x, mask, torch.tensor([0, 2]))  # type: ignore[arg-type]
        assert shaped.reward.tolist() == [0.0, 1.0] and shaped.kl.tolist() == [0.0]
    assert interpolated_proximal(x, x, torch.tensor([0, 0]), 2)[0] == -1.0


@pytest.mark.parametrize("value", [float("nan"), INFINITY])
def test_what_no_policy_gives_is_not_hidden(value: float) -> None:
    """NaN and +inf are errors: a loss without its check shows them, and `policy_loss` names the token."""
    b, _ = excluded(value, -1.0)
    assert not bool(PpoClip()(b).loss.isfinite().all()) or value == INFINITY
    with pytest.raises(ValueError, match=r"PolicyBatch\.log_prob: (nan|inf) at token 1 of sequence 0"):
        policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean())


def test_an_excluded_token_is_refused_by_the_whole_loss() -> None:
    with pytest.raises(ValueError, match=r"PolicyBatch\.log_prob: -inf at token 1 of sequence 0"):
        policy_loss(excluded(*BOTH)[0], surrogate=Dppo(), penalty=[K1(), K3(), EntropyBonus()], aggregate=TokenMean())
