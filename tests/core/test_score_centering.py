"""Score centering: worked by hand, exact in a world that can be enumerated, and refused where it would be wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from proxima.core import Importance, PpoClip, Reinforce, Rejection, SequenceMeanTokenSum, TokenSum, policy_loss
from proxima.core.correction.importance import CapFloor, Icepop
from proxima.core.correction.score_centering import TAIL_FLOOR, ScoreCentering
from proxima.core.token_reasons import TokenReasons
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import make_batch, with_new_leaf
from scripts.enumerable_world import EnumerableWorld
from tests.core.batches import packed

TRUNCATED = Importance(towards="current", upper=1.1)
CLIPPED = Icepop(towards="current", lower=0.8, upper=1.25)
WEIGHTS = [None, TRUNCATED, CLIPPED, Importance(towards="current", bound="clamp", lower=0.9, upper=1.1)]


def of_heads(mu: list[float], pi: list[float], advantage: float = 2.0) -> PolicyBatch:
    """One token, the first of the head, with the probabilities of the head."""
    one = torch.ones(1, dtype=torch.float64)
    return packed(
        log_prob=(one * pi[0]).log().requires_grad_(),
        behavior_log_prob=(one * mu[0]).log(),
        advantage=advantage * one,
        top_k=torch.arange(len(mu))[None],
        behavior_top_k_log_prob=torch.tensor([mu], dtype=torch.float64).log(),
        top_k_log_prob=torch.tensor([pi], dtype=torch.float64).log().requires_grad_(),
    )


def gradients(b: PolicyBatch, *corrections: Any) -> tuple[Tensor, Tensor, float]:
    """Of the loss with score centering: by the token's log-prob, by those of the head; and its value."""
    loss = policy_loss(b, surrogate=Reinforce(), aggregate=TokenSum(), correction=[*corrections, ScoreCentering()])
    assert b.top_k_log_prob is not None
    token, head = torch.autograd.grad(loss.value, [b.log_prob, b.top_k_log_prob])
    return token, head, float(loss.value.detach())


def test_equal_policies_and_exact_weights_need_no_centering() -> None:
    assert gradients(of_heads([0.5, 0.3], [0.5, 0.3]))[1].tolist() == [[0.0, 0.0]]
    exact = Importance(towards="current", bound="none")
    head = gradients(of_heads([0.5, 0.3], [0.4, 0.2]), exact)[1]
    assert head[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-15)


def test_weights_that_are_only_measured_are_1() -> None:
    b = of_heads([0.5, 0.3], [0.4, 0.2])
    assert torch.equal(gradients(b, replace(TRUNCATED, apply=False))[1], gradients(b)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_tail_has_a_floor(dtype: torch.dtype) -> None:
    """Heads that hold everything: 0 / 0 would be NaN, and a tail of π alone would divide by 0."""
    whole, part = torch.tensor([[0.75, 0.25]], dtype=dtype), torch.tensor([[0.5, 0.25]], dtype=dtype)
    for mu, pi, ratio in ((whole, whole, 1.0), (part, whole, 0.25 / TAIL_FLOOR), (whole, part, TAIL_FLOOR / 0.25)):
        b = of_heads([0.5, 0.5], [0.5, 0.5])
        b = replace(b, behavior_top_k_log_prob=mu.log(), top_k_log_prob=pi.log())
        coefficient, tail = ScoreCentering().coefficients(b)
        torch.testing.assert_close(coefficient, (mu - ratio * pi).double(), rtol=1e-6, atol=1e-6)
        assert float(tail) >= TAIL_FLOOR


def test_outside_the_loss_nothing_is_read() -> None:
    b = make_batch([5, 0, 7], seed=3, not_sampled=0.4)
    assert b.top_k_log_prob is not None and b.behavior_top_k_log_prob is not None
    head = b.top_k_log_prob.clone()
    head[~b.loss_mask], mu = torch.nan, b.behavior_top_k_log_prob.clone()
    mu[~b.loss_mask] = torch.inf
    b = replace(b, top_k_log_prob=head.requires_grad_(), behavior_top_k_log_prob=mu)
    _, of_head, value = gradients(b, TRUNCATED)
    assert math.isfinite(value) and bool(of_head.isfinite().all()) and not bool(of_head[~b.loss_mask].any())
    assert bool(of_head[b.loss_mask].any())


def drift(world: EnumerableWorld, k: int, corrections: list[Any], distance: float = 1.0) -> float:
    """‖E_μ g‖ if every completion has advantage 1, relative to ‖∇J‖: nothing should be learned."""
    behavior = world.policy(0)
    policy = behavior + world.policy(1, distance)
    how = {"surrogate": Reinforce(), "aggregate": SequenceMeanTokenSum(), "correction": corrections}
    moments = world.moments(
        policy,
        world.log_prob(behavior),
        lambda b: policy_loss(b, **how).value,
        advantage=lambda o: torch.ones_like(o.reward),
        of_policy=lambda current: world.top_k(current, behavior, k),
    )
    return float(moments.mean.norm() / world.gradient(policy).norm())


@pytest.mark.slow
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("seed", [0, 2])
def test_the_mean_gradient_has_no_drift(weight: Any, seed: int) -> None:
    """By enumeration of every completion: with the whole vocabulary in the head, or all but one token, the mean is 0
    to rounding, whatever the weights; with half of it, less than without."""
    world, weights = EnumerableWorld(vocabulary=4, horizon=2, seed=seed), [weight] if weight else []
    alone = drift(world, 4, weights)
    assert alone > 0.02
    for k in (4, 3):
        assert drift(world, k, [*weights, ScoreCentering()]) < 1e-14
    assert 1e-3 < drift(world, 2, [*weights, ScoreCentering()]) < 0.9 * alone


@pytest.mark.parametrize(
    ("surrogate", "others", "message"),
    [
        (PpoClip(), [], "centers the gradient of REINFORCE; set algorithm.surrogate=reinforce"),
        (Reinforce(), [Importance()], "at most one importance, with level=token, towards=current, veto=null"),
        (Reinforce(), [Importance("sequence", towards="current")], "at most one importance"),
        (Reinforce(), [Importance(towards="current", veto=0.1)], "at most one importance"),
        (Reinforce(), [Importance(towards="current", normalise=True)], "at most one importance"),
        (Reinforce(), [CapFloor(towards="current", rejected="drop")], "at most one importance"),
        (Reinforce(), [Rejection(towards="current")], "at most one importance"),
        (Reinforce(), [TRUNCATED, CLIPPED], "at most one importance"),
    ],
)
def test_what_it_can_not_be_combined_with(surrogate: Any, others: list[Any], message: str) -> None:
    b, corrections = make_batch([5, 7], seed=1), [*others, ScoreCentering()]
    assert message in str(ScoreCentering().conflict(surrogate, corrections))
    with pytest.raises(ValueError, match=f"score_centering .*{message}"):
        policy_loss(b, surrogate=surrogate, aggregate=TokenSum(), correction=corrections)


def test_other_corrections_and_surrogates_have_no_conflict() -> None:
    spec = ScoreCentering()
    assert spec.conflict(Reinforce(), [TRUNCATED, spec]) is None
    assert spec.conflict(Reinforce(), [spec, ScoreCentering()]) is not None  # the mean would be subtracted twice
    assert TRUNCATED.conflict(PpoClip(), [TRUNCATED]) is None
    assert TRUNCATED.loss_term(with_new_leaf(make_batch([3])), PpoClip(), [TRUNCATED]) is None


def test_a_stored_token_without_its_top_k_is_explained() -> None:
    b = replace(of_heads([0.5, 0.3], [0.4, 0.2]), top_k_log_prob=None, behavior_top_k_log_prob=None)
    reasons = TokenReasons(batch=b, surrogate=Reinforce(), corrections=[ScoreCentering()], recorded=b.loss_mask)
    assert reasons.reason(0) == "kept: this surrogate has no bound" and reasons.weight.tolist() == pytest.approx([1.0])
