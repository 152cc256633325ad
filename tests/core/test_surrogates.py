"""Surrogates: worked examples, limits, and invalid fields."""

import itertools
import math
from typing import Any

import pytest
import torch

from proxima.check.batches import make_batch
from proxima.core import Cppo, Dppo, Drpo, GeoMean, PpoClip, Reinforce, Spo, TokenSum, policy_loss
from proxima.core.divergence import divergence
from proxima.data import PolicyBatch

PI, MU = [0.88, 0.80, 0.70, 0.65, 0.50], [0.70, 0.62, 0.55, 0.60, 0.505]


def batch_of(pi: list[float], mu: list[float], advantage: float, **more: Any) -> PolicyBatch:
    x = {
        "log_prob": torch.tensor(pi, dtype=torch.float64).log(),
        "behavior_log_prob": torch.tensor(mu, dtype=torch.float64).log(),
    }
    mask = more.pop("loss_mask", torch.ones(len(pi), dtype=torch.bool))
    edges = more.pop("cu_seqlens", torch.tensor([0, len(pi)]))
    return PolicyBatch(
        loss_mask=mask, cu_seqlens=edges, advantage=torch.full((len(pi),), advantage, dtype=torch.float64), **x, **more
    )


@pytest.mark.parametrize(("advantage", "keep"), [(1.0, [1, 0, 0, 0, 1]), (-1.0, [1, 1, 1, 1, 0])])
def test_cppo_worked_example(advantage: float, keep: list[int]) -> None:
    b = batch_of(PI, MU, advantage)
    weighted, allowed = Cppo(delta=0.2).threshold(b)
    assert weighted.tolist() == pytest.approx([0.18, 0.171, 0.135, 0.0425, 0.004])
    assert allowed.tolist() == pytest.approx([0.2, 0.06, -0.073, -0.172, -0.1805])
    assert Cppo(delta=0.2)(b).keep.int().tolist() == keep
    assert Dppo(delta=0.2)(b).keep.all()
    loss = policy_loss(b, surrogate=Cppo(delta=0.2), aggregate=TokenSum())
    kept = [-advantage * p / m for p, m, k in zip(PI, MU, keep, strict=True) if k]
    assert float(loss.numerator) == pytest.approx(sum(kept))
    assert loss.metrics["prefix_spend"].value == pytest.approx(0.8)
    assert loss.metrics["masked_fraction"].value == pytest.approx(1 - sum(keep) / 5)


def test_cppo_starts_anew_in_each_sequence() -> None:
    b = batch_of(PI + PI, MU + MU, 1.0, cu_seqlens=torch.tensor([0, 5, 5, 10]))
    assert Cppo(delta=0.2)(b).keep.int().tolist() == [1, 0, 0, 0, 1] * 2


def test_cppo_counts_tokens_outside_the_loss_but_no_tool_tokens() -> None:
    outside = batch_of(PI, MU, 1.0, loss_mask=torch.tensor([False, True, True, True, True]))
    assert Cppo(delta=0.2)(outside).keep.int().tolist() == [0, 0, 0, 0, 1]
    sampled = torch.tensor([True, False, True, True, True, True])
    pi, mu = [PI[0], 0.9, *PI[1:]], [MU[0], 0.1, *MU[1:]]
    weighted, allowed = Cppo(delta=0.2).threshold(batch_of(pi, mu, 1.0, loss_mask=sampled, sampled=sampled))
    assert weighted[sampled].tolist() == pytest.approx([0.18, 0.171, 0.135, 0.0425, 0.004]) and float(weighted[1]) == 0
    assert allowed[sampled].tolist() == pytest.approx([0.2, 0.06, -0.073, -0.172, -0.1805])


def test_cppo_weight_of_a_single_token() -> None:
    b = batch_of([0.58], [0.4], 1.0)  # D = .18
    assert [bool(Cppo(delta=0.15, w_min=0.8, single_token=kind)(b).keep) for kind in ("one", "w_min")] == [
        False,
        True,
    ]  # .18 and .144


def test_cppo_static_budget_does_not_follow_the_quantile() -> None:
    _, allowed = Cppo(delta=0.2, budget="static").threshold(batch_of(PI, MU, 1.0))
    assert allowed.tolist() == pytest.approx(
        [0.2, 0.2 + 0.02 - 0.18, 0.2 + 0.02 * 1.95 - 0.351, 0.2 + 0.02 * 2.85 - 0.486, 0.2 + 0.02 * 3.7 - 0.5285]
    )


@pytest.mark.parametrize("seed", range(5))
def test_limits(seed: int) -> None:
    b = make_batch([6, 1, 0, 9, 3], seed=seed, spread=1.0)
    plain = PpoClip(epsilon_low=1.0, epsilon_high=math.inf)(b).loss
    for spec in (
        Cppo(delta=math.inf, delta_b=math.inf),
        Dppo(delta=math.inf),
        Drpo(epsilon=math.inf),
        Spo(epsilon=math.inf),
    ):
        assert torch.equal(spec(b).loss, plain) and torch.equal(spec(b).keep, b.loss_mask)
    for kind in ("binary_tv", "binary_kl"):
        limit = Cppo(delta=0.1, w_min=1.0, delta_b=math.inf, divergence=kind)(b)
        assert torch.equal(limit.keep, Dppo(delta=0.1, divergence=kind)(b).keep)
        assert 0 < int(limit.keep.sum()) < int(b.loss_mask.sum())


def test_drpo_gradient_is_the_printed_one() -> None:
    b = make_batch([8], proximal="behavior", out_of_loss=0, not_sampled=0)
    policy_loss(b, surrogate=Drpo(epsilon=0.3), aggregate=TokenSum()).numerator.backward()
    pi, mu = b.log_prob.detach().exp(), b.behavior_log_prob.exp()
    ratio = pi / mu
    bracket = 1 - (b.advantage * (ratio - 1)).sign() * (pi - mu).abs() / 0.3
    torch.testing.assert_close(b.log_prob.grad, -b.advantage * ratio * bracket)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    assert PpoClip(dual_clip=3.0)(batch_of([0.9], [0.1], -1.0)).loss.tolist() == pytest.approx([3.0])
    assert PpoClip()(batch_of([0.9], [0.1], -1.0)).loss.tolist() == pytest.approx([9.0])
    assert PpoClip(dual_clip=3.0)(batch_of([0.9], [0.1], 1.0)).loss.tolist() == pytest.approx([-1.2])
    assert not bool(PpoClip(dual_clip=3.0)(batch_of([0.9], [0.1], -1.0)).keep)


def test_capped_dppo_has_the_gradient_of_the_ratio_form_below_its_cap() -> None:
    for cap, slope in ((20.0, -2.0), (1.5, -1.5)):
        b = batch_of([0.2], [0.1], 1.0)
        b.log_prob.requires_grad_()
        Dppo(delta=0.5, ratio_cap=cap)(b).loss.sum().backward()
        assert b.log_prob.grad.tolist() == pytest.approx([slope])


def test_binary_kl_of_a_certain_token_is_finite() -> None:
    b = batch_of([1.0, 0.5], [0.5, 1.0], 1.0)
    keep = Dppo(divergence="binary_kl", delta=0.05)(b).keep
    assert keep.tolist() == [False, True]


def test_reinforce() -> None:
    assert Reinforce()(batch_of([0.5], [0.4], 2.0)).loss.tolist() == pytest.approx([2 * math.log(2)])


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Cppo(delta=0), "delta=0 must be > 0"),
        (lambda: Cppo(w_min=0), r"w_min=0 must be in \(0, 1\]"),
        (lambda: Cppo(divergence="tv"), "divergence='tv' must be one of binary_kl, binary_tv, topk_kl, topk_tv"),
        (lambda: Dppo(delta=float("nan")), "delta=nan must be > 0"),
        (lambda: PpoClip(dual_clip=1.0), "dual_clip=1.0 must be > 1, or none"),
        (lambda: PpoClip(epsilon_low=1.5), r"epsilon_low=1.5 must be in \[0, 1\]"),
        (lambda: Drpo(epsilon=-1), "epsilon=-1 must be > 0"),
    ],
)
def test_an_invalid_field_is_named(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()


def test_top_k_divergences_lie_between_binary_and_exact_and_reach_it_with_the_whole_vocabulary() -> None:
    draw = torch.Generator().manual_seed(0)
    p, q = (torch.rand(8, 6, generator=draw, dtype=torch.float64).log_softmax(1) for _ in range(2))
    p, order = p.sort(1, descending=True)
    q = q.gather(1, order)
    exact = {"tv": 0.5 * (p.exp() - q.exp()).abs().sum(1), "kl": (p.exp() * (p - q)).sum(1)}
    for token in range(6):
        for kind, want in exact.items():
            divergences = []
            for k in (0, 1, 3, 6):
                b = PolicyBatch(
                    log_prob=q[:, token],
                    behavior_log_prob=p[:, token],
                    behavior_top_k_log_prob=p[:, :k],
                    top_k_log_prob=q[:, :k],
                    token=torch.full((8,), token),
                    top_k=torch.arange(k).expand(8, k),
                    loss_mask=torch.ones(8, dtype=torch.bool),
                    cu_seqlens=torch.tensor([0, 8]),
                )
                divergences.append(divergence(b, f"topk_{kind}"))
            torch.testing.assert_close(divergences[0], divergence(b, f"binary_{kind}"), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(divergences[-1], want, rtol=1e-9, atol=1e-12)
            assert all(bool((less <= more + 1e-12).all()) for less, more in itertools.pairwise(divergences))


def test_a_token_tied_with_the_kth_has_a_bucket_of_its_own() -> None:
    """μ .4 .4 .2, π .2 .7 .1; the engine broke the tie for token 3, and token 5 was sampled."""
    ids = {"token": torch.tensor([5, 3]), "top_k": torch.tensor([[3], [3]])}
    top = {"behavior_top_k_log_prob": torch.tensor([[0.4], [0.4]]), "top_k_log_prob": torch.tensor([[0.2], [0.2]])}
    b = batch_of([0.7, 0.2], [0.4, 0.4], 1.0, **ids, **{name: x.double().log() for name, x in top.items()})
    assert divergence(b, "topk_tv").tolist() == pytest.approx([0.5 * (0.2 + 0.3 + 0.1), 0.2])
    assert divergence(b, "topk_kl").tolist() == pytest.approx(
        [0.4 * math.log(2) + 0.4 * math.log(4 / 7) + 0.2 * math.log(2), 0.4 * math.log(2) + 0.6 * math.log(0.75)]
    )


def test_top_k_needs_are_named() -> None:
    b = batch_of(PI, MU, 1.0)
    with pytest.raises(
        ValueError, match="Cppo needs `behavior_top_k_log_prob`, which the batch lacks: the engine does, with top-k"
    ):
        policy_loss(b, surrogate=Cppo(divergence="topk_tv"), aggregate=TokenSum())
    with pytest.raises(ValueError, match="centre='proximal' must be behavior for topk_tv"):
        Cppo(divergence="topk_tv", centre="proximal")


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_geo_mean_keeps_what_has_not_moved_beyond_its_bound_in_the_direction_of_the_advantage(advantage: float) -> None:
    b = batch_of(PI, MU, advantage)
    moved = [advantage * math.log(p / m) for p, m in zip(PI, MU, strict=True)]
    low, high = 0.005, 0.2
    keep = [x <= (high if advantage > 0 else low) for x in moved]
    assert len(set(keep)) == 2  # some of each
    assert GeoMean(low, high, "log_ratio")(b).keep.tolist() == keep
