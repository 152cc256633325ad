"""What replayed routes bring, measured on some sequences of an update."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from proxima.core import PpoClip, TokenMean
from proxima.train import PolicyObjective, TrainStack
from proxima.train.learner import Learner
from proxima.train.replay_comparison import ComparingLearner, ReplayComparison
from tests.model.test_routing import policy
from tests.train.helpers import trajectories

OBJECTIVE = PolicyObjective(surrogate=PpoClip(), aggregate=TokenMean(), replays_routes=True)
NAMES = [f"routing/{way}_{name}" for way in ("replay", "no_replay") for name in ("k3_kl", "log_prob_absdiff_mean")]


def replayed(stack: TrainStack, seed: int = 0):
    """Trajectories sampled exactly by this policy under routes that its routers would not have chosen."""
    draw, out = np.random.default_rng(seed), []
    for item in trajectories():
        routes = [draw.random((n, 2, 4)).argsort(-1)[..., :2].astype(np.int8) for n in map(len, columns_of(item))]
        out.append(replace(item, prompt_routed_experts=routes[0], routed_experts=routes[1]))
    first = {item.group: item.prompt_routed_experts for item in reversed(out)}
    out = [replace(item, prompt_routed_experts=first[item.group]) for item in out]
    pairs = zip(out, stack.log_prob(out), strict=True)
    return [replace(item, behavior_log_prob=log_prob) for item, log_prob in pairs]


def columns_of(item):
    return item.prompt_tokens, item.tokens


def gaps(item, log_prob):
    rho = (log_prob.astype(np.float64) - item.behavior_log_prob)[item.loss_mask]
    return np.expm1(rho) - rho, np.abs(rho)


def test_both_ways_on_the_same_tokens(monkeypatch):
    """The sample is a sixteenth of the tokens fed, or one micro-batch, or one sequence; of items that are run."""
    stack = TrainStack(policy(), tokens_per_micro_batch=10_000)
    items = replayed(stack)
    run = [item for item in items if len(item.tokens) and item.advantage.any()]
    for share, budget, count in ((16, 10_000, 1), (1, 10_000, len(run)), (1, 19, 3)):
        monkeypatch.setattr("proxima.train.replay_comparison.SHARE", share)
        stack.tokens_per_micro_batch = budget
        compared = ReplayComparison.before(stack, OBJECTIVE, items)
        assert [item.key for item in compared.sample] == [item.key for item in run[:count]]
    stack.tokens_per_micro_batch = 10_000
    monkeypatch.setattr("proxima.train.replay_comparison.SHARE", 1)
    compared = ReplayComparison.before(stack, OBJECTIVE, items)
    bare = [replace(item, routed_experts=None, prompt_routed_experts=None) for item in run]
    alone = [gaps(item, log_prob) for item, log_prob in zip(run, stack.log_prob(bare), strict=True)]
    result = stack.update(OBJECTIVE, [items])
    metrics = compared.metrics(result.token_statistics)
    assert list(metrics) == NAMES
    assert [metrics[name] for name in NAMES[:2]] == pytest.approx([0, 0], abs=1e-6)
    expected = [float(np.concatenate(values).mean()) for values in zip(*alone, strict=True)]
    assert [metrics[name] for name in NAMES[2:]] == pytest.approx(expected, rel=1e-4) and expected[0] > 1e-3
    assert result.metrics["mismatch/k3_kl"] == pytest.approx(metrics[NAMES[0]], abs=1e-6)


def test_an_update_is_the_same_with_the_comparison():
    results, weights = [], []
    for kind in (Learner, ComparingLearner):
        stack = TrainStack(policy(), tokens_per_micro_batch=40)
        items = replayed(stack)
        batch: Any = SimpleNamespace(
            critic_only=False, trajectories=items, completions=items, updates=[[item.key for item in items]]
        )
        learner = kind(policy=stack.model, stack=stack, objective=OBJECTIVE)
        results.append(learner.update(batch, 0, lambda done, total: None).metrics)
        weights.append([p.clone() for p in stack.parameters])
    assert set(results[1]) - set(results[0]) == set(NAMES)
    assert all(results[1][name] == pytest.approx(value, abs=0, nan_ok=True) for name, value in results[0].items())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_nothing_to_compare():
    stack = TrainStack(policy())
    items = replayed(stack)
    for some in ([], [replace(items[0], advantage=0.0)], [replace(items[0], behavior_log_prob=None)]):
        compared = ReplayComparison.before(stack, OBJECTIVE, some)
        assert compared.sample == [] and compared.metrics({}) == {}
    masked = replace(items[0], loss_mask=np.zeros(len(items[0].tokens), bool))
    assert ReplayComparison.before(stack, OBJECTIVE, [masked]).metrics({}) == {}
