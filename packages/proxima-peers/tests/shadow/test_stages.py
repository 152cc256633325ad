"""What each stage says: of stated conventions, of what the dump lacks, of a gradient that is not that of the loss."""

import json

import numpy as np
import pytest
import torch

from proxima_peers.shadow.choices import covered
from proxima_peers.shadow.dump import read_dump
from proxima_peers.shadow.loss_choices import our_loss
from proxima_peers.shadow.stages import first_disagreement, stages


def arrays():
    draw = np.random.default_rng(3)
    old = -0.4 - 2 * draw.random((6, 5))
    mask = np.arange(5) < np.array([5, 2, 4, 3, 5, 1])[:, None]
    return {
        "mask": mask,
        "log_prob": np.minimum(old + 0.5 * draw.standard_normal(old.shape), -0.01),
        "old_log_prob": old,
        "rollout_log_prob": np.minimum(old + 0.3 * draw.standard_normal(old.shape), -0.01),
        "reference_log_prob": np.minimum(old + 0.3 * draw.standard_normal(old.shape), -0.01),
        "entropy": draw.random(old.shape),
        "advantage": draw.standard_normal(6),
        "micro_batch": np.array([0, 0, 0, 0, 1, 1]),
    }


def dumped(folder, values, **settings):
    np.savez(folder / "step.npz", **values, settings=json.dumps(settings))
    return read_dump(str(folder / "step.npz"))


def verdicts(dump):
    return {stage.name: stage for stage in stages(dump)}


STATED = {
    "a_correction_without_weights": {"correction": {"kind": "importance", "upper": 1.1}},
    "a_correction_of_answers": {
        "surrogate": {"kind": "gspo", "form": "sequence", "epsilon_low": 0.2, "epsilon_high": 0.2},
        "correction": {"kind": "importance", "level": "geometric", "bound": "clip", "upper": 1.1},
    },
    "a_penalty_that_the_table_lacks": {"penalty": {"kind": "log_ratio_sq", "coefficient": 0.1, "towards": "behavior"}},
    "a_limit_that_the_table_lacks": {"penalty": {"kind": "k3", "coefficient": 2.0, "limit": 0.001}},
    "the_gradient_of_k2": {"penalty": {"kind": "k3", "coefficient": 0.5, "straight_through": True}},
    "an_unbiased_penalty": {"penalty": {"kind": "k1", "coefficient": 0.5, "unbiased": True}},
    "an_entropy_bonus": {"entropy_coefficient": 0.1},
    "a_surrogate_of_another_family": {"surrogate": {"kind": "sapo"}},
    "a_surrogate_with_the_engine's_probabilities": {"surrogate": {"kind": "drpo", "epsilon": 0.5}},
    "a_horizon": {"aggregate": {"kind": "sequence_mean_token_sum_norm", "horizon": 9}},
    "a_sum": {"aggregate": {"kind": "token_sum"}},
    "the_engine_as_centre": {"centre": "rollout"},
    "no_centre": {"centre": "current", "surrogate": {"kind": "reinforce"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", STATED.values(), ids=STATED)
def test_what_is_stated_is_the_same(tmp_path, settings):
    """And a sixth more of it is not; nor is half of its gradient."""
    plain = dumped(tmp_path, arrays(), **settings)
    loss, slope = our_loss(plain, plain["advantage"])
    values = arrays() | {"loss": loss.numpy(), "grad_log_prob": slope.numpy()}
    made = verdicts(dumped(tmp_path, values, **settings))
    assert (made["loss"].verdict, made["gradient"].verdict) == ("same", "same")
    assert first_disagreement(list(made.values())) is None
    made = verdicts(dumped(tmp_path, values | {"loss": 7 * loss.numpy() / 6}, **settings))
    assert (made["loss"].verdict, made["gradient"].verdict) == ("unexplained", "same")
    uneven = slope.numpy().copy()
    uneven[int(slope.abs().sum(1).argmax())] /= 2
    made = verdicts(dumped(tmp_path, values | {"grad_log_prob": uneven}, **settings))
    assert made["gradient"].verdict == "unexplained"


@pytest.mark.slow
def test_the_gradient_tells_apart_what_the_loss_does_not(tmp_path):
    """verl's `low_var_kl+`: the value of k3, the gradient of k2."""
    settings = {"penalty": {"kind": "k3", "coefficient": 0.5, "straight_through": True}}
    plain = dumped(tmp_path, arrays(), **settings)
    loss, slope = our_loss(plain, plain["advantage"])
    told = {"penalty": {"kind": "k3", "coefficient": 0.5}}
    made = verdicts(dumped(tmp_path, arrays() | {"loss": loss.numpy()}, **told))
    assert made["loss"].verdict == "same"
    made = verdicts(dumped(tmp_path, arrays() | {"loss": loss.numpy(), "grad_log_prob": slope.numpy()}, **told))
    assert made["loss"].verdict == made["gradient"].verdict == "explained"
    assert ("KL", "k3 with the gradient of k2") in made["gradient"].found.matches[0].departures
    assert made["loss"].reason == "the gradient decided among them"


@pytest.mark.slow
def test_a_loss_that_is_reported_and_another_that_is_minimised(tmp_path):
    plain = dumped(tmp_path, arrays())
    loss, _ = our_loss(plain, plain["advantage"])
    other = dumped(tmp_path, arrays(), aggregate={"kind": "sequence_mean_token_mean"})
    _, slope = our_loss(other, other["advantage"])
    made = verdicts(dumped(tmp_path, arrays() | {"loss": loss.numpy(), "grad_log_prob": slope.numpy()}))
    assert made["gradient"].verdict == "explained"
    assert made["gradient"].found.matches[0].departures == (("mean", "of the answers' means"),)
    assert made["gradient"].reason == "not the conventions of the loss: what is reported is not what is minimised"
    # its number is the stated one, its gradient is not: the disagreement is named
    assert first_disagreement(list(made.values())).name in ("loss", "gradient")


@pytest.mark.slow
def test_a_surrogate_that_needs_more_than_the_dump_has(tmp_path):
    dump = dumped(tmp_path, arrays() | {"loss": 0.5}, surrogate={"kind": "cppo", "divergence": "topk_tv"})
    made = verdicts(dump)
    assert made["loss"].verdict == "not recomputed"
    assert "top_k" in made["loss"].reason


@pytest.mark.slow
def test_a_penalty_without_the_reference(tmp_path):
    values = {name: value for name, value in arrays().items() if name != "reference_log_prob"}
    made = verdicts(dumped(tmp_path, values | {"loss": 0.5}, penalty={"kind": "k3"}))
    assert made["loss"].verdict == "unexplained"
    assert "reference_log_prob" in made["loss"].reason


@pytest.mark.parametrize(
    ("lacks", "settings", "reason"),
    [
        ("advantage", {}, "the dump has no advantage, and no reward and group"),
        ("loss", {}, "the dump has no loss"),
        ("reward", {}, "the dump has no reward and group"),
        ("reward", {"advantage": {"kind": "gae"}}, "the dump has no reward"),
    ],
)
def test_what_the_dump_lacks_is_said(tmp_path, lacks, settings, reason):
    values = {name: value for name, value in arrays().items() if name != lacks}
    made = verdicts(dumped(tmp_path, values, **settings))
    stage = made["advantages"] if lacks == "reward" else made["loss"]
    assert (stage.verdict, stage.reason) == ("not recomputed", reason)


def test_a_critic_without_its_values_is_not_judged(tmp_path):
    values = arrays() | {"reward": np.arange(6.0), "advantage": np.random.default_rng(0).standard_normal((6, 5))}
    made = verdicts(dumped(tmp_path, values, advantage={"kind": "gae"}))
    assert made["advantages"].verdict == "not recomputed"
    assert "value" in made["advantages"].reason
    with_group = values | {"group": np.array([0, 0, 0, 1, 1, 1])}
    made = verdicts(dumped(tmp_path, with_group))  # of whole answers, as it is stated
    assert made["advantages"].verdict == "unexplained"
    assert made["advantages"].where.startswith("answer 0, position 1")


@pytest.mark.slow
def test_the_advantages_of_the_rewards_stand_in_for_those_of_the_dump(tmp_path):
    values = {name: value for name, value in arrays().items() if name != "advantage"}
    values |= {"reward": np.array([1.0, 0, 0, 2, 1, 0]), "group": np.array([0, 0, 0, 1, 1, 1])}
    dump = dumped(tmp_path, values)
    advantage = dump.settings.advantage(dump.outcomes())[:, None].expand(dump.shape)
    loss, _ = our_loss(dump, advantage)
    assert verdicts(dumped(tmp_path, values | {"loss": loss.numpy()}))["loss"].verdict == "same"


@pytest.mark.slow
def test_float32_is_allowed_its_rounding_and_float64_is_not(tmp_path):
    plain = dumped(tmp_path, arrays())
    loss = float(our_loss(plain, plain["advantage"])[0])
    size = float(torch.tensor(arrays()["advantage"]).abs().max())
    near = loss + 3e-7 * size
    single = {name: value.astype("f4") if value.dtype.kind == "f" else value for name, value in arrays().items()}
    own = dumped(tmp_path, single)
    rounded = float(our_loss(own, own["advantage"])[0]) + 3e-7 * size
    assert verdicts(dumped(tmp_path, single | {"loss": np.float32(rounded)}))["loss"].verdict == "same"
    assert verdicts(dumped(tmp_path, arrays() | {"loss": near}))["loss"].verdict == "unexplained"


def test_the_chance_that_a_wrong_number_fits():
    """As often do numbers around the trainer's fit; candidates that overlap count once, and far ones not at all."""
    values = torch.tensor([0.0, 1.0, 1.05, 1.5, 10.0, torch.nan], dtype=torch.float64)
    near = torch.full((6,), 0.1, dtype=torch.float64)
    for theirs in (torch.tensor(1.0, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)):
        share = covered(values * theirs, near, theirs)
        assert share == pytest.approx(0.25 + 0.1)
        random = theirs * (0.5 + torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        fitting = [bool(((number - theirs * values).abs() <= 0.1).any()) for number in random]
        assert sum(fitting) / 2000 == pytest.approx(share, abs=0.03)
    assert covered(torch.zeros(0), torch.zeros(0), torch.tensor(1.0)) == 0.0
    assert covered(values, near, torch.tensor(0.0)) == 0.0
