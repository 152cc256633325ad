"""Online DPO: of each prompt's completions the best and the worst are a pair of `PreferenceObjective`."""

import numpy as np
import pytest
import torch

from proxima.core.preference.divergence_pair import Sigmoid
from proxima.data.trajectory import PreferencePair, Trajectory
from proxima.model.policy import Policy
from proxima.training.objectives.preference_objective import PreferenceObjective, best_against_worst
from proxima.training.stack import TrainStack
from tests.model.rows import loaded


def trajectory(group, sample, advantage, length=3):
    return Trajectory(
        uid=group, sample=sample, group=group, prompt_tokens=[5, group + 6], tokens=range(9, 9 + length),
        advantage=np.asarray(advantage, np.float32), reference_log_prob=np.full(length, -2.0, np.float32),
    )  # fmt: skip


ITEMS = [trajectory(0, 1, -0.5), trajectory(0, 3, 0.5, 5), trajectory(1, 0, 0.75), trajectory(1, 2, -0.25, 4)]


@pytest.mark.parametrize("items", [ITEMS[:3], [ITEMS[0], trajectory(0, 2, -0.5)]])
def test_what_is_no_pair_is_refused(items):
    with pytest.raises(ValueError, match=r"group [01] has [12] completions with advantages \[.*select with best_and_w"):
        best_against_worst(items)


def test_a_batch_of_completions_is_trained_as_its_pairs():
    """The larger advantage is chosen."""

    def stack():
        return TrainStack(Policy(loaded("llama")))

    objective = PreferenceObjective(terms=[Sigmoid(beta=0.5)])
    ours, plain = stack(), stack()
    updates = [[item.key for item in part] for part in (ITEMS[:2], ITEMS[2:])]
    result = ours.update(objective, objective.items(ITEMS, updates))
    expected = [PreferencePair(row=g, chosen=c, rejected=r) for g, c, r in ((0, ITEMS[1], ITEMS[0]), (1, *ITEMS[2:]))]
    assert result.metrics == plain.update(objective, [[pair] for pair in expected]).metrics and result.updates == 2
    for a, b in zip(ours.parameters, plain.parameters, strict=True):
        assert torch.equal(a, b)
    assert [len(result.token_statistics[item.key].keep) for item in ITEMS] == [3, 5, 3, 4]
    for item, fresh in zip(ITEMS[:2], stack().log_prob(ITEMS[:2]), strict=True):
        np.testing.assert_allclose(result.token_statistics[item.key].log_prob, fresh, atol=1e-5)
