"""Scalar heads, penalties with memory, gradient weights, proximal interpolation."""

import math

import numpy as np
import pytest
import torch

from proxima.core import SURROGATES, Cispo, Cppo, PpoClip, RewardLoss, ValueLoss, gradient_weight, interpolated_proximal
from proxima.core.penalty import K1, K3, EntropyBonus
from proxima.core.reward_kl import AdaptiveCoefficient
from proxima.data import PolicyBatch


def test_value_loss_is_clipped_around_the_rollouts_estimate() -> None:
    value = torch.tensor([1.0, 0.1, math.nan]).requires_grad_()
    mask = torch.tensor([True, True, False])
    loss, metrics = ValueLoss(0.2)(value, torch.zeros(3), torch.tensor([2.0, 0.0, 5.0]), mask)
    assert loss.tolist() == pytest.approx([0.5 * 1.8**2, 0.005, 0])  # clipped to .2: farther from 2, so it counts
    assert metrics["value_clip_fraction"].value == 0.5
    assert torch.autograd.grad(loss.sum(), value)[0].tolist() == pytest.approx([0, 0.1, 0])
    assert ValueLoss(math.inf, "huber", delta=1.0)(
        torch.tensor([3.0]), torch.zeros(1), torch.zeros(1), torch.tensor([True])
    )[0].tolist() == [2.5]


def test_reward_loss_with_margin_and_centring() -> None:
    loss, metrics = RewardLoss(center=0.1)(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]))
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-0.5)) + 0.9, math.log(2) + 0.4], rel=1e-6)
    assert metrics["accuracy"].value == 0.5 and metrics["margin"].value == 0.5  # a tie is not accurate


def test_the_adaptive_coefficient_moves_towards_its_target() -> None:
    controller = AdaptiveCoefficient(target=0.1, horizon=1000)
    assert controller.next(0.2, kl=0.5, samples=100) == pytest.approx(0.2 * 1.02)
    assert controller.next(0.2, kl=0.09, samples=100) == pytest.approx(0.2 * 0.99)
    for kl, factor in ((0.0, 0.8), (0.5, 1.2)):  # however many completions a step has, beta keeps its sign
        assert controller.next(0.2, kl, samples=6000) == pytest.approx(0.2 * factor)


def one_token(**more: torch.Tensor) -> PolicyBatch:
    return PolicyBatch(loss_mask=torch.tensor([True]), cu_seqlens=torch.tensor([0, 1]), **more)


def test_straight_through_and_unbiased_kl() -> None:
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    b = one_token(
        log_prob=log_prob,
        reference_log_prob=torch.tensor([-1.5]).double(),
        proximal_log_prob=torch.tensor([-1.2]).double(),
    )
    for spec in (K1(1.0, straight_through=True), K3(1.0, straight_through=True)):
        value = spec(b)
        assert float(value.detach()) == pytest.approx(float(type(spec)(1.0)(b).detach()))
        assert float(torch.autograd.grad(value.sum(), log_prob)[0]) == pytest.approx(0.5)  # that of k2
    k3 = math.exp(-0.5) - 1 + 0.5
    value = K3(1.0, unbiased=True)(b)
    assert float(value.detach()) == pytest.approx(k3 * math.exp(0.2))
    assert float(torch.autograd.grad(value.sum(), log_prob)[0]) == pytest.approx(
        math.exp(0.2) * (k3 + 1 - math.exp(-0.5))
    )
    assert K3(1.0, limit=0.05)(b).tolist() == pytest.approx([0.05])
    with pytest.raises(ValueError, match="unbiased=True must be false with straight_through"):
        K1(straight_through=True, unbiased=True)


def test_an_entropy_bonus_needs_a_gradient() -> None:
    entropy = torch.tensor([0.7], requires_grad=True)
    assert EntropyBonus(0.1)(
        one_token(log_prob=torch.tensor([-1.0], requires_grad=True), entropy=entropy)
    ).tolist() == pytest.approx([-0.07])
    with pytest.raises(ValueError, match="carries no gradient"):
        EntropyBonus(0.1)(one_token(log_prob=torch.tensor([-1.0], requires_grad=True), entropy=entropy.detach()))


def test_gradient_weights() -> None:
    behavior = torch.full((4,), math.log(0.25), dtype=torch.float64)
    ratio = torch.tensor([0.5, 1.0, 1.1, 1.5], dtype=torch.float64)
    up, down = torch.ones(4).double(), -torch.ones(4).double()
    assert gradient_weight(PpoClip(), behavior + ratio.log(), behavior, up).tolist() == pytest.approx([0.5, 1, 1.1, 0])
    assert gradient_weight(PpoClip(), behavior + ratio.log(), behavior, down).tolist() == pytest.approx(
        [0, 1, 1.1, 1.5]
    )
    assert gradient_weight(Cispo(0.2, 0.2), behavior + ratio.log(), behavior, up).tolist() == pytest.approx(
        [0.8, 1, 1.1, 1.2]
    )
    assert torch.equal(  # verl recommends clip_ratio_low=10: no lower bound
        *(gradient_weight(Cispo(low, 0.2), behavior + ratio.log(), behavior, up) for low in (1.0, 10.0))
    )
    assert gradient_weight(Cppo(delta=0.1), behavior + ratio.log(), behavior, up).tolist() == pytest.approx(
        [0.5, 1, 1.1, 0]
    )
    for kind in set(SURROGATES) - {"kl_cov", "clip_cov"}:  # at r = 1 each is the plain policy gradient
        assert gradient_weight(SURROGATES[kind](), behavior, behavior, 2 * up).tolist() == pytest.approx([1.0] * 4), (
            kind
        )
    with pytest.raises(ValueError, match="an advantage is 0"):
        gradient_weight(PpoClip(), behavior, behavior, 0 * up)


def test_proximal_interpolation() -> None:
    behavior, current = (
        torch.log(torch.tensor([0.2, 0.2, 0.2, 0.2]).double()),
        torch.log(torch.tensor([0.4, 0.4, 0.4, 0.4]).double()),
    )
    versions = torch.tensor([5, 4, 3, -1])
    assert interpolated_proximal(behavior, current, versions, 5).exp().tolist() == pytest.approx(
        [0.2, 0.2, math.sqrt(0.08), 0.2]
    )
    assert interpolated_proximal(behavior, current, versions, 5, "linear").exp().tolist() == pytest.approx(
        [0.2, 0.2, 0.3, 0.2]
    )
    with pytest.raises(ValueError, match="policy_version 5 is later than current_version 4"):
        interpolated_proximal(behavior, current, versions, 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 2e-6)])
@pytest.mark.parametrize("kind", ["loglinear", "linear"])
def test_the_share_of_a_proximal_policy_is_as_precise_as_the_log_probs(kind, dtype, tolerance) -> None:
    now, versions = 12, np.arange(-1, 13)
    draw = np.random.default_rng(9)
    mu, pi = (-draw.gamma(1.5, 2.0, len(versions)) for _ in range(2))
    age = now - versions
    share = np.where((versions >= 0) & (age > 0), (age - 1) / np.maximum(age, 1), 0.0)  # 1/2, 2/3, 3/4 ...
    between = np.log(np.exp(mu) + share * (np.exp(pi) - np.exp(mu)))
    expected = mu + share * (pi - mu) if kind == "loglinear" else between
    inputs = (torch.tensor(x, dtype=dtype) for x in (mu, pi))
    ours = interpolated_proximal(*inputs, torch.tensor(versions), now, kind)
    assert ours.dtype == dtype and np.abs(ours.numpy() / expected - 1).max() <= tolerance
