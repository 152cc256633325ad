"""A loss on observations: which tokens it has, the formula written out, and the same update however it is cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core import ADVANTAGES, PpoClip, TokenMean
from proxima.data.packed_batch import pack
from proxima.model.packed_model import TokenOutputs
from proxima.model.policy import Policy
from proxima.training.batch_builder import BatchBuilder
from proxima.training.objectives.echo import Echo, observation_weights
from proxima.training.objectives.policy_objective import PolicyObjective
from tests.model.rows import loaded, plain_log_prob
from tests.tiny import tiny
from tests.training.episodes import forked, group_of, model, path, seen
from tests.training.helpers import recorded

CALL, ANSWER = model([4, 5]), model([6, 7, 8], turn=1)
TOOL, USER = seen([20, 21, 22]), seen([23], role="user")
ROLES = {"tool": 0.5, "user": 2.0}


def columns(completion, roles=ROLES):
    return [column.tolist() for column in observation_weights(completion.paths, roles)]


def test_an_observation_has_the_weight_of_its_role_and_the_model_s_messages_have_none():
    assert columns(path(CALL, TOOL, ANSWER, USER, model([9], turn=2))) == [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 2, 0]]
    assert columns(path(CALL, TOOL, ANSWER), {"user": 1.0}) == [[0.0] * 8]
    assert columns(path(USER, CALL)) == [[0.0] * 3]  # it answers no message of the model


def test_an_observation_counts_once_whatever_repeats_it():
    """A template that writes the last message anew: both paths have the first observation after the same tokens, the
    second one only the other path."""
    old = model([4, 5], sampled=False)
    first = path(CALL, TOOL, ANSWER)
    second = path(old, TOOL, model([6, 7], turn=1, sampled=False), USER, model([9], turn=2))
    assert columns(forked(first, second)) == [[0, 0, 0.5, 0.5, 0.5, 0, 0, 0], [0] * 7 + [2, 0]]
    rewritten = path(model([3], sampled=False), TOOL, ANSWER)  # after other tokens: another prediction
    assert columns(forked(path(CALL), rewritten)) == [[0, 0], [0, 0.5, 0.5, 0.5, 0, 0, 0]]


def batch_of(echo, weight=1.0):
    completions = [path(CALL, TOOL, ANSWER), path(CALL, USER, model([9], turn=1)), path(model([7]))]
    group = group_of(3, [replace(each, temperature=0.7) for each in completions], [1.0, 0.0, 0.5])
    group = replace(group, prompt=replace(group.prompt, weight=weight))
    builder = BatchBuilder(advantage=ADVANTAGES["rloo"](), selection=(), echo=echo)
    return list(builder.step_batch([group], 1).trajectories)


def updated(items, budget=10_000, **settings):
    objective = PolicyObjective(surrogate=PpoClip(), aggregate=TokenMean(), measure_mismatch=False, **settings)
    return recorded(objective, items, budget, model=Policy(loaded("llama")))


@pytest.mark.slow
def test_the_formula():
    """At temperature 1, whatever that of the sampling; the loss of the policy stays as it is."""
    items = batch_of(ROLES)
    _, plain = updated(batch_of({}))
    _, result = updated(items, terms=[Echo()])
    weighted, total, count = 0.0, 0.0, 0
    for item in items:
        with torch.no_grad():
            own = plain_log_prob(tiny("llama"), replace(item, temperature=1.0)).numpy()
        weighted -= float((item.echo * own).sum())
        total -= float(own[item.echo > 0].sum())
        count += int((item.echo > 0).sum())
    assert count == 4
    assert result.metrics["loss"] == pytest.approx(plain.metrics["loss"] + weighted / count, rel=1e-5)
    assert result.metrics["echo/cross_entropy"] == pytest.approx(total / count, rel=1e-5)
    assert result.metrics["echo/fraction"] == pytest.approx(4 / (8 + 4 + 1))


def test_the_example_of_the_docstring():
    batch = pack(batch_of({"tool": 0.1})[:1])
    keep = torch.tensor([0.1, 0.1, 0.0])
    batch = replace(batch, echo=torch.zeros_like(batch.echo).index_copy(0, torch.tensor([2, 3, 4]), keep))
    log_prob = torch.full((8,), -math.log(2)).index_fill(0, torch.tensor([3]), -math.log(4))
    (loss,) = Echo().losses(batch, TokenOutputs(log_prob=log_prob))
    assert float(loss.value) == pytest.approx(0.1 * (math.log(2) + math.log(4)) / 2)
    assert round(float(loss.value), 3) == 0.104


@pytest.mark.slow
def test_the_gradient_is_that_of_the_policy_plus_that_of_the_cross_entropy():
    items = batch_of(ROLES)
    both, _ = updated(items, terms=[Echo()])
    policy, _ = updated(batch_of({}))
    net = loaded("llama").model
    net.zero_grad()
    loss = sum(-(torch.tensor(i.echo) * plain_log_prob(net, replace(i, temperature=1.0))).sum() for i in items)
    (loss / 4).backward()
    for name, parameter in net.named_parameters():
        expected = policy[name] + parameter.grad
        torch.testing.assert_close(both[name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    net.zero_grad()


@pytest.mark.slow
def test_equal_for_any_micro_batch():
    items = batch_of(ROLES)
    (whole, first), (parts, second) = (updated(items, budget, terms=[Echo()]) for budget in (10_000, 12))
    assert second.metrics == pytest.approx(first.metrics, rel=1e-5, abs=1e-7, nan_ok=True)
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, parts[name], rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-8)


def test_a_weight_of_the_question_applies_to_its_advantages_and_observations():
    plain, weighted = batch_of(ROLES), batch_of(ROLES, weight=4.0)
    for one, four in zip(plain, weighted, strict=True):
        np.testing.assert_array_equal(4 * one.echo, four.echo)
        np.testing.assert_array_equal(4 * one.advantage, four.advantage)


def test_a_sampled_token_is_no_observation():
    (item, *_) = batch_of(ROLES)
    with pytest.raises(ValueError, match="is sampled, so it can't be an observation"):
        pack([replace(item, echo=np.ones(8, np.float32))])
