"""Converted specs are those that golden records prove: `proxima_peers.verify` reads the same options and is held to the
numbers."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from proxima.config.resolution import resolve
from proxima.core import policy_loss
from proxima.core.correction.importance import Importance
from proxima.core.correction.presets import CORRECTION_PRESETS
from proxima.core.correction.rejection import Rejection
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.verify import areal, trl, unirl, verl
from proxima_peers.verify.record import Record

from .conftest import names

GOLDEN = Path(__file__).parents[1] / "golden"
ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
GRPO = {"algorithm.adv_estimator": "grpo"}


def records(name, source=""):
    output = [Record.of(raw) for raw in json.loads((GOLDEN / name).read_text())]
    return [record for record in output if source in record.source]


def ids(record):
    return record.name


def under(prefix, options):
    return {prefix + name: value for name, value in options.items()}


@pytest.mark.parametrize("record", records("trl_grpo_loss.json", "GRPOTrainer._compute_loss"), ids=ids)
def test_trl_surrogates(specs, record):
    p = record.params
    options = {"epsilon": p["epsilon_low"], **p.get("args", {})}
    options |= {name: p[name] for name in ("loss_type", "epsilon_high", "importance_sampling_level")}
    ours, theirs = specs("trl", options).surrogate, trl.trl_surrogate(p)
    assert type(ours) is type(theirs)
    for name, value in vars(theirs).items():
        assert getattr(ours, name) == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    "mode", ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"]
)
def test_verl_surrogates(specs, mode):
    own = {
        "clip_cov_ratio": 3e-4,
        "clip_cov_lb": 0.5,
        "clip_cov_ub": 4.0,
        "kl_cov_ratio": 1e-3,
        "ppo_kl_coef": 0.7,
        "dro_beta": 0.3,
    }
    p = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 5.0, "tau_pos": 1.2, "tau_neg": 1.4}
    options = GRPO | under(ACTOR, p) | under(ACTOR + "policy_loss.", own | {"loss_mode": mode})
    options |= {CORRECTION + "bypass_mode": True}  # else divergences are measured from the recomputed policy
    params = {**p, "clip_ratio": 0.2, "policy_loss": own, "loss_mode": mode}
    raw = {"name": mode, "source": "verl", "dtype": "float64", "inputs": {}, "params": params, "expected": {}}
    record = Record.of(raw)
    assert specs("verl", options).surrogate == verl.verl_surrogate(record)


@pytest.mark.parametrize("mode", ["sapo", "geo_mean"])
def test_verl_ignores_the_aggregation_of_two_losses(specs, converted, mode):
    options = GRPO | under(ACTOR, {"policy_loss.loss_mode": mode, "loss_agg_mode": "token-mean"})
    assert type(specs("verl", options).aggregate).__name__ == "SequenceMeanTokenMean"
    assert ACTOR + "loss_agg_mode" in names(converted("verl", options).ignored)


GEOMETRIC = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3_MEAN = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
BYPASS = {"bypass_mode": True}
BYPASS_PG = BYPASS | {"loss_type": "reinforce"}
PRESETS = {
    "bypass_pg_geo_rs": BYPASS_PG | GEOMETRIC,
    "bypass_pg_is": BYPASS_PG | {"rollout_is": "sequence"},
    "bypass_pg_token_icepop": BYPASS_PG | ICEPOP,
    "bypass_ppo_clip": BYPASS,
    "bypass_ppo_clip_geo_rs": BYPASS | GEOMETRIC,
    "bypass_ppo_clip_k3_rs": BYPASS | K3_MEAN,
    "decoupled_geo_rs": GEOMETRIC,
    "decoupled_geo_rs_token_tis": GEOMETRIC | {"rollout_is": "token"},
    "decoupled_k3_rs_seq_tis": K3_MEAN | {"rollout_is": "sequence"},
    "decoupled_seq_is": {"rollout_is": "sequence"},
    "decoupled_seq_is_rs": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_token_icepop": ICEPOP,
    "decoupled_token_is": {"rollout_is": "token", "rollout_is_threshold": 2.0},
}


def plain(correction):
    """The fields, whatever the class: `icepop` is a setting of `importance`."""
    return {key: value for key, value in vars(correction).items() if key != "needs"}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_verl_correction_presets(specs, name):
    spec = specs("verl", GRPO | under(CORRECTION, PRESETS[name]))
    ours, theirs = [plain(entry) for entry in spec.correction], [plain(entry) for entry in CORRECTION_PRESETS[name]]
    for entry, expected in zip(ours, theirs, strict=True):
        if "reduce" in expected:  # rejections of tokens do not look at it
            entry["reduce"] = expected["reduce"]
    assert ours == theirs
    assert spec.proximal == ("behavior" if name.startswith("bypass") else "recompute")
    assert (type(spec.surrogate).__name__ == "Reinforce") is name.startswith("bypass_pg")


@pytest.mark.parametrize(
    "record", [r for r in records("verl_rollout_correction.json") if r.params.get("rollout_rs")], ids=ids
)
def test_verl_rejections_are_those_it_computes(specs, record):
    """P25: bounds of ratios act on the reciprocal; the converted ones reject the same rows."""
    p = {key: value for key, value in record.params.items() if key.startswith("rollout_") and value is not None}
    spec = specs("verl", GRPO | under(CORRECTION, p))
    proximal, behavior = record.tensor("logp"), record.tensor("behavior_logp")
    padded = record.batch(log_prob=proximal, behavior_log_prob=behavior, proximal_log_prob=proximal)
    mask = padded.b.loss_mask
    for correction in spec.correction:
        if isinstance(correction, Rejection):
            mask = mask & correction(padded.b).keep
    expected = torch.tensor(record.expected["modified_response_mask"], dtype=torch.float64)
    assert torch.equal(padded.rows(mask), expected)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip"])
@pytest.mark.parametrize("applied", [True, False])
def test_verl_first_generation(specs, level, mode, applied):
    options = {"": applied, "_threshold": 3.0, "_level": level, "_mode": mode}
    options |= {"_threshold_lower": 0.4, "_veto_threshold": 1e-4}
    spec = specs("verl", GRPO | under("algorithm.rollout_is", options))
    assert spec.correction == (Importance(level, mode, 3.0, 0.4, veto=1e-4, apply=applied),)


@pytest.mark.parametrize(
    ("written", "veto"), [({}, 1e-4), ({"_veto_threshold": None}, None), ({"_veto_threshold": 0.01}, 0.01)]
)
def test_verl_first_generation_has_a_veto_unless_it_is_null(specs, written, veto):
    options = {"": True, "_threshold": 2.0} | written
    spec = specs("verl", GRPO | under("algorithm.rollout_is", options))
    assert spec.correction == (Importance("token", "truncate", 2.0, veto=veto),)


@pytest.mark.parametrize("record", records("unirl_losses.json"), ids=ids)
def test_unirl_surrogates(specs, record):
    known = (
        "cppo_delta",
        "cppo_w_min",
        "cppo_delta_b",
        "dppo_delta",
        "drpo_epsilon",
        "penalty_mu_weighted",
        "clip_range",
        "clip_range_high",
    )
    kind = next(kind for kind in ("CPPO", "DPPO", "DRPO", "GSPO", "GRPO") if kind in record.source)
    options = {f"algorithm.{name}": record.params[name] for name in known if record.params.get(name) is not None}
    spec = specs("unirl", options | {"algorithm._target_": f"unirl.algorithms.{kind.lower()}.{kind}"}).surrogate
    expected = unirl.unirl_surrogate(record.params)
    if expected is None:
        low = record.params["clip_range"]
        high = record.params.get("clip_range_high") or low
        assert (spec.epsilon_low, spec.epsilon_high) == (low, high)
        assert type(spec).__name__ == ("Gspo" if kind == "GSPO" else "PpoClip")
    else:
        assert spec == expected


@pytest.mark.parametrize(
    "record", [r for r in records("areal.json", "ppo_actor_loss_fn") if r.params.get("rejection_sampling")], ids=ids
)
def test_areal_corrections_give_the_same_weights(specs, converted, record):
    """Under A3 its k1 is the other way round, and its k3 has no equivalent: nothing is rejected, and that is said."""
    p = record.params["rejection_sampling"]
    options = NORM | under("actor.rejection_sampling.", p)
    spec = specs("areal", options).correction
    readings = dict(areal.corrections_of(p))
    expected = readings["A3" if p["metric"] == "kl_k1" else None]
    if p["metric"] == "kl_k3":
        expected = [entry for entry in expected if not isinstance(entry, Rejection)]
        assert "actor.rejection_sampling.metric" in names(converted("areal", options).unsupported)
    b = batch(0.05 if p["metric"] == "kl_k1" else 1.5)
    assert torch.allclose(product(spec, b), product(expected, b), rtol=1e-12)


NORM = {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group", "actor.kl_ctl": 0.0}
NORM |= {"actor.use_decoupled_loss": True}


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_areal_k1_bounds_log_pi_over_mu_as_they_are_written(specs, level, reduce):
    """keep iff lower <= rho <= upper, rho = log pi_prox - log mu, reduced over a sequence: asymmetric, so that a wrong
    sign rejects others."""
    b = batch(0.1)
    rho, real = b.proximal_log_prob - b.behavior_log_prob, b.loss_mask
    tested = rho
    if level == "sequence":
        cut = itertools.pairwise(b.cu_seqlens.tolist())
        tested = torch.cat([getattr(rho[i:j][real[i:j]], reduce)().expand(j - i) for i, j in cut])
    lower, upper = tested[real].quantile(torch.tensor([0.3, 0.95], dtype=torch.float64)).tolist()
    lower, upper = lower - 1e-9, upper + 1e-9  # away from rounding
    limits = {"level": level, "agg": reduce, "metric": "kl_k1", "action": "mask", "lower": lower, "upper": upper}
    spec = specs("areal", NORM | under("actor.rejection_sampling.", limits)).correction
    kept = real & (tested >= lower) & (tested <= upper)
    assert 0 < kept.sum() < real.sum() and not torch.equal(kept, real & (-tested >= lower) & (-tested <= upper))
    assert torch.allclose(product(spec, b), torch.where(kept, rho.exp(), 0.0), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [1.0, 1.1, 1.2, 1.5, 4.0])
def test_trl_two_sided_clip(specs, level, delta):
    """-min(min(r, delta) A, clip(r, .8, 1.2) A), which TRL computes at both levels, also for delta < 1.2: value and
    gradient."""
    options = {"delta": delta, "epsilon": 0.2, "loss_type": "grpo", "importance_sampling_level": level}
    surrogate = specs("trl", options).surrogate
    ratio = torch.linspace(0.3, 6.0, 115, dtype=torch.float64)[:, None].log()  # rows of one token: a ratio each
    for sign in (1.0, -1.0):
        leaves = [ratio.clone().requires_grad_() for _ in range(2)]
        like = {"behavior_log_prob": ratio * 0, "proximal_log_prob": ratio * 0, "advantage": ratio * 0 + sign}
        b = PolicyBatch.from_padded(ratio == ratio, log_prob=leaves[0], **like)
        r = leaves[1].exp()
        theirs = -torch.minimum(r.clamp(max=delta) * sign, r.clamp(0.8, 1.2) * sign)
        ours = surrogate(b).loss[:, None]
        assert torch.allclose(ours, theirs, rtol=1e-12)
        gradients = [
            torch.autograd.grad(loss.sum(), leaf)[0] for loss, leaf in zip((ours, theirs), leaves, strict=True)
        ]
        off_corner = ((ratio.exp()[:, None] - torch.tensor([0.8, 1.2, delta])).abs() > 1e-6).all(-1)
        assert torch.allclose(gradients[0][off_corner[:, 0]], gradients[1][off_corner[:, 0]], rtol=1e-12)


def test_trl_rloo_has_its_gradient_at_the_first_update(specs):
    """-mean over rows of min(r A, clip(r) A), r = exp(sum of log-ratios), where the policy is the one before it."""
    spec = specs("trl", {"normalize_advantages": False, "epsilon": 0.2, "num_generations": 2})
    generator = torch.Generator().manual_seed(5)
    old = -torch.rand(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9)[None] < torch.tensor([9, 1, 4, 7, 2, 5])[:, None]
    advantage = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    ours, theirs = old.clone().requires_grad_(), old.clone().requires_grad_()
    rows = {"proximal_log_prob": old, "behavior_log_prob": old - 0.1, "advantage": advantage.expand(6, 9)}
    b = PolicyBatch.from_padded(mask, log_prob=ours, **rows)
    policy_loss(b, surrogate=spec.surrogate, aggregate=spec.aggregate).value.backward()
    r = torch.where(mask, theirs - old, 0.0).sum(1, keepdim=True).exp()
    (-torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage).mean()).backward()
    assert spec.correction == () and torch.allclose(ours.grad, theirs.grad, rtol=1e-12)


def batch(noise=1.5):
    generator = torch.Generator().manual_seed(3)
    proximal = -torch.rand(8, 20, generator=generator, dtype=torch.float64) * 3
    behavior = (proximal + noise * torch.randn(8, 20, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    mask = torch.rand(8, 20, generator=generator) < 0.9
    mask[:, 0] = True
    return PolicyBatch.from_padded(
        mask, log_prob=proximal, proximal_log_prob=proximal, behavior_log_prob=behavior, advantage=proximal
    )


def product(corrections, b):
    weight = b.loss_mask.double()
    for correction in corrections:
        weight = weight * correction(b).weight
    return weight


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("is_token", {"": True, "_threshold": 2.0, "_level": "token", "_mode": "truncate"}),
        ("is_sequence", {"": True, "_threshold": 2.0, "_level": "sequence", "_mode": "clip"}),
        ("is_metrics", {"": False, "_threshold": 2.0, "_level": "token", "_mode": "truncate"}),
    ],
)
def test_recipes_of_verls_first_examples(specs, recipe, options):
    spec = specs("verl", GRPO | under("algorithm.rollout_is", options))
    assert resolve(f"cpu/{recipe}").config.algorithm.correction == spec.correction
    assert spec.proximal == "recompute"
