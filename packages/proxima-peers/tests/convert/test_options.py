"""What single options become, where a peer means something else by them."""

import pytest
import torch

from proxima.config import ConfigError, resolve
from proxima.core import PolicyBatch, TokenMean, policy_loss
from proxima.core.advantage import Gdpo, Grpo, ReinforcePp, ReinforcePpBaseline, Rloo
from proxima.core.correction import CapFloor, Importance, SecondMoment
from proxima.core.penalty import K1, K2, K3
from proxima.core.reward_kl import AdaptiveCoefficient, RewardKl
from proxima.core.surrogate import Cispo, Dppo, Drpo, Gspo, PpoClip, Sapo, Spo

A, R = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
GRPO = {"algorithm.adv_estimator": "grpo"}
NORM = {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group", "actor.kl_ctl": 0.0}


def listed(done):
    return {
        kind: {entry.name for entry in getattr(done, kind)} for kind in ("missing", "unsupported", "unknown", "ignored")
    }


def test_verl_defaults_that_a_file_does_not_say(specs):
    spec = specs("verl", GRPO)
    assert spec.surrogate == PpoClip(0.2, 0.2, 3.0)  # dual clip is on in verl
    assert spec.proximal == "recompute" and spec.correction == ()
    assert spec.advantage == Grpo("group", 1e-6)


@pytest.mark.parametrize(
    ("written", "penalty"), [("kl", K1(0.02)), ("mse", K2(0.02)), ("low_var_kl", K3(0.02, limit=10.0))]
)
def test_verl_kl_loss(specs, written, penalty):
    options = {A + "use_kl_loss": True, A + "kl_loss_coef": 0.02, A + "kl_loss_type": written}
    assert specs("verl", GRPO | options).reference_kl == penalty


def test_verl_kl_that_is_off_is_ignored(converted):
    off = converted("verl", GRPO | {A + "use_kl_loss": False, A + "kl_loss_coef": 0.02})
    assert A + "kl_loss_coef" in listed(off)["ignored"] and "reference_kl" not in off.recipe["algorithm"]
    off = converted("verl", GRPO | {"algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.02})
    assert "algorithm.kl_ctrl.kl_coef" in listed(off)["ignored"] and "reward_kl" not in off.recipe["algorithm"]


def test_verl_kl_in_the_reward(specs, converted):
    on = GRPO | {"algorithm.use_kl_in_reward": True}
    control = {"algorithm.kl_ctrl.kl_coef": 0.01, "algorithm.kl_ctrl.horizon": 500}
    assert specs("verl", on).reward_kl == RewardKl(0.001, "k1")
    assert specs("verl", on | control | {"algorithm.kl_penalty": "low_var_kl+"}).reward_kl == RewardKl(
        0.01, "k3", limit=10
    )
    assert "algorithm.kl_ctrl.horizon" in listed(converted("verl", on | control))["ignored"]
    adaptive = {"algorithm.kl_ctrl.type": "adaptive"}
    assert specs("verl", on | control | adaptive).reward_kl == RewardKl(0.01, "k1", AdaptiveCoefficient(0.1, 500))
    for prompts, unsupported in ((62, []), (70, ["algorithm.kl_ctrl.horizon"])):  # of 8 completions: 496 and 560
        done = converted(
            "verl",
            GRPO | on | control | adaptive | {"data.train_batch_size": prompts, "actor_rollout_ref.rollout.n": 8},
        )
        assert [option.name for option in done.unsupported if "kl_ctrl" in option.name] == unsupported
        assert ("500: a step of 560 completions moves verl's coefficient by up to 22%" in done.text) is bool(
            unsupported
        )
    assert "algorithm.kl_penalty" in listed(converted("verl", on | {"algorithm.kl_penalty": "full"}))["unsupported"]


def test_verl_says_what_its_asynchronous_options_are_here(converted):
    fully = {
        "staleness_threshold": 0.1,
        "trigger_parameter_sync_step": 4,
        "require_batches": 1,
        "partial_rollout": True,
    }
    fully |= {"use_rollout_log_probs": True, "compute_prox_log_prob": False}
    options = GRPO | {f"async_training.{name}": value for name, value in fully.items()}
    done = converted(
        "verl", options | {"rollout.total_rollout_steps": 51200, "actor_rollout_ref.rollout.mode": "async"}
    )
    why = {option.name: option.why for option in done.unsupported}
    ours = {
        "async_training.staleness_threshold": "runtime.max_lag",
        "async_training.trigger_parameter_sync_step": "train.prompts_per_step",
        "async_training.require_batches": "train.prompts_per_step",
        "async_training.partial_rollout": "engine.interrupt",
        "async_training.use_rollout_log_probs": "algorithm.proximal",
        "rollout.total_rollout_steps": "train.steps",
    }
    assert all(field in why[name] for name, field in ours.items())
    assert {"async_training.compute_prox_log_prob", "actor_rollout_ref.rollout.mode"} <= listed(done)["ignored"]


def test_verl_dr_grpo(specs):
    options = {
        A + "loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "data.max_response_length": 3000,
    }
    spec = specs("verl", GRPO | options)
    assert (
        spec.advantage.scale == "none" and spec.aggregate.horizon == 3000
    )  # verl divides by the padded response length
    assert specs("verl", GRPO | options | {A + "loss_scale_factor": 1000}).aggregate.horizon == 1000


def test_verl_bypass(specs, converted):
    assert specs("verl", GRPO | {R + "bypass_mode": True}).proximal == "behavior"
    clip = converted("verl", GRPO | {R + "bypass_mode": True, R + "rollout_is": "token"})
    assert R + "rollout_is" in listed(clip)["ignored"]  # there the ratio is the correction (P13)
    assert "correction" not in clip.recipe["algorithm"]


BYPASSED = [{}, {R + "rollout_is": "sequence"}, {R + "rollout_is": "token", R + "loss_type": "reinforce"}]


@pytest.mark.parametrize("more", BYPASSED)
def test_a_cap_in_verls_bypass_mode_changes_nothing(converted, more):
    """It caps pi_old / pi_rollout, and pi_old is the rollout's own there."""
    options = GRPO | {R + "bypass_mode": True} | more
    done = converted("verl", options | {A + "tis_imp_ratio_cap": 2.0})
    assert done.recipe == converted("verl", options).recipe
    assert "the weights it caps are 1" in next(
        option.why for option in done.ignored if option.name == A + "tis_imp_ratio_cap"
    )


def test_the_weights_of_bypass_mode_are_1_whatever_the_engines_differ_by():
    generator = torch.Generator().manual_seed(3)
    behavior, log_prob = (-3 * torch.rand(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    batch = {"mask": torch.ones(4, 6), "log_prob": log_prob, "advantage": torch.randn(4, 6, generator=generator)}
    batch |= {"behavior_log_prob": behavior}
    cap, clip = Importance("token", "truncate", 1.5), {"surrogate": PpoClip(), "aggregate": TokenMean()}
    bypassed = PolicyBatch.from_padded(**batch, proximal_log_prob=behavior)
    assert policy_loss(bypassed, **clip, correction=(cap,)).value == policy_loss(bypassed, **clip).value
    recomputed = PolicyBatch.from_padded(**batch, proximal_log_prob=log_prob - 0.1)
    assert policy_loss(recomputed, **clip, correction=(cap,)).value != policy_loss(recomputed, **clip).value


def test_verl_asymmetric_rejection_says_what_verl_computes(converted):
    done = converted("verl", GRPO | {R + "rollout_rs": "token_k1", R + "rollout_rs_threshold": "0.5_4.0"})
    (rule,) = done.recipe["algorithm"]["correction"]
    assert (rule["lower"], rule["upper"]) == (0.25, 2.0)  # the reciprocals: P25
    assert "P25" in done.text and "lower 0.5, upper 4" in done.text


def test_verl_old_cap(specs):
    assert specs("verl", GRPO | {A + "tis_imp_ratio_cap": 2.5}).correction == (Importance("token", "truncate", 2.5),)
    assert specs("verl", GRPO | {A + "tis_imp_ratio_cap": -1}).correction == ()


def test_verl_version_0_7(specs):
    options = {
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.01,
        "rollout_token_veto_threshold": 1e-4,
        "rollout_is": "token",
    }
    veto, rule, weight = specs("verl", GRPO | {R + key: value for key, value in options.items()}).correction
    assert veto == Importance(bound="none", veto=1e-4, rejected="drop")
    assert (rule.level, rule.reduce, rule.upper, rule.lower) == ("sequence", "mean", 1.01, 1 / 1.01)
    assert weight == Importance("token", "truncate", 2.0)


def test_verl_mini_batches_that_do_not_divide(converted):
    done = converted("verl", GRPO | {"data.train_batch_size": 100, A + "ppo_mini_batch_size": 30})
    assert done.recipe["train"]["updates_per_step"] == 4  # 30 + 30 + 30 + 10
    done = converted("verl", GRPO | {"data.train_batch_size": 100, A + "ppo_mini_batch_size": 35})
    assert done.recipe["train"]["updates_per_step"] == 2 and "train.updates_per_step" in listed(done)["unsupported"]


def test_verl_epochs_need_the_data(converted):
    done = converted("verl", GRPO | {"trainer.total_epochs": 15})
    assert "train.steps" in listed(done)["missing"] and "here 15" in done.text


@pytest.mark.parametrize(
    ("peer", "options", "named"),
    [
        ("areal", {"actor.path": "x", "critic.path": "y", "actor.gae_lambda": 0.9, "actor.kl_ctl": 0}, {"critic.path"}),
        ("unirl", {"algorithm._target_": "x.PPO", "algorithm.gae_lambda": 0.9}, {"algorithm.gae_lambda"}),
    ],
)
def test_a_critic_stops_nothing_another_advantage_is_to_be_chosen(converted, peer, options, named):
    done = converted(peer, options)
    assert done.recipe["algorithm"]["advantage"]["kind"] == "grpo" and done.problems == ()
    assert "kind: grpo  # TO FILL IN: " in done.text and "gae needs a critic" in done.text
    assert named <= {option.name for option in done.unsupported}


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("verl", {"algorithm.adv_estimator": "grpo", "data.apply_chat_template_kwargs.enable_thinking": False}),
        ("trl", {"num_generations": 8, "chat_template_kwargs.enable_thinking": False}),
        ("unirl", {"algorithm._target_": "x.CPPO", "pipeline.enable_thinking": False}),
        (
            "unirl",
            {
                "algorithm._target_": "x.CPPO",
                "rollout.config.chat_template_kwargs.enable_thinking": False,
                "pipeline.enable_thinking": True,
            },
        ),
    ],
)
def test_arguments_of_the_chat_template(converted, peer, options):
    """Of UniRL's two, the engine's counts, for its prompts are those that are trained on; the other is told."""
    done = converted(peer, options)
    assert dict(resolve(done.recipe).config.data.template_arguments) == {"enable_thinking": False}
    messages = {option.name for option in done.unsupported}
    assert ("pipeline.enable_thinking" in messages) == (len(options) == 3)


def test_prompts_that_stand_in_are_divided_by_the_updates(converted):
    """4 updates of 16 * 4 / 7 prompts: without num_processes both are unknown, and nothing is lost."""
    options = {"num_generations": 7, "per_device_train_batch_size": 16, "steps_per_generation": 4}
    done = converted("trl", options)
    train = done.recipe["train"]
    assert (train["prompts_per_step"], train["updates_per_step"]) == (12, 4)
    assert not any(option.name == "train.updates_per_step" for option in done.unsupported)


def test_a_value_that_no_recipe_may_have_is_left_out_and_told(converted):
    done = converted("trl", {"num_generations": 8, "epsilon": -0.2, "temperature": -1, "learning_rate": 2e-6})
    assert done.problems == () and done.recipe["train"]["optimizer"]["lr"] == 2e-6
    assert "epsilon_low" not in done.recipe["algorithm"]["surrogate"]
    fill = {option.name: option.why for option in done.missing}
    assert "from epsilon: -0.2 must be" in fill["algorithm.surrogate.epsilon_low"]
    assert "from temperature: -1" in fill["sampling.temperature"]
    assert resolve(done.recipe).config.sampling.temperature == 1


def test_trl_defaults_of_1_16(specs, converted):
    spec = specs("trl", {"use_vllm": True})
    assert type(spec.aggregate).__name__ == "TokenMean" and spec.surrogate == PpoClip(0.2, 0.2)
    assert spec.correction == (Importance("sequence", "clip", 3.0, 0.0),)
    assert spec.advantage == Grpo("group", 1e-4) and spec.reference_kl is None
    assert converted("trl", {"use_vllm": True}).recipe["train"]["schedule"] == "linear"


def test_trl_cispo_cap_is_absolute(specs):
    assert specs("trl", {"loss_type": "cispo", "epsilon_high": 5.0}).surrogate == Cispo(1.0, 4.0, "token")
    assert specs("trl", {"loss_type": "cispo"}).surrogate == Cispo(
        1.0, -0.8, "token"
    )  # the default caps every weight at 0.2 (T2)


def test_trl_sequence_level(specs):
    options = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    assert specs("trl", {"loss_type": "grpo", **options}).surrogate == Gspo(3e-4, 4e-4, "sequence")
    assert type(specs("trl", {"loss_type": "luspo", **options}).surrogate).__name__ == "Luspo"


def test_trl_delta(specs, converted):
    assert specs("trl", {"delta": 4.0}).surrogate == PpoClip(0.2, 0.2, 4.0)
    assert "T3" in converted("trl", {"delta": 1.1}).text  # below 1 + epsilon_high the two differ
    assert "delta" in listed(converted("trl", {"delta": 4.0, "loss_type": "cispo"}))["ignored"]


def test_trl_correction_without_vllm(converted):
    done = converted("trl", {"vllm_importance_sampling_mode": "token_truncate"})
    assert "vllm_importance_sampling_mode" in listed(done)["ignored"] and "correction" not in done.recipe["algorithm"]


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({"vllm_importance_sampling_mode": "token_truncate"}, Importance("token", "clamp", 3.0, 0.0)),
        (
            {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_cap": 2.0},
            Importance("sequence", "clamp", 2.0, 0.0),
        ),
        (
            {"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": 0.1},
            Importance("sequence", "clip", float("inf"), 0.1),
        ),
    ],
)
def test_trl_sampler_correction(specs, options, spec):
    assert specs("trl", {"use_vllm": True, **options}).correction == (spec,)


def test_trl_many_rewards(specs):
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    assert specs("trl", options).advantage == Gdpo((1.0, 0.5), "group", 1e-4, "completions")


@pytest.mark.parametrize(("written", "scale"), [(True, "group"), (False, "none"), ("batch", "batch"), ("none", "none")])
def test_trl_scale_rewards(specs, written, scale):
    assert specs("trl", {"scale_rewards": written}).advantage.scale == scale


def test_trl_batches(converted):
    train = converted(
        "trl", {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_generations": 8}
    ).recipe["train"]
    assert (train["prompts_per_step"], train["updates_per_step"], train["epochs_per_step"]) == (4, 1, 1)
    messages = {
        "per_device_train_batch_size": 2,
        "num_processes": 7,
        "num_generations": 7,
        "gradient_accumulation_steps": 4,
    }
    done = converted("trl", messages)
    assert (done.recipe["train"]["prompts_per_step"], listed(done)["missing"] & {"train.prompts_per_step"}) == (
        8,
        set(),
    )
    odd = converted("trl", {"num_generations": 3, "num_processes": 1})
    assert "not a whole number" in next(option.why for option in odd.missing if option.name == "train.prompts_per_step")
    unsaid = converted("trl", {"num_generations": 8})
    assert "num_processes" in next(option.why for option in unsaid.missing if option.name == "train.prompts_per_step")


def test_areal_without_decoupling(specs, converted):
    assert specs("areal", NORM).proximal == "behavior"
    done = converted("areal", {**NORM, "actor.recompute_logprob": True, "actor.behave_imp_weight_cap": 3.0})
    assert done.recipe["algorithm"]["proximal"] == "recompute" and "correction" not in done.recipe["algorithm"]
    assert "actor.behave_imp_weight_cap" in listed(done)["ignored"]


DECOUPLED = {**NORM, "actor.use_decoupled_loss": True}


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ({}, (CapFloor(upper=5.0, lower=0.0),)),
        ({"behave_imp_weight_cap": 4.0}, (CapFloor(upper=4.0, lower=0.0),)),
        ({"behave_imp_weight_mode": "token_truncate"}, (Importance("token", "clamp", 5.0, 0.0),)),
        ({"behave_imp_weight_mode": "sequence_mask"}, (Importance("geometric", "clip", 5.0, 0.0),)),
        ({"behave_imp_weight_mode": "disabled"}, ()),
        ({"behave_imp_weight_cap": None}, (CapFloor(upper=float("inf"), lower=0.0),)),
        ({"behav_imp_weight_cap": None, "behav_imp_weight_floor": 0.2}, (CapFloor(upper=float("inf"), lower=0.2),)),
        ({"m2_threshold": 0.04, "behave_imp_weight_mode": "disabled"}, (SecondMoment(0.04, "drop"),)),
    ],
)
def test_areal_behavior_weights(specs, options, correction):
    assert (
        specs("areal", DECOUPLED | {f"actor.{key}": value for key, value in options.items()}).correction == correction
    )


def test_areal_loglinear(specs):
    assert specs("areal", DECOUPLED | {"actor.prox_logp_method": "loglinear"}).proximal == "loglinear"


ASYNC = {"rollout.max_head_offpolicyness": 2, "train_dataset.batch_size": 8}
SDP = DECOUPLED | ASYNC | {"actor.behav_imp_weight_floor": 0.2}


@pytest.mark.parametrize("section", ["", "rollout.", "actor."])
def test_areal_segment_wise(specs, section):
    spec = specs("areal", SDP | {f"{section}enable_segment_wise_ppo": True})
    assert spec.proximal == "next" and spec.correction == (CapFloor(upper=5.0, lower=0.2, towards="next"),)


def test_areal_segment_wise_under_rejection(specs):
    rejection = {"actor.rejection_sampling": {"level": "sequence", "metric": "kl_k1", "upper": 0.5}}
    spec = specs("areal", SDP | rejection | {"enable_segment_wise_ppo": True})
    assert [entry.towards for entry in spec.correction] == ["next", "next"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"rollout.max_head_offpolicyness": 1}, "ignored"),  # then it is decoupled PPO
        ({"actor.use_decoupled_loss": False}, "unsupported"),
        ({"actor.prox_logp_method": "loglinear"}, "unsupported"),
        ({"actor.behave_imp_weight_mode": "disabled"}, "unsupported"),
        ({"actor.m2_threshold": 0.04}, "unsupported"),
    ],
)
def test_areal_segment_wise_without_what_it_needs(converted, options, kind):
    done = converted("areal", SDP | {"enable_segment_wise_ppo": True} | options)
    assert "enable_segment_wise_ppo" in listed(done)[kind]
    assert done.recipe["algorithm"]["proximal"] != "next"
    assert not any("towards" in entry for entry in done.recipe["algorithm"].get("correction", []))


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ({}, 8),
        ({"rollout.consumer_batch_size": 8}, 8),
        ({"rollout.max_concurrent_rollouts": None}, 8),
        ({"rollout.max_concurrent_rollouts": 20}, 20),
        ({"rollout.max_concurrent_rollouts": 99}, 24),  # more are never admitted
    ],
)
def test_areal_asynchrony(converted, options, at_once):
    harmless = {"queue_size": None, "enable_rollout_tracing": True, "check_trajectory_format": True}
    harmless |= {"schedule_policy": "round_robin"}
    done = converted("areal", NORM | ASYNC | options | {f"rollout.{key}": value for key, value in harmless.items()})
    assert done.recipe["runtime"] == {"max_lag": 2, "max_concurrent_rollouts": at_once, "over_age": "wait"}
    assert done.recipe["engine"] == {"kind": "local_process"} and "over_age" not in listed(done)["missing"]
    assert {f"rollout.{name}" for name in harmless} <= listed(done)[
        "ignored"
    ] and "the oldest first, and trains on" in " ".join(done.text.replace("#", "").split())
    assert not any("max_concurrent" in problem for problem in done.problems)


def test_areal_asynchrony_with_another_batch(converted):
    done = converted("areal", NORM | ASYNC | {"rollout.consumer_batch_size": 16})
    assert "rollout.consumer_batch_size" in listed(done)["unsupported"]
    assert done.recipe["runtime"]["max_concurrent_rollouts"] == 16


@pytest.mark.parametrize(
    "options", [{"rollout.max_head_offpolicyness": 0}, {"async_training": False}, {"async_training": "false"}]
)
def test_areal_synchronous(converted, options):
    done = converted("areal", NORM | ASYNC | {"rollout.max_concurrent_rollouts": 20} | options)
    assert done.recipe["runtime"] == {"max_lag": 0} and "kind" not in done.recipe.get("engine", {})
    assert "rollout.max_concurrent_rollouts" in listed(done)["ignored"]


def test_areal_losses(specs):
    assert specs("areal", {**NORM, "actor.use_sapo_loss": True}).surrogate == Sapo(1.0, 1.05)
    assert (
        specs(
            "areal", {**NORM, "actor.use_cispo_loss": True, "actor.eps_clip": 1.0, "actor.eps_clip_higher": 4.0}
        ).surrogate
        == Cispo()
    )
    assert specs("areal", {**NORM, "actor.eps_clip_higher": 0.3, "actor.c_clip": 3.0}).surrogate == PpoClip(
        0.2, 0.3, 3.0
    )
    assert specs("areal", {**NORM, "actor.importance_sampling_level": "sequence"}).surrogate == Gspo(
        0.2, 0.2, "sequence"
    )


def test_areal_advantages(specs):
    whiten = {"actor.adv_norm.mean_level": "batch", "actor.adv_norm.std_level": "batch"}
    centred = {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": None}
    assert specs("areal", NORM).advantage == Grpo("group", 1e-5)
    assert specs("areal", NORM | whiten).advantage == Gdpo(None, "group", 1e-5, "tokens")
    assert specs("areal", centred | whiten).advantage == ReinforcePpBaseline()
    assert specs("areal", centred | {"actor.reward_norm.mean_leave1out": True}).advantage == Rloo()
    # what is the same for all rewards cancels under whitening: n / (n - 1) of RLOO, the batch's standard deviation of
    # LitePPO
    assert (
        specs("areal", centred | whiten | {"actor.reward_norm.mean_leave1out": True}).advantage == ReinforcePpBaseline()
    )
    assert specs("areal", NORM | whiten | {"actor.reward_norm.std_level": "batch"}).advantage == ReinforcePpBaseline()
    by_advantage = {"actor.adv_norm.mean_level": "group", "actor.adv_norm.std_level": "group"}
    assert specs("areal", by_advantage).advantage == Grpo("group", 1e-5)
    assert specs("areal", whiten | {"actor.discount": 0.99}).advantage == ReinforcePp(0.99)


def test_areal_scaling_counts_where_nothing_divides(converted):
    """(r + b) s, centred and not divided, is s times the advantage; divided by the group's standard deviation s
    cancels."""
    options = {
        "actor.reward_scaling": 10.0,
        "actor.reward_bias": -0.5,
        "actor.kl_ctl": 0.0,
        "train_dataset.path": "openai/gsm8k",
    }
    centred = converted(
        "areal", {**options, "actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": None}
    )
    assert centred.recipe["reward"] == [{"kind": "gsm8k", "weight": 10.0}]
    divided = converted("areal", {**options, **NORM})
    assert divided.recipe["reward"] == [{"kind": "gsm8k"}] and "actor.reward_scaling" in listed(divided)["ignored"]


def test_areal_default_kl_is_reported(converted):
    done = converted("areal", {"actor.reward_norm.mean_level": "group"})
    assert "actor.kl_ctl" in listed(done)["unsupported"] and "AReaL's default" in done.text


@pytest.mark.parametrize(
    ("section", "mean", "std", "why"),
    [
        ("reward_norm", "group", "batch", "around one mean"),
        ("reward_norm", "batch", "group", "no group's mean is subtracted"),
        ("adv_norm", "group", "batch", "for rewards that are normalised already"),
        ("adv_norm", None, "batch", "subtracts the mean too"),
    ],
)
def test_areal_levels_without_an_equivalent_are_reported(converted, section, mean, std, why):
    levels = {f"actor.{section}.mean_level": mean, f"actor.{section}.std_level": std}
    unsupported = converted("areal", NORM | levels).unsupported
    assert any(why in entry.why for entry in unsupported if section in entry.name)


def test_unirl_says_what_its_staleness_is_here(converted):
    done = converted("unirl", {"algorithm._target_": "unirl.algorithms.cppo.CPPO", "buffer_max_staleness": 2})
    why = {option.name: option.why for option in done.unsupported}["buffer_max_staleness"]
    assert "runtime.max_lag" in why and "over_age: drop" in why


def test_unirl_sources(specs):
    cppo = {"algorithm._target_": "unirl.algorithms.cppo.CPPO"}
    assert specs("unirl", cppo).proximal == "behavior" and specs("unirl", cppo).surrogate.delta == 0.2
    replay = specs("unirl", cppo | {"algorithm.old_logp_source": "replay"})
    assert (replay.proximal, replay.surrogate.centre) == ("recompute", "proximal")  # replay overwrites mu as well
    assert specs("unirl", {"algorithm.dppo_delta": 0.1}).surrogate == Dppo("binary_tv", 0.1)


def test_unirl_drpo_is_spo_without_its_weight(specs):
    drpo = {"algorithm._target_": "unirl.algorithms.drpo.DRPO", "algorithm.drpo_epsilon": 0.5}
    assert specs("unirl", drpo).surrogate == Drpo(0.5)
    assert specs("unirl", drpo | {"algorithm.penalty_mu_weighted": False}).surrogate == Spo(0.5)


def test_unirl_sampling_defaults_are_its_own(converted):
    sampling = converted("unirl", {"algorithm._target_": "x.GRPO"}).recipe["sampling"]
    assert sampling == {"temperature": 0.7, "top_k": 1024, "top_p": 0.9, "max_tokens": 512}


@pytest.mark.parametrize(
    ("peer", "options", "where", "why"),
    [
        ("verl", {"algorithm.adv_estimator": "grop"}, "algorithm.advantage.kind", "the file has grop; known are"),
        ("verl", GRPO | {A + "policy_loss.loss_mode": "up"}, "algorithm.surrogate.kind", "the file has up; known are"),
        ("verl", GRPO | {"data.train_batch_size": "${oc.env:BS}"}, "train.prompts_per_step", "the file has ${oc.env"),
        ("verl", GRPO | {"data.train_batch_size": [1]}, "train.prompts_per_step", "the file has [1]; must be a number"),
        ("verl", GRPO | {A + "optim.betas": [0.9]}, A + "optim.betas", "must be two numbers"),
        ("trl", {"loss_type": "gpro"}, "algorithm.surrogate.kind", "the file has gpro; known are grpo, dr_grpo"),
        ("trl", {"num_iterations": 0}, "train.epochs_per_step", "the file has 0; must be >= 1"),
        ("trl", {"epsilon": 0.2, "optim": 3, "max_grad_norm": "much"}, "train.max_grad_norm", "must be a number"),
        ("unirl", {"algorithm.clip_range": "x"}, "algorithm.surrogate.epsilon_low", "must be a number"),
        ("unirl", {"algorithm.x": 1}, "algorithm._target_", "known are CPPO"),
        ("areal", NORM | {"actor.use_decoupled_loss": True, "actor.behave_imp_weight_mode": "mask"},
         "actor.behave_imp_weight_mode", "the file has mask; known are token_mask"),
    ],
)  # fmt: skip
def test_one_value_that_cannot_be_known_stops_nothing(converted, peer, options, where, why):
    done = converted(peer, options | {"made_up": 3})
    assert any(why in option.why for option in done.missing if option.name == where), done.missing
    assert resolve(done.recipe) and listed(done)["unknown"] >= {"made_up"}
    assert "TO FILL IN" in done.text or where in done.text


@pytest.mark.parametrize(
    ("peer", "options", "why"),
    [
        ("verl", {"model.path": "x", "optim.lr": 1e-5}, "sets none of its options"),
        ("trl", {"max_length": 512, "learning_rate": 1e-5}, "sets none of its options"),
        ("trl", {"beta": 0.1, "precompute_ref_log_probs": True}, "sets precompute_ref_log_probs"),
        ("trl", {"num_processes": 8, "mixed_precision": "bf16"}, "sets none of its options"),
        ("areal", {"actor.path": "x", "actor.optimizer.lr": 1e-5, "train_dataset.type": "rl"}, "sets none"),
        ("areal", {"actor.path": "x", "actor.beta": 0.1}, "sets none of its options"),
        ("unirl", {"stack.micro_batch_size": 1}, "sets none of its options"),
        ("unirl", {"algorithm._target_": "unirl.algorithms.flowgrpo.FlowGRPO"}, "not a training of a language model"),
    ],
)
def test_a_file_of_another_training_is_refused(converted, peer, options, why):
    with pytest.raises(ConfigError, match=why) as caught:
        converted(peer, options)
    assert len(str(caught.value).splitlines()) == 1


def test_every_peer_makes_a_recipe_of_its_defaults(converted):
    for peer, options in (
        ("verl", GRPO),
        ("trl", {"beta": 0.0}),
        ("areal", NORM),
        ("unirl", {"algorithm._target_": "x.DPPO"}),
    ):
        done = converted(peer, options | {"made_up": 3})
        assert resolve(done.recipe) and listed(done)["unknown"] == {"made_up"}


OPTIM = "actor_rollout_ref.actor.optim."


@pytest.mark.parametrize(
    ("peer", "peak", "lowest"),
    [("trl", "learning_rate", "lr_scheduler_kwargs.min_lr"), ("verl", OPTIM + "lr", OPTIM + "min_lr")],
)
def test_the_lowest_learning_rate_is_a_share_of_the_peak(peer, peak, lowest, converted):
    group = {"num_generations": 8} if peer == "trl" else {OPTIM + "lr_scheduler_type": "cosine"}
    done = converted(peer, {peak: 2e-6, lowest: 5e-7} | group)
    assert done.recipe["train"]["final_lr_ratio"] == 0.25
    done = converted(peer, {peak: 0, lowest: 5e-7} | group)  # no ratio
    assert "final_lr_ratio" not in done.recipe["train"]
    assert f"{lowest}: the file has 5e-07; it has no ratio to a learning rate of 0" in done.text


@pytest.mark.parametrize(
    ("peer", "lowest", "options"),
    [
        ("verl", OPTIM + "min_lr_ratio", GRPO),
        ("areal", "actor.optimizer.min_lr_ratio", NORM),
        ("trl", "lr_scheduler_kwargs.min_lr_rate", {"lr_scheduler_type": "constant", "beta": 0.0}),
    ],
)
def test_a_constant_schedule_has_no_lowest_learning_rate(peer, lowest, options, converted):
    done = converted(peer, options | {lowest: 0.1})
    assert "final_lr_ratio" not in done.recipe["train"] and resolve(done.recipe)
    assert [option.why for option in done.ignored if option.name == lowest] == ["a constant schedule does not fall"]
