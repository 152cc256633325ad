"""`tv_band` is two-sided, and the squared log-ratio reaches the tokens that it masks."""

from dataclasses import replace

import pytest
import torch

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.core import SURROGATES, Importance, Rejection, TokenMean, policy_loss
from proxima.core.penalty import K3, EntropyBonus, LogRatioSq
from proxima.core.surrogate.cppo import TvBand
from proxima.runtime.launch.learning import make_objective
from tests.core.batches import of_probabilities

MU = 0.5


def batch(*tokens, proximal=None):
    """Each token is a probability π, with μ = 0.5, and an advantage."""
    pi, advantage = zip(*tokens, strict=True)
    b = of_probabilities(pi, [MU] * len(pi), advantage)
    centre = torch.full_like(b.log_prob, proximal or MU).log()
    return replace(b, log_prob=b.log_prob.requires_grad_(), proximal_log_prob=centre)


def gradient(b, spec, **more):
    loss = policy_loss(b, surrogate=spec, aggregate=TokenMean(), **more)
    return torch.autograd.grad(loss.value, b.log_prob)[0] * len(b)


FAR = [(0.9, 1.0), (0.9, -1.0), (0.1, 1.0), (0.1, -1.0), (0.7, 1.0), (0.3, -1.0), (0.9, 0.0)]


def test_a_token_on_the_edge_is_kept():
    b = batch((0.75, 1.0), (0.25, -1.0))
    edge = float((b.log_prob.detach().exp() - b.behavior_log_prob.exp()).abs().max())
    assert TvBand(edge)(b).keep.all() and not TvBand(edge * (1 - 1e-12))(b).keep.all()


def test_weights_and_rejections_that_count_leave_the_penalty_alone():
    b, penalty = batch(*FAR, proximal=0.8), LogRatioSq(0.5, towards="behavior")
    for correction in (Importance(upper=1.1), Rejection(upper=1.01, lower=0.99)):
        with_it, without = (gradient(b, TvBand(), correction=correction, penalty=p) for p in (penalty, None))
        torch.testing.assert_close(with_it - without, (b.log_prob - b.behavior_log_prob).detach())


def test_the_preset_is_the_default_of_the_peer():
    algorithm = resolve("quickstart", ["algorithm=tv_band"], root=None).config.algorithm
    assert (algorithm.surrogate, algorithm.penalties, algorithm.proximal) == (TvBand(0.3), [], "behavior")
    assert "tv_band" in SURROGATES
    with pytest.raises(ConfigError, match="epsilon"):
        resolve("quickstart", ["algorithm=tv_band", "algorithm.surrogate.epsilon=0"], root=None)


PENALTY = "algorithm.penalty=[{kind: log_ratio_sq, towards: %s}]"


def test_the_reference_is_needed_only_where_a_penalty_is_towards_it():
    def needs(*overrides):
        algorithm = resolve("quickstart", overrides, root=None).config.algorithm
        return algorithm.needs_reference, algorithm.reads_behavior

    assert needs("algorithm=reinforce", PENALTY % "behavior") == (False, True)
    assert needs("algorithm=reinforce", PENALTY % "reference")[0]
    assert not needs("algorithm=grpo", "algorithm.penalty=[{kind: k3, coefficient: 0}]")[0]
    assert needs("algorithm=grpo", "algorithm.reference_kl=k3")[0]


def test_a_run_trains_with_every_penalty_of_its_recipe():
    words = ["algorithm=tv_band", PENALTY % "behavior", "algorithm.reference_kl=k3", "algorithm.entropy_bonus=0.1"]
    objective = make_objective(resolve("quickstart", words, root=None).config)
    assert objective.penalties == [K3(), LogRatioSq(towards="behavior"), EntropyBonus(0.1)]
    assert not objective.skips_zero_advantage  # a penalty teaches where the advantage is 0
