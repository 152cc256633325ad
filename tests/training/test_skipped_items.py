"""Which items an update leaves out, and which a balance loss counts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from proxima.core import MismatchGuard, Reinforce, TokenMean
from proxima.model.policy import Policy
from proxima.training.batch_builder import TrainingBatch
from proxima.training.learner import Learner, without_mismatched
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.objectives.router_balance import RouterBalance
from proxima.training.stack import TrainStack
from tests.model.rows import loaded
from tests.training.helpers import trajectories

OBJECTIVE = PolicyObjective(surrogate=Reinforce(), aggregate=TokenMean())


def learner_of(**settings):
    policy = Policy(loaded("llama"))
    return Learner(**{"policy": policy, "stack": TrainStack(policy), "objective": OBJECTIVE} | settings)


def batch_of(items):
    """One update of all items."""
    updates = [[item.key for item in items]]
    return SimpleNamespace(critic_only=False, trajectories=items, completions=items, updates=updates)


def test_advantages_that_add_up_to_zero_are_not_skipped():
    items = trajectories(advantages=([1.0, -1.0, 0.0, 0.0, 0.0], 0.0, *[1.0] * 11))
    assert [OBJECTIVE.skippable(item) for item in items[:3]] == [False, True, False]


def test_an_update_has_the_version_that_it_is_given():
    items = [item for item in trajectories(advantages=(1.0,)) if len(item.tokens)]
    items = [replace(item, policy_version=np.full(len(item.tokens), 3)) for item in items]
    learner = learner_of(objective=replace(OBJECTIVE, proximal="loglinear"))
    with pytest.raises(ValueError, match="policy_version 3 is later than current_version 2"):
        learner.update(batch_of(items), 2, lambda done, total: None)


@pytest.mark.parametrize("on_zero_gradient", ["skip", "step"])
def test_the_first_forward_pass_is_observed_under_the_starting_weights(on_zero_gradient):
    items = trajectories(advantages=(0.0, 1.0))
    stack, seen = TrainStack(Policy(loaded("llama")), on_zero_gradient=on_zero_gradient), []
    result = stack.update(OBJECTIVE, [items[:1], items[1:2], items[3:4]], before_first=seen.append)
    looked = [[item.key for item, _ in first] for first in seen]
    assert looked == ([[], [items[1].key]] if on_zero_gradient == "skip" else [[]])
    assert ("mismatch/k3_kl" in result.metrics) == (on_zero_gradient == "skip")


def test_a_forward_pass_without_a_gradient_is_the_only_one_observed():
    first, second = trajectories(advantages=(1.0,))[:2]
    first = replace(first, loss_mask=np.zeros(len(first.tokens), np.bool_))
    stack, seen = TrainStack(Policy(loaded("llama"))), []
    stack.update(OBJECTIVE, [[first], [second]], before_first=seen.append)
    assert [[item.key for item, _ in looked] for looked in seen] == [[first.key]]


@pytest.mark.parametrize(
    ("advantages", "guard", "compares"), [((0.0,), "auto", 1), ((0.0, 1.0), "auto", 0), ((0.0,), "warn", 0)]
)
def test_a_step_that_trains_nothing_is_compared(advantages, guard, compares, monkeypatch):
    learner = learner_of(guard=MismatchGuard(on_mismatch=guard, max_fresh=100.0))
    asked, log_prob = [], learner.stack.log_prob
    monkeypatch.setattr(learner.stack, "log_prob", lambda some: asked.append(some) or log_prob(some))
    result = learner.update(batch_of(trajectories(advantages=advantages)), 0, lambda done, total: None)
    assert len(asked) == compares and (not compares or "mismatch/k3_kl" in result.metrics)


def test_a_balance_loss_counts_no_empty_completion():
    """Four experts of which the same one is always chosen, at two positions of one sequence; the other has none."""
    balance = RouterBalance(coefficient=0.5)
    items = [item for item in trajectories() if not len(item.tokens)] + trajectories()[:1]
    assert len(items) == 2 and balance.denominators(items)[0] == 1
    count = torch.tensor([[[0.0] * 4], [[2.0, 0, 0, 0]]])
    outputs = {"expert_count": count, "expert_probability": count / 2}
    (loss,) = balance.losses(None, SimpleNamespace(need=outputs.get))
    assert loss.denominator == 1 and loss.value == 0.5 * 4
    assert loss.metrics["routing/balance_loss"].value == 4


def test_the_rejected_share_is_of_the_sequences_that_the_update_would_see():
    """Two of four have advantage 0; of the others, the one with a catastrophic token is rejected: a half."""
    rows = [item for item in trajectories(advantages=(1.0, 0.0, -1.0, 0.0, 0.0), spread=0.0) if len(item.tokens)][:4]
    columns = [np.asarray(item.behavior_log_prob, np.float32).copy() for item in rows]
    columns[2][0] -= 30.0
    fake = SimpleNamespace(log_prob=lambda items: columns)
    keys = tuple(item.key for item in rows)
    batch = TrainingBatch(groups=(), completions=tuple(rows), reasons={}, updates=(keys[:2], keys[2:3], keys[3:]))
    left = without_mismatched(batch, fake, OBJECTIVE, MismatchGuard(on_mismatch="reject"), [])
    assert left.metrics["mismatch/rejected_seq_fraction"] == 0.5
    assert left.reasons == {keys[2]: "mismatch"} and left.updates == (keys[:2], keys[3:])
    assert [item.key for item in left.trajectories] == [keys[0], keys[1], keys[3]]
