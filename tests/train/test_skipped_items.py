"""Which items an update leaves out, and which a balance loss counts."""

from types import SimpleNamespace

import torch

from proxima.core import TokenMean
from proxima.core.surrogate import Reinforce
from proxima.train import PolicyObjective
from proxima.train.objectives.router_balance import RouterBalance
from tests.train.helpers import trajectories


def test_advantages_that_add_up_to_zero_are_not_skipped():
    items = trajectories(advantages=([1.0, -1.0, 0.0, 0.0, 0.0], 0.0, *[1.0] * 11))
    objective = PolicyObjective(surrogate=Reinforce(), aggregate=TokenMean())
    assert [objective.skippable(item) for item in items[:3]] == [False, True, False]


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
