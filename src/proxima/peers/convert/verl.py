"""verl: its trainer's YAML (or a launch script's overrides), from 0.3 to 0.9, with DAPO's options."""

import math

from proxima.config.problems import one_problem
from proxima.peers.convert import common
from proxima.peers.convert.draft import Draft, Fields
from proxima.peers.convert.options import Options
from proxima.peers.convert.verl_correction import correction
from proxima.peers.convert.verl_dapo import dynamic_sampling, overlong_buffer

ACTOR, ROLLOUT, LOSS = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.policy_loss."


def convert(o: Options) -> Draft:
    """A recipe from verl's options."""
    d = Draft()
    common.model(d, o, "actor_rollout_ref.model.path")
    longest = o.whole("data.max_response_length", ROLLOUT + "response_length", default=512)
    prompt = o.whole("data.max_prompt_length", ROLLOUT + "prompt_length", default=512)
    d.put("model.max_length", prompt + longest, f"{o.origin('data.max_prompt_length')} + max_response_length")
    d.flag("model.gradient_checkpointing", o, "actor_rollout_ref.model.enable_gradient_checkpointing")
    common.task(d, o, "data.train_files")
    d.flag("data.shuffle", o, "data.shuffle")
    common.reward(d)
    overlong_buffer(d, o, longest)
    forced = correction(d, o)
    _advantage(d, o)
    _aggregate(d, o, _surrogate(d, o, forced), longest)
    _penalties(d, o)
    dynamic_sampling(d, o)
    names = {"temperature": (ROLLOUT + "temperature",), "top_k": (ROLLOUT + "top_k",), "top_p": (ROLLOUT + "top_p",)}
    common.sampling(d, o, names, {"temperature": 1.0, "top_k": -1, "top_p": 1.0})
    d.put("sampling.max_tokens", longest, o.origin("data.max_response_length", ROLLOUT + "response_length"))
    _batch(d, o)
    _training(d, o)
    d.drops_given(o, "the engine always returns the behavior log-probs", ROLLOUT + "calculate_log_probs")
    return d


SAME_NAMES = ("gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "remax", "rloo")
ESTIMATORS = {name: name for name in SAME_NAMES} | {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _advantage(d: Draft, o: Options) -> None:
    """`algorithm.adv_estimator`."""
    name = "algorithm.adv_estimator"
    written = str(o.get(name, default="gae")).lower().removeprefix("advantageestimator.")
    if written not in ESTIMATORS:
        raise one_problem(name, f"no advantage of this name; known: {', '.join(ESTIMATORS)}", written, o.file)
    kind, origin = ESTIMATORS[written], o.origin(name)
    note = "verl gives a group of one its raw reward (P16); here its advantage is 0"
    d.spec("algorithm.advantage", kind, origin, note if kind in ("grpo", "opo", "gpg") else "")
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    scaled = o.flag(by_std, default=True)
    if kind in ("grpo", "grpo_passk", "gdpo"):
        d.put("algorithm.advantage.scale", "group" if scaled else "none", o.origin(by_std))
        d.put("algorithm.advantage.epsilon", 1e-6, "verl's constant")
    else:
        d.drops_given(o, f"verl reads it for grpo, not for {written}", by_std)
    for option, field, kinds in (("gamma", "gamma", ("gae", "reinforce_pp")), ("lam", "lam", ("gae",))):
        if kind in kinds:
            d.copy(f"algorithm.advantage.{field}", o, f"algorithm.{option}", default=1.0)
        else:
            d.drops_given(o, f"verl reads it for gae, not for {written}", f"algorithm.{option}")


def _surrogate(d: Draft, o: Options, forced: str | None) -> str:
    """`policy_loss.loss_mode` with its options; returns the mode."""
    name, path = LOSS + "loss_mode", "algorithm.surrogate"
    mode = str(o.get(name, ACTOR + "loss_mode", default="vanilla")).replace("-", "_")
    used = _fields_by_mode(o, name)
    mode = "vanilla" if mode == "bypass_mode" else mode
    if mode not in used:
        raise one_problem(name, f"no surrogate of this name; known: {', '.join(used)}", mode, o.file)
    fields = used[mode] if forced is None else {}
    read = {origin for _, origin in fields.values()} | {f"from {name}"}
    why = f"not read by {f'loss_mode {mode}' if forced is None else 'REINFORCE, which has no clip'}"
    for origin in sorted({origin for other in used.values() for _, origin in other.values()} - read):
        if origin.startswith("from "):
            d.drops(origin.removeprefix("from "), why)
    if forced is not None:
        note = "bypass mode with loss_type reinforce: no clip"
        d.spec(path, forced, "from algorithm.rollout_correction", note)
        return mode
    if mode == "dro" and fields["beta"][0] is None:
        raise one_problem(LOSS + "dro_beta", "is missing; verl refuses dro without it", None, o.file)
    kind = {"vanilla": "ppo_clip", "gpg": "reinforce", "dppo_tv": "dppo", "dppo_kl": "dppo"}.get(mode, mode)
    d.spec(path, kind, o.origin(name, ACTOR + "loss_mode"), _clip_note(o, mode), **fields)
    return mode


def _fields_by_mode(o: Options, name: str) -> dict[str, Fields]:
    """The fields of each mode's surrogate, with their origins."""
    low, high = (o.sourced(ACTOR + f"clip_ratio_{side}", ACTOR + "clip_ratio", default=0.2) for side in ("low", "high"))
    cap = o.sourced(ACTOR + "clip_ratio_c", default=3.0)
    clip: Fields = {"epsilon_low": low, "epsilon_high": high}
    dppo: Fields = {"delta": high, "delta_low": low, "ratio_cap": cap}
    return {
        "vanilla": {**clip, "dual_clip": cap},
        "gspo": clip,
        "geo_mean": {**clip, "clip": ("log_ratio", "as verl clips")},
        "cispo": clip,
        "dppo_tv": {"divergence": ("binary_tv", f"from {name}"), **dppo},
        "dppo_kl": {"divergence": ("binary_kl", f"from {name}"), **dppo},
        "sapo": {
            "tau_positive": o.sourced(ACTOR + "tau_pos", default=1.0),
            "tau_negative": o.sourced(ACTOR + "tau_neg", default=1.05),
        },
        "clip_cov": {
            **clip,
            "share": o.sourced(LOSS + "clip_cov_ratio", default=2e-4),
            "low": o.sourced(LOSS + "clip_cov_lb", default=1.0),
            "high": o.sourced(LOSS + "clip_cov_ub", default=5.0),
        },
        "kl_cov": {
            "share": o.sourced(LOSS + "kl_cov_ratio", default=2e-4),
            "coefficient": o.sourced(LOSS + "ppo_kl_coef", default=0.1),
        },
        "gpg": {},
        "dro": {"beta": o.sourced(LOSS + "dro_beta")},
    }


def _clip_note(o: Options, mode: str) -> str:
    notes = []
    if mode == "vanilla" and not o.given(ACTOR + "clip_ratio_c"):
        notes.append("verl's dual clip, clip_ratio_c, is on by default.")
    if mode.startswith("dppo"):
        notes.append("The cap is clip_ratio_c, 3 by default; the 20 of verl's documentation is never reached (P4).")
    if o.given(ACTOR + "clip_ratio") and not o.given(ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"):
        notes.append(
            "verl's own config sets clip_ratio_low and clip_ratio_high to 0.2: unless yours sets them to null, "
            "clip_ratio had no effect."
        )
    return " ".join(notes)


MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
AGGREGATES = {mode: mode.replace("seq-", "sequence-").replace("-", "_") for mode in MODES}


def _aggregate(d: Draft, o: Options, mode: str, longest: int) -> None:
    """`loss_agg_mode`, which two of verl's losses don't read."""
    name, factor, first = ACTOR + "loss_agg_mode", ACTOR + "loss_scale_factor", ACTOR + "use_token_level_loss"
    written = str(o.get(name, default="token-mean" if o.flag(first, default=True) else "seq-mean-token-mean"))
    if o.given(first) and not o.given(name):  # what the first DAPO scripts call it
        name = first
    scale = o.number(factor)
    kind = d.entries["algorithm.surrogate.kind"].value
    if mode in ("sapo", "geo_mean") and kind == mode:
        why = "sapo always does this (P6)" if mode == "sapo" else "geo_mean always means over sequences (P10)"
        d.spec("algorithm.aggregate", "sequence_mean_token_mean", f"verl's {why}")
        d.drops_given(o, f"verl's {mode} does not read it", name)
        return
    if written not in AGGREGATES:
        raise one_problem(name, f"no aggregation of this name; known: {', '.join(AGGREGATES)}", written, o.file)
    if written == "seq-mean-token-sum-norm":
        note = "" if scale is not None else "without loss_scale_factor verl divides by the padded response length"
        origin = o.origin("data.max_response_length" if scale is None else factor)
        common.horizon(d, o.origin(name), longest if scale is None else scale, origin, note)
        return
    d.spec("algorithm.aggregate", AGGREGATES[written], o.origin(name))
    if scale is not None:
        d.drops(factor, "verl reads it for seq-mean-token-sum-norm only")


KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _penalties(d: Draft, o: Options) -> None:
    """KL towards the reference in the loss or in the reward, and entropy."""
    kind, coefficient = ACTOR + "kl_loss_type", ACTOR + "kl_loss_coef"
    if o.flag(ACTOR + "use_kl_loss"):
        written = str(o.get(kind, default="low_var_kl"))
        ours = KL_KINDS.get(written.removesuffix("+"))
        if ours is None:
            d.lacks(f"{kind}={written}", "needs the whole distribution of the reference; no such penalty")
        else:
            fields: Fields = {"coefficient": o.sourced(coefficient, default=0.001)}
            if written.endswith("+"):
                fields["straight_through"] = (True, f"the + of {kind}")
            if ours == "k3":
                fields["limit"] = (10.0, "verl clamps k3 at 10 (P22)")
            d.spec("algorithm.reference_kl", ours, o.origin(kind), **fields)
    else:
        d.drops_given(o, "use_kl_loss is false", kind, coefficient)
    parts = ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef", "kl_ctrl.horizon", "kl_ctrl.target_kl")
    names = [f"algorithm.{name}" for name in parts]
    if o.flag("algorithm.use_kl_in_reward"):
        for name in ("algorithm.use_kl_in_reward", *(name for name in names if o.given(name))):
            d.lacks(name, "KL in the reward; algorithm.reference_kl puts it into the loss")
    else:
        d.drops_given(o, "use_kl_in_reward is false", *names)
    common.entropy(d, o, ACTOR + "entropy_coeff")


def _batch(d: Draft, o: Options) -> None:
    """Prompts, completions, updates."""
    prompts = o.whole("data.train_batch_size", default=1024)
    mini = o.whole(ACTOR + "ppo_mini_batch_size", default=256, least=1)
    d.put("train.prompts_per_step", prompts, o.origin("data.train_batch_size"))
    d.put("train.completions_per_prompt", o.whole(ROLLOUT + "n", default=1), o.origin(ROLLOUT + "n"))
    note = f"{prompts} prompts in mini batches of {mini}: verl counts both in prompts"
    common.updates(d, prompts, math.ceil(prompts / mini), o.origin(ACTOR + "ppo_mini_batch_size"), note)
    d.copy("train.epochs_per_step", o, ACTOR + "ppo_epochs", default=1)
    budget = ACTOR + "ppo_max_token_len_per_gpu"
    if o.flag(ACTOR + "use_dynamic_bsz"):
        d.copy("train.tokens_per_micro_batch", o, budget, default=16384)
    else:
        d.drops_given(o, "use_dynamic_bsz is false", budget)


def _training(d: Draft, o: Options) -> None:
    """Optimizer, schedule, evaluations, checkpoints."""
    prefix = ACTOR + "optim."
    names = {"lr": (prefix + "lr",), "weight_decay": (prefix + "weight_decay",)}
    common.optimizer(d, o, names, {"lr": 1e-6, "weight_decay": 0.01})
    betas = o.get(prefix + "betas")
    if isinstance(betas, list) and len(betas) == 2:
        for beta, value in zip(("beta1", "beta2"), betas, strict=True):
            d.put(f"train.optimizer.{beta}", value, f"from {prefix}betas")
    common.schedule(d, o, prefix + "lr_scheduler_type", prefix + "warmup_style", default="constant")
    total = o.whole("trainer.total_training_steps", prefix + "total_training_steps", default=0)
    origin = o.origin("trainer.total_training_steps", prefix + "total_training_steps")
    common.steps(d, o, total, origin, "", "trainer.total_epochs", "verl counts trainer.total_epochs")
    warmup = o.whole(prefix + "lr_warmup_steps", default=-1)
    ratio = o.number(prefix + "lr_warmup_steps_ratio", default=0.0, least=0, most=1)
    made = math.prod(d.entries[f"train.{name}"].value for name in ("updates_per_step", "epochs_per_step"))
    note = f"verl's scheduler counts steps, ours updates: {made} in each" if made > 1 else ""
    if warmup > 0:
        d.put("train.warmup_steps", warmup * made, o.origin(prefix + "lr_warmup_steps"), note)
    elif ratio > 0:
        steps = round(ratio * d.entries["train.steps"].value)
        d.put("train.warmup_steps", steps * made, f"from {prefix}lr_warmup_steps_ratio, times train.steps", note)
    d.copy("train.final_lr_ratio", o, prefix + "min_lr_ratio")
    d.copy("train.max_grad_norm", o, ACTOR + "grad_clip", prefix + "clip_grad", default=1.0)
    save = o.whole("trainer.save_freq", default=-1)
    d.put("checkpoint.every", max(0, save), o.origin("trainer.save_freq"))
    if o.given("data.val_files", "trainer.val_before_train") or o.given("trainer.test_freq"):
        every = max(0, o.whole("trainer.test_freq", default=-1))
        d.lacks("data.val_files", f"held-out questions: set eval.task, and eval.every to {every} (trainer.test_freq)")
    keep = o.whole("trainer.max_actor_ckpt_to_keep")
    if keep is not None:
        d.put("checkpoint.keep_last", keep, o.origin("trainer.max_actor_ckpt_to_keep"))
    d.copy("seed", o, "data.seed", ACTOR + "data_loader_seed")
