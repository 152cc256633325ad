"""Segment-wise decoupled PPO: the weight of each token by its age, what a missing one does, and plain decoupled PPO
where no token is old. Against numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core import Importance, PpoClip, Rejection, segment_wise_log_prob
from proxima.core.aggregate import TokenMean
from proxima.core.correction.importance import CapFloor
from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.policy_objective import PolicyObjective

NAN = float("nan")
V = 5
SURROGATE = PpoClip(epsilon_low=0.4, epsilon_high=0.4)


def test_the_lag_rules_by_hand():
    behavior, proximal, cached = torch.tensor([[-1.0] * 7, [-2.0] * 7, [NAN, -3.0, NAN, -4.0, -5.0, NAN, -6.0]])
    version = torch.tensor([5, 5, 4, 4, 3, 1, -1])
    log_prob = segment_wise_log_prob(behavior, proximal, cached, version, V)
    assert log_prob.nan_to_num(9.0).tolist() == [-1, -1, -2, -2, -5, 9, 9]
    with pytest.raises(ValueError, match="policy_version 5 is later than current_version 4"):
        segment_wise_log_prob(behavior, proximal, cached, version, 4)


def objective(missing="decoupled", proximal="given", **fields):
    return PolicyObjective(
        surrogate=SURROGATE,
        aggregate=TokenMean(),
        corrections=[CapFloor(towards="next")],
        proximal=proximal,
        next_missing=missing,
        current_version=V,
        **fields,
    )


def rows(*columns, mask=None, **more):
    """A trajectory of (version, behavior, proximal, cached) tokens."""
    version, behavior, proximal, cached = zip(*columns, strict=True)
    tokens = np.arange(len(version)) % 7
    given = {"proximal_log_prob": proximal, "behavior_log_prob": behavior, "policy_version": version}
    given |= {"next_log_prob": np.array(cached, np.float32), "loss_mask": mask}
    return Trajectory(**{"group": 0, "prompt_tokens": (1, 2), "tokens": tokens, "advantage": 1.0} | given | more)


def loss_of(objective, log_prob, *trajectories):
    batch = pack(trajectories)
    leaf = torch.tensor(log_prob, dtype=torch.float32, requires_grad=True)
    (loss,) = objective.losses(batch, TokenOutputs(log_prob=leaf))
    (denominator,) = objective.denominators(trajectories)
    assert float(denominator) == float(loss.denominator)
    return loss, torch.autograd.grad(loss.value, leaf)[0].tolist()


# versions 5, 4, 3, 2, 3: weights 1, e^.5, e^1 (cached), e^-1 (cached), and of a missing one
MIXED = ((5, -1.0, -1.5, NAN), (4, -1.0, -0.5, NAN), (3, -2.0, -1.5, -1.0), (2, -1.0, -1.5, -2.0), (3, -1.0, -0.8, NAN))
E = math.e


@pytest.mark.parametrize(
    ("missing", "weights"),
    [
        ("decoupled", [1, E**0.5, E, 1 / E, E**0.2]),
        ("drop_token", [1, E**0.5, E, 1 / E, 0]),
        ("drop_sample", [0, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("source", ["given", "first_forward"])
def test_mixed_ages_and_a_missing_one_by_hand(missing, weights, source):
    whole = rows((5, -1.0, -1.0, NAN), (4, -1.0, -1.0, NAN), group=1)  # another completion, which lacks nothing
    mixed, log_prob = rows(*MIXED), [proximal for _, _, proximal, _ in MIXED] + [-1.0, -1.0]  # ratio 1
    if source == "first_forward":
        mixed, whole = (replace(item, proximal_log_prob=None) for item in (mixed, whole))
    loss, gradient = loss_of(objective(missing, source), log_prob, mixed, whole)
    assert gradient == pytest.approx([-w / 7 for w in [*weights, 1, 1]], rel=1e-6)  # N = 7 whatever is dropped
    assert float(loss.value.detach()) == pytest.approx(-(sum(weights) + 2) / 7, rel=1e-6)
    assert loss.keep.tolist() == [w > 0 for w in weights] + [True, True]
    kept = [w for w in [*weights, 1, 1] if w > 0]  # what is dropped as missing is in no statistic of the weights
    assert loss.metrics["correction/rollout_is_mean"].value == pytest.approx(sum(kept) / len(kept), rel=1e-6)


def test_a_missing_one_outside_the_loss_is_not_missing():
    mask = [True, True, True, True, False]
    for missing in ("decoupled", "drop_token", "drop_sample"):
        loss, gradient = loss_of(objective(missing), [c[2] for c in MIXED], rows(*MIXED, mask=mask))
        assert gradient == pytest.approx([-w / 4 for w in (1, E**0.5, E, 1 / E, 0)], rel=1e-6)
        assert float(loss.denominator) == 4


def test_without_old_tokens_it_is_plain_decoupled_ppo():
    columns = [(5, -1.2, -1.2, NAN), (4, -1.0, -0.5, -9.0), (4, -2.0, -3.9, NAN), (5, -0.7, -0.7, -9.0)]
    log_prob = [-1.1, -0.6, -3.5, -0.2]
    ours, gradient = loss_of(objective("drop_sample"), log_prob, rows(*columns))
    decoupled = PolicyObjective(surrogate=SURROGATE, aggregate=TokenMean(), corrections=[CapFloor()])
    theirs, expected = loss_of(decoupled, log_prob, rows(*columns))
    assert float(ours.value.detach()) == float(theirs.value.detach())
    assert gradient == expected


@pytest.mark.parametrize(
    "correction",
    [
        Importance(towards="next", level="sequence", bound="truncate", upper=9.0),
        Importance(towards="next", level="geometric", bound="clip", upper=9.0),
        Rejection(towards="next", level="sequence", statistic="k3", reduce="mean", upper=3.0),
    ],
)
def test_corrections_of_sequences_read_what_is_known(correction):
    """A completion with a token that lacks its log-prob has the weight that its other tokens give it."""
    whole = replace(objective("drop_token"), corrections=[correction])
    log_prob = [c[2] for c in MIXED]
    _, with_hole = loss_of(whole, log_prob, rows(*MIXED, mask=[True] * 4 + [False]))
    loss, with_missing = loss_of(whole, log_prob, rows(*MIXED))
    assert with_missing == pytest.approx([g * 4 / 5 for g in with_hole], rel=1e-6)
    assert not loss.keep[4]


@pytest.mark.parametrize("name", ["behavior_log_prob", "next_log_prob", "policy_version"])
def test_what_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"proximal=next needs {name} in every trajectory"):
        loss_of(objective(), [-1.0] * 5, replace(rows(*MIXED), **{name: None}))
