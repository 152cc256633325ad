"""Unbiased estimators equal the true gradient in a world where every expectation is a sum; biased ones don't."""

import importlib
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from proxima.core import Importance
from proxima.core.advantage import ADVANTAGES
from proxima.core.aggregate import SequenceMeanTokenSum
from proxima.core.loss import policy_loss
from proxima.core.surrogate import SURROGATES
from scripts.enumerable_world import EnumerableWorld, ImprovementBound
from tests.core.batches import packed

WORLD = EnumerableWorld()
EXACT = {"rtol": 0, "atol": 1e-10}
SEQUENCE = partial(Importance, level="sequence", bound="none")


def loss_of(surrogate, correction=None):
    def loss(batch):
        spec = SURROGATES[surrogate]() if isinstance(surrogate, str) else surrogate
        return policy_loss(batch, surrogate=spec, aggregate=SequenceMeanTokenSum(), correction=correction).value

    return loss


def rewards(outcomes):
    return outcomes.reward


def unmasked():
    return SURROGATES["dppo"](delta=float("inf"))


def moved(distance):
    return WORLD.policy(0), WORLD.policy(0) + WORLD.policy(1, distance)


def test_completions_are_a_distribution():
    behavior = WORLD.log_prob(WORLD.policy(0))
    assert len(WORLD.completions) == len(set(WORLD.completions)) == 31
    assert float(WORLD.probability(behavior).sum()) == pytest.approx(1, abs=1e-14)
    switched = WORLD.mixed_log_prob([WORLD.policy(0), WORLD.policy(1)], (2,))
    assert float(WORLD.probability(switched).sum()) == pytest.approx(1, abs=1e-14)
    early = WORLD.depth[WORLD.row] < 2
    assert torch.equal(switched[early], behavior[early])
    assert torch.equal(switched[~early], WORLD.log_prob(WORLD.policy(1))[~early])


@pytest.mark.slow
@pytest.mark.parametrize("baseline", [0.0, 0.7])
@pytest.mark.parametrize("distance", [0.1, 0.3, 1.0])
def test_weight_of_the_whole_completion_is_unbiased(distance, baseline):
    behavior, policy = moved(distance)
    loss = loss_of("reinforce", SEQUENCE(towards="current"))
    moments = WORLD.moments(policy, WORLD.log_prob(behavior), loss, advantage=lambda o: o.reward - baseline)
    torch.testing.assert_close(moments.mean, WORLD.gradient(policy), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_other_weights_are_biased(level):
    behavior, policy = moved(0.3)
    loss = loss_of("reinforce", Importance(level=level, bound="none", towards="current"))
    moments = WORLD.moments(policy, WORLD.log_prob(behavior), loss, advantage=rewards)
    true = WORLD.gradient(policy)
    assert float((moments.mean - true).norm() / true.norm()) > 0.05


@pytest.mark.slow
def test_a_completions_decoupled_weight_is_unbiased_across_versions():
    versions = [WORLD.policy(0), WORLD.policy(0) + WORLD.policy(1, 0.3), WORLD.policy(0) + WORLD.policy(2, 0.5)]
    behavior, policy = WORLD.mixed_log_prob(versions, (1, 3)), versions[-1]
    fields = {"advantage": rewards, "proximal_log_prob": WORLD.log_prob(policy)}
    exact = WORLD.moments(policy, behavior, loss_of(unmasked(), SEQUENCE()), **fields)
    torch.testing.assert_close(exact.mean, WORLD.gradient(policy), **EXACT)
    truncated = WORLD.moments(policy, behavior, loss_of(unmasked(), SEQUENCE(bound="truncate", upper=1.1)), **fields)
    assert float((truncated.mean - exact.mean).norm()) > 1e-3
    assert truncated.std < exact.std


SUPPLIED = {"advantage", "behavior_log_prob", "proximal_log_prob"}


@pytest.mark.parametrize("kind", [kind for kind in sorted(SURROGATES) if SURROGATES[kind]().needs <= SUPPLIED])
def test_every_surrogate_is_exact_on_policy(kind):
    policy = WORLD.policy(0)
    moments = WORLD.moments(policy, WORLD.log_prob(policy), loss_of(kind), advantage=rewards)
    torch.testing.assert_close(moments.mean, WORLD.gradient(policy), **EXACT)


def of_pairs(kind, **fields):
    """The expectation over pairs of completions, on policy; and the true gradient."""
    world = EnumerableWorld(horizon=2)
    policy, spec = world.policy(0), ADVANTAGES[kind](**fields)
    moments = world.moments(policy, world.log_prob(policy), loss_of("reinforce"), advantage=spec, group_size=2)
    return moments.mean, world.gradient(policy)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fields", "length"), [("rloo", {}, 1.0), ("grpo", {"scale": "none"}, 0.5)])
def test_group_baselines(kind, fields, length):
    """RLOO is unbiased; the mean with the completion itself in it shrinks the gradient by (G − 1) / G, here 1/2."""
    mean, true = of_pairs(kind, **fields)
    torch.testing.assert_close(mean, length * true, **EXACT)


def test_std_of_the_group_is_a_biased_scale():
    mean, true = of_pairs("grpo", scale="group")
    assert 0.5 < float((mean * true).sum() / mean.norm() / true.norm()) < 0.9999


def test_spread_is_that_of_a_sample():
    policy = WORLD.policy(0)
    behavior = WORLD.log_prob(policy)
    moments = WORLD.moments(policy, behavior, loss_of("reinforce"), advantage=rewards)
    square = 0.0
    for index, probability in enumerate(WORLD.probability(behavior)):
        leaf = policy.clone().requires_grad_()
        start, end = WORLD.cu_seqlens[index : index + 2]
        score = torch.autograd.grad(WORLD.log_prob(leaf)[start:end].sum(), leaf)[0]
        square += float(probability * (WORLD.reward[index] * score - moments.mean).square().sum())
    assert moments.std == pytest.approx(square**0.5, rel=1e-10)


def test_unmasked_loss_ascends_the_surrogate_objective():
    behavior, policy = moved(0.5)
    moments = WORLD.moments(policy, WORLD.log_prob(behavior), loss_of(unmasked()), advantage=rewards)
    direction = WORLD.policy(9)
    step = 1e-6
    ahead, back = (ImprovementBound.of(WORLD, policy + sign * step * direction, behavior) for sign in (1, -1))
    slope = (ahead.surrogate - back.surrogate) / (2 * step)
    assert float((moments.mean * direction).sum()) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("distance", [0.1, 1.0, 4.0])
def test_improvement_bounds_hold(distance):
    for index in range(60):
        behavior = WORLD.policy(2 * index)
        bound = ImprovementBound.of(WORLD, behavior + WORLD.policy(2 * index + 1, distance), behavior)
        assert abs(bound.residual) <= bound.prefix <= bound.uniform * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "allowance"), [("dppo", 0.0), ("cppo", 0.02)])
def test_policies_inside_the_region_keep_its_bound(kind, allowance):
    """Where the mask keeps every token of every completion, of either sign, the divergences are within its thresholds:
    D_t ≤ δ / w_min, and before token t at most (δ + 2 δ_b t) / w_min in all. With three tokens |π − μ| of the sampled
    one reaches the total variation, so this bounds the residual."""
    delta, least = 0.2, 0.8 if kind == "cppo" else 1.0
    spec = SURROGATES[kind](delta=delta)
    scale = float(WORLD.reward.abs().max())
    drift = [t * delta if kind == "dppo" else min(t * delta, delta + 2 * allowance * t) for t in range(WORLD.horizon)]
    limit = 4 * scale * sum(delta / least * min(1.0, spent / least) for spent in drift)
    inside = 0
    for index in range(60):
        behavior = WORLD.policy(2 * index)
        policy = behavior + WORLD.policy(2 * index + 1, 0.15)
        if all(kept_by(spec, policy, behavior, sign) for sign in (1.0, -1.0)):
            inside += 1
            assert abs(ImprovementBound.of(WORLD, policy, behavior).residual) <= limit
    assert inside >= 5


def kept_by(spec, policy, behavior, advantage):
    log_prob = WORLD.log_prob(policy)
    batch = packed(
        log_prob=log_prob,
        cu_seqlens=WORLD.cu_seqlens,
        behavior_log_prob=WORLD.log_prob(behavior),
        advantage=torch.full_like(log_prob, advantage),
    )
    return bool(spec(batch).keep.all())


@pytest.fixture
def bias_page(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    return importlib.import_module("bias_page")


@pytest.mark.slow
def test_rows_of_the_page_are_up_to_date(bias_page, monkeypatch):
    """One of each table of losses."""
    for name in ("single", "corrected", "decoupled"):
        some = getattr(bias_page, name)()[2:3]
        monkeypatch.setattr(bias_page, name, partial(list, some))
    monkeypatch.setattr(bias_page, "off_policy_figures", cache(bias_page.off_policy_figures.__wrapped__))
    page = bias_page.PAGE.read_text(encoding="utf-8").splitlines()
    for part in (bias_page.on_policy_part, bias_page.off_policy_part, bias_page.in_flight_part, bias_page.bound_part):
        assert set("\n".join(part()).splitlines()) <= set(page), "run make docs"


@pytest.mark.campaign("tests/laws/test_enumerable_world.py::test_rows_of_the_page_are_up_to_date", minutes=3)
def test_page_is_up_to_date(bias_page):
    assert bias_page.PAGE.read_text(encoding="utf-8") == bias_page.page(), "run make docs"
