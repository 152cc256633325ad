"""Scalar heads, preference losses, penalties with memory, gradient weights, proximal interpolation."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from proxima.core import (
    PREFERENCES,
    SURROGATES,
    Cispo,
    Cppo,
    PpoClip,
    PreferencePairs,
    RewardLoss,
    ValueLoss,
    gradient_weight,
    interpolated_proximal,
)
from proxima.core.penalty import K1, K3, AdaptiveCoefficient, EntropyBonus
from proxima.core.preference import Kto, completion_log_prob, wpo_weight
from proxima.data import PolicyBatch


def pairs(chosen: Any, rejected: Any, **more: Any) -> PreferencePairs:
    chosen, rejected = (torch.as_tensor(x, dtype=torch.float64) for x in (chosen, rejected))
    zero, one = torch.zeros_like(chosen), torch.ones(len(chosen), dtype=torch.long)
    fields = {"reference_chosen": zero, "reference_rejected": zero, "chosen_length": one, "rejected_length": one}
    return PreferencePairs(chosen=chosen, rejected=rejected, **{**fields, **more})


@pytest.mark.parametrize("kind", sorted(PREFERENCES))
def test_preference_gradients_are_derivatives_and_raise_the_chosen(kind: str) -> None:
    draw = torch.Generator().manual_seed(7)
    values = [(-3 * torch.rand(5, generator=draw, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    references = {
        f"reference_{side}": -3 * torch.rand(5, generator=draw, dtype=torch.float64) for side in ("chosen", "rejected")
    }
    lengths = {f"{side}_length": torch.randint(1, 9, (5,), generator=draw) for side in ("chosen", "rejected")}
    spec = PREFERENCES[kind]()

    def loss(c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return spec(pairs(c, r, **references, **lengths)).mean()

    assert torch.autograd.gradcheck(loss, tuple(values), eps=1e-6, atol=1e-5)
    assert spec(pairs(*values, **references, **lengths)).shape == (5,)
    gradient = torch.autograd.grad(loss(*values), values, allow_unused=True)
    if kind not in ("apo_down", "sppo_hard", "ipo", "discopop"):  # a target, both lowered, or not monotone
        assert bool((gradient[0] <= 0).all())


def test_preferences_at_equal_policies() -> None:
    even = pairs(
        [-1.0], [-1.0], reference_chosen=torch.tensor([-1.0]).double(), reference_rejected=torch.tensor([-1.0]).double()
    )
    log2 = math.log(2)
    want = {
        "sigmoid": log2,
        "sigmoid_norm": log2,
        "hinge": 1,
        "ipo": 25,
        "nca_pair": 2 * log2,
        "robust": log2,
        "bco_pair": 2 * log2,
    }
    want |= {
        "sppo_hard": 50,
        "aot": log2,
        "aot_unpaired": log2,
        "apo_zero": 1,
        "apo_down": 1,
        "sft": 1,
        "discopop": 0.5 * log2 + 0.5,
    }
    assert {kind: float(PREFERENCES[kind]()(even)) for kind in want} == pytest.approx(want)
    e = 1e-3
    exo = 0.5 * (math.log(0.5) - math.log(1 - e)) + 0.5 * (math.log(0.5) - math.log(e))
    assert float(PREFERENCES["exo_pair"]()(even)) == pytest.approx(exo)


def test_label_smoothing_and_divergences() -> None:
    p = pairs([-1.0], [-3.0])
    sigmoid = PREFERENCES["sigmoid"]
    x = 0.1 * 2
    smoothed = 0.9 * math.log1p(math.exp(-x)) + 0.1 * math.log1p(math.exp(x))
    assert float(sigmoid(label_smoothing=0.1)(p)) == pytest.approx(smoothed)
    score = {
        "forward_kl": -math.e + math.exp(3),
        "js": math.log((1 + math.exp(3)) / (1 + math.e)),
        "alpha": (math.exp(1.5) - math.exp(0.5)) / 0.5,
    }
    for kind, delta in score.items():
        assert float(sigmoid(divergence=kind)(p)) == pytest.approx(math.log1p(math.exp(-0.1 * delta))), kind
    with pytest.raises(ValueError, match=r"label_smoothing=0.5 must be in \[0, 0.5\)"):
        sigmoid(label_smoothing=0.5)


def test_bco_compares_both_rewards_with_the_shift() -> None:
    loss = PREFERENCES["bco_pair"](beta=0.5, shift=0.3)(pairs([-1.0], [-3.0]))
    assert float(loss) == pytest.approx(math.log1p(math.exp(0.5 + 0.3)) + math.log1p(math.exp(-(0.3 + 1.5))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_discopop_is_finite_where_exp_overflows(dtype: torch.dtype) -> None:
    """exp(-x) σ(x/τ) is exp((1/τ - 1) x) for x -> -inf, but inf · 0 as a product: from x = -89 in float32."""
    for x in (-88.0, -100.0, -2000.0):
        chosen = torch.tensor([x * 10], dtype=dtype, requires_grad=True)
        zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=torch.long)
        even = {"reference_chosen": zero, "reference_rejected": zero, "chosen_length": one, "rejected_length": one}
        loss = PREFERENCES["discopop"]()(PreferencePairs(chosen=chosen, rejected=zero, **even))
        assert float(loss.detach()) == pytest.approx(-x)  # -log σ(x), as the second term vanishes
        assert float(torch.autograd.grad(loss.sum(), chosen)[0]) == pytest.approx(-0.1)
    wide = PREFERENCES["discopop"](tau=2.0)(pairs([-10.0], [0.0]))  # x = -1
    assert float(wide) == pytest.approx(math.log1p(math.e) / (1 + math.exp(-0.5)) + math.e / (1 + math.exp(0.5)))


def test_alpha_divergence_has_its_limit() -> None:
    p, spec = pairs([-1.0, -40.0], [-3.0, -2.0]), PREFERENCES["sigmoid"]
    reverse_kl = spec()(p)
    assert spec(divergence="alpha", alpha=1.0)(p).tolist() == reverse_kl.tolist()
    for alpha in (1 - 1e-9, 1 + 1e-9):
        assert spec(divergence="alpha", alpha=alpha)(p).tolist() == pytest.approx(reverse_kl.tolist(), rel=1e-6)
    with pytest.raises(ValueError, match="alpha=0.3 has no effect with divergence=js; set divergence=alpha"):
        spec(divergence="js", alpha=0.3)


def test_preference_metrics_are_implicit_rewards() -> None:
    m = PREFERENCES["hinge"](beta=0.5).metrics(pairs([-1.0, -2.0], [-3.0, -2.0]))
    values = {name: metric.value for name, metric in m.items()}
    assert values == pytest.approx(
        {"rewards/chosen": -0.75, "rewards/rejected": -1.25, "rewards/margins": 0.5, "rewards/accuracies": 0.5}
    )


def test_completion_log_prob_desensitised_to_length() -> None:
    log_prob, edges = torch.tensor([-1.0, -2.0, -4.0, -8.0, math.nan]), torch.tensor([0, 4, 5])
    mask = torch.tensor([False, True, True, True, False])
    assert completion_log_prob(log_prob, mask, edges).tolist() == [-14.0, 0.0]
    shorter = torch.tensor([1, 3])
    assert completion_log_prob(log_prob, mask, edges, shorter, alpha=0.5).tolist() == [-2 - 2 - 4.0, 0.0]
    assert completion_log_prob(log_prob, mask, edges, shorter, alpha=0.0).tolist() == [-2.0, 0.0]
    weight = wpo_weight(log_prob, torch.full((5,), -0.5), mask, edges)
    assert weight.tolist() == pytest.approx([math.exp((-2 - 4 - 8) / 3 + 0.5), 1.0])


def test_kto_by_hand() -> None:
    x, zero = torch.tensor([1.0, 1.0]).double(), torch.zeros(2).double()
    good = torch.tensor([True, False])
    spec = Kto(beta=0.5, good_weight=2.0)
    sigmoid = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    assert spec(x, zero, good, kl=0.4).tolist() == pytest.approx([2 * (1 - sigmoid(0.3)), 1 - sigmoid(-0.3)])
    assert spec(x, zero, good, kl=-3.0).tolist() == pytest.approx(
        [2 * (1 - sigmoid(0.5)), 1 - sigmoid(-0.5)]
    )  # z is clamped at 0
    assert Kto(beta=0.5, anchor="zero")(x, zero, good, kl=9.0).tolist() == pytest.approx(
        [1 - sigmoid(0.5), sigmoid(0.5)]
    )
    with pytest.raises(ValueError, match="bad_weight=0.0 must be >= 0, and > 0 beside good_weight=0"):
        Kto(good_weight=0.0, bad_weight=0.0)


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
