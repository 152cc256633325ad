"""`tv_band` is two-sided, and the squared log-ratio reaches the tokens that it masks."""

import pytest
import torch

from proxima.config import ConfigError, resolve
from proxima.core import SURROGATES, PpoClip, TokenMean, policy_loss
from proxima.core.correction import Importance, Rejection
from proxima.core.penalty import K1, K2, K3, Abs, EntropyBonus, LogRatioSq
from proxima.core.surrogate import Dppo, TvBand
from proxima.data import FieldError, PolicyBatch
from proxima.runtime.launch.learning import make_objective

MU = 0.5


def batch(*tokens, proximal=None):
    """Each token is a probability π, with μ = 0.5, and an advantage."""
    pi = torch.tensor([p for p, _ in tokens], dtype=torch.float64).log().requires_grad_()
    mu = torch.full_like(pi, MU).log().detach()
    return PolicyBatch(
        log_prob=pi,
        behavior_log_prob=mu,
        proximal_log_prob=mu if proximal is None else torch.full_like(mu, proximal).log(),
        advantage=torch.tensor([a for _, a in tokens], dtype=torch.float64),
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        cu_seqlens=torch.tensor([0, len(tokens)]),
    )


def gradient(b, spec, **more):
    loss = policy_loss(b, surrogate=spec, aggregate=TokenMean(), **more)
    return torch.autograd.grad(loss.value, b.log_prob)[0] * len(b), loss


FAR = [(0.9, 1.0), (0.9, -1.0), (0.1, 1.0), (0.1, -1.0), (0.7, 1.0), (0.3, -1.0), (0.9, 0.0)]


def test_the_band_drops_tokens_of_either_sign_and_dppo_only_those_that_move_away():
    b = batch(*FAR)
    assert TvBand()(b).keep.tolist() == [False, False, False, False, True, True, False]
    assert Dppo(delta=0.3)(b).keep.tolist() == [False, True, True, False, True, True, True]
    slope, loss = gradient(b, TvBand())
    torch.testing.assert_close(slope, torch.tensor([0.0, 0, 0, 0, -1.4, 0.6, 0], dtype=torch.float64))
    shares = {name: loss.metrics[f"band_{name}"].value for name in ("above", "below", "returning")}
    assert shares == {"above": 3 / 7, "below": 2 / 7, "returning": 3 / 7}
    assert loss.metrics["masked_fraction"].value == 5 / 7


def test_a_token_on_the_edge_is_kept():
    b = batch((0.75, 1.0), (0.25, -1.0))
    edge = float((b.log_prob.detach().exp() - b.behavior_log_prob.exp()).abs().max())
    assert TvBand(edge)(b).keep.all() and not TvBand(edge * (1 - 1e-12))(b).keep.all()


def test_the_band_is_around_the_behavior_policy_and_the_ratio_is_to_the_proximal_one():
    slope, _ = gradient(batch((0.7, 1.0), (0.85, 1.0), proximal=0.8), TvBand())
    torch.testing.assert_close(slope, torch.tensor([-0.7 / 0.8, 0.0], dtype=torch.float64))
    returning = TvBand()(batch((0.9, -1.0), (0.7, 1.0), proximal=0.95)).metrics["band_returning"]
    assert returning.value == 1 / 2  # the first falls towards mu, away from the proximal policy


def test_the_penalty_is_on_every_loss_token_with_twice_the_log_ratio():
    b, tau = batch(*FAR), 0.01
    plain, _ = gradient(b, TvBand())
    slope, _ = gradient(b, TvBand(), penalty=LogRatioSq(tau, towards="behavior"))
    d = (b.log_prob - b.behavior_log_prob).detach()
    torch.testing.assert_close(slope - plain, 2 * tau * d)
    assert bool((slope[:4] != 0).all()) and float(slope[6]) > 0  # masked tokens, and one of advantage 0


def test_weights_and_rejections_that_count_leave_the_penalty_alone():
    b, penalty = batch(*FAR, proximal=0.8), LogRatioSq(0.5, towards="behavior")
    for correction in (Importance(upper=1.1), Rejection(upper=1.01, lower=0.99)):
        with_it, without = (gradient(b, TvBand(), correction=correction, penalty=p)[0] for p in (penalty, None))
        torch.testing.assert_close(with_it - without, (b.log_prob - b.behavior_log_prob).detach())


@pytest.mark.parametrize("kind", [K1, K2, K3, Abs, LogRatioSq])
def test_a_penalty_is_towards_the_policy_that_it_names(kind):
    """Each of the three policies in turn is the only one that differs from π."""
    names = ("behavior", "proximal", "reference")
    for far in names:
        columns = {f"{name}_log_prob": torch.tensor([-2.0 if name == far else -1.0]) for name in names}
        b = PolicyBatch(
            log_prob=torch.tensor([-1.0]), loss_mask=torch.tensor([True]), cu_seqlens=torch.tensor([0, 1]), **columns
        )
        values = {name: float(kind(1.0, towards=name)(b)) for name in names}
        assert {name for name, value in values.items() if value != 0} == {far}
        assert kind(1.0, towards=far).needs == {f"{far}_log_prob"}
    assert kind().towards == "reference"
    assert kind is LogRatioSq or kind(unbiased=True).needs == {"proximal_log_prob", "reference_log_prob"}


def test_the_squared_log_ratio_is_k2_of_twice_the_coefficient():
    b = batch(*FAR)
    (squared, half) = (
        gradient(b, PpoClip(), penalty=p)[0] for p in (LogRatioSq(0.1, towards="behavior"), K2(0.2, towards="behavior"))
    )
    torch.testing.assert_close(squared, half)


@pytest.mark.parametrize("value", [0.0, -0.1, float("nan")])
def test_an_impossible_width_is_refused(value):
    with pytest.raises(FieldError, match="epsilon"):
        TvBand(value)


def test_an_unknown_policy_is_refused():
    with pytest.raises(FieldError, match="must be behavior, proximal or reference"):
        LogRatioSq(towards="old")


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
