"""verl: its trainer's YAML (or a launch script's overrides), from 0.3 to 0.10, with DAPO's options."""

import math
from collections.abc import Mapping
from typing import Any

from proxima.config.tree import FILL_IN
from proxima_peers.convert import common, multi_turn, trackers
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options
from proxima_peers.convert.rollout_servers import verl_engine
from proxima_peers.convert.verl_correction import correction
from proxima_peers.convert.verl_dapo import dynamic_sampling, overlong_buffer
from proxima_peers.convert.verl_reward import reward_manager, scored_by_function, scorer
from proxima_peers.convert.verl_sources import sources_of_files
from proxima_peers.convert.verl_training import (
    AGGREGATES,
    batch,
    gae_critic,
    lora_by_rank,
    lora_names,
    placement,
    training,
)

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
LOSS = "actor_rollout_ref.actor.policy_loss."


def convert(o: Options) -> Draft:
    """A recipe from verl's options."""
    d = Draft(own_columns=scored_by_function(o))
    common.model(d, o, "actor_rollout_ref.model.path")
    longest = o.whole(*LONGEST, default=512)
    prompt = o.whole("data.max_prompt_length", ROLLOUT + "prompt_length", default=512)
    d.put("model.max_length", prompt + longest, f"{o.origin('data.max_prompt_length')} + max_response_length")
    context = o.whole(ROLLOUT + "max_model_len")
    if context is not None and context < prompt + longest:
        d.lacks(ROLLOUT + "max_model_len", f"{context} tokens, below prompt and completion")
    fsdp = ACTOR + "fsdp_config."
    computed = (fsdp + "dtype", fsdp + "mixed_precision.param_dtype", ACTOR + "megatron.dtype")
    common.dtype(d, o, "dtype", fsdp + "model_dtype", default="fp32")
    common.dtype(d, o, "compute_dtype", *computed, default="bfloat16")
    d.flag("model.gradient_checkpointing", o, "actor_rollout_ref.model.enable_gradient_checkpointing")
    columns = {"messages": str(o.get("data.prompt_key", default="prompt")), "answer": "reward_model.ground_truth"}
    common.task(d, o, "data.train_files", **columns)
    sources_of_files(d, o, "data.train_files", "task", "train", columns)
    d.flag("data.shuffle", o, "data.shuffle")
    common.template_arguments(d, o, "data.apply_chat_template_kwargs")
    _long_prompts(d, o)
    scorer(d, o)
    overlong_buffer(d, o, longest)
    reward_manager(d, o)
    forced = correction(d, o)
    _advantage(d, o)
    _aggregate(d, o, _surrogate(d, o, forced), longest)
    _penalties(d, o)
    dynamic_sampling(d, o)
    common.pruned_groups(d, o, "cppo.pruning_rate", "cppo.metric", "cppo.allocation")
    names = {"temperature": (ROLLOUT + "temperature",), "top_k": (ROLLOUT + "top_k",), "top_p": (ROLLOUT + "top_p",)}
    common.sampling(d, o, names, {"temperature": 1.0, "top_k": -1, "top_p": 1.0})
    d.put("sampling.max_tokens", longest, o.origin(*LONGEST))
    _behavior(d, o)
    batch(d, o)
    _steps_within_horizon(d)
    training(d, o)
    gae_critic(d, o)
    _lora(d, o)
    verl_engine(d, o)
    placement(d, o)
    _evaluation(d, o, columns)
    multi_turn.verl_episodes(d, o, (longest, o.origin(*LONGEST)))
    multi_turn.held_out(d)
    trackers.verl(d, o)
    return d


_MODEL = "actor_rollout_ref.model."


def _lora(d: Draft, o: Options) -> None:
    """`lora_rank` of verl's FSDP; here the critic has an adapter if the policy has one."""
    own = o.whole("critic.model.lora_rank", default=0)
    on = lora_by_rank(d, o, lora_names(_MODEL))
    if "critic.kind" not in d.entries:
        return
    parts = (("lora_rank", 0), ("lora_alpha", 16), ("target_modules", "all-linear"))
    theirs, ours = ([o.get(at + name, default=off) for name, off in parts] for at in ("critic.model.", _MODEL))
    if (own > 0 or on) and theirs != ours:
        d.lacks("critic.model.lora_rank", f"{own}: here policy and critic have the same model.lora, or none")


LONGEST = ("data.max_response_length", ROLLOUT + "response_length")


def _long_prompts(d: Draft, o: Options) -> None:
    """Handling of prompts longer than `max_prompt_length`: skip, error, or truncation."""
    cut = o.choice(("error", "left", "right", "middle"), "data.truncation", default="error")
    if o.flag("data.filter_overlong_prompts"):
        d.put("data.over_length", "skip", "from data.filter_overlong_prompts")
        d.drops_given(o, "longer prompts are filtered", "data.truncation")
    elif cut == "error":
        d.put("data.over_length", "refuse", o.origin("data.truncation"))
    else:
        d.lacks("data.truncation", f"{cut}: longer prompts are cut there and skipped here")


def _behavior(d: Draft, o: Options) -> None:
    """`logprobs_mode`: the distribution whose log-probs the engine returns."""
    name = ROLLOUT + "logprobs_mode"
    if not o.given(name):
        return
    mode = o.choice(("processed_logprobs", "raw_logprobs"), name, default="processed_logprobs")
    if mode == "raw_logprobs":
        d.lacks(name, "raw_logprobs: log-probs that leave out the temperature")
    else:
        d.put("algorithm.behavior", "sampled", o.origin(name), "after temperature, top-k and top-p")


def _evaluation(d: Draft, o: Options, columns: dict[str, str]) -> None:
    """`val_files`, `test_freq`, `val_kwargs`."""
    kwargs = ROLLOUT + "val_kwargs."
    every = (max(0, o.whole("trainer.test_freq", default=-1)), o.origin("trainer.test_freq"))
    before = o.flag("trainer.val_before_train", default=True)
    limit = max(0, o.whole("data.val_max_samples", default=-1))
    greedy = not o.flag(kwargs + "do_sample") or o.number(kwargs + "temperature", default=0) == 0
    o.given(*(kwargs + name for name in ("temperature", "top_k", "top_p", "n")))
    if not common.evaluation(d, o, "data.val_files", every, **columns):
        return
    sources_of_files(d, o, "data.val_files", "eval.task", "test", columns)
    d.put("eval.before", before, o.origin("trainer.val_before_train"))
    d.put("eval.limit", limit, o.origin("data.val_max_samples"))
    names = {"samples": (kwargs + "n",)} | {name: (kwargs + name,) for name in ("temperature", "top_k", "top_p")}
    common.eval_sampling(d, o, names, {"temperature": 0, "top_k": -1, "top_p": 1.0}, greedy=greedy)


SAME_NAMES = ("gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline", "remax", "rloo")
ESTIMATORS = {name: name for name in SAME_NAMES} | {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "REMAX": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _advantage(d: Draft, o: Options) -> None:
    """`algorithm.adv_estimator`."""
    name = "algorithm.adv_estimator"
    written = o.choice(ESTIMATORS, name, default="gae")
    origin = o.origin(name)
    if name in o.doubts:  # verl's default needs a critic
        written = "grpo"
        origin = origin.replace("the peer's default", "grpo")
    kind = ESTIMATORS[written]
    note = ""
    if kind in ("grpo", "opo", "gpg"):
        note = "verl gives a group of one its raw reward (P16); here its advantage is 0"
    d.spec("algorithm.advantage", kind, origin, note)
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    scaled = o.flag(by_std, default=True)
    if kind in ("grpo", "grpo_passk", "gdpo"):
        scale = "group" if scaled else "none"
        d.put("algorithm.advantage.scale", scale, o.origin(by_std))
        d.put("algorithm.advantage.epsilon", 1e-6, "verl's constant")
    else:
        d.drops_given(o, f"verl reads it for grpo, not for {written}", by_std)
    unread = ["algorithm.lam", "algorithm.gamma"]
    if kind in ("gae", "reinforce_pp"):
        d.copy("algorithm.advantage.gamma", o, unread.pop(), default=1.0)
    if kind == "gae":
        d.copy("algorithm.advantage.lam", o, unread.pop(), default=1.0)
    d.drops_given(o, f"verl reads it for gae, not for {written}", *unread)


def _surrogate(d: Draft, o: Options, forced: str | None) -> str:
    """`policy_loss.loss_mode` with its options; returns the mode."""
    name = LOSS + "loss_mode"
    path = "algorithm.surrogate"
    used = _fields_by_mode(o, name, bypass=d.entries["algorithm.proximal"].value == "behavior")
    modes = [*used, *(mode.replace("_", "-") for mode in used if "_" in mode), "bypass_mode"]
    mode = o.choice(modes, name, ACTOR + "loss_mode", default="vanilla").replace("-", "_")
    if mode == "bypass_mode":
        mode = "vanilla"
    if forced is not None:
        _drop_unread(d, used, {}, name, "not read by REINFORCE, which has no clip")
        note = "bypass mode with loss_type reinforce: no clip"
        d.spec(path, forced, "from algorithm.rollout_correction", note)
        return mode
    fields = used[mode]
    _drop_unread(d, used, fields, name, f"not read by loss_mode {mode}")
    if mode == "dro" and fields["beta"][0] is None:
        fields["beta"] = (0.5, f"{FILL_IN}: {LOSS}dro_beta is missing; verl refuses dro without it")
    if mode == "cppo":
        _cppo_budget(d, o)
    else:
        _doubt_default_bounds(o, fields)
    kind = {"vanilla": "ppo_clip", "gpg": "reinforce", "dppo_tv": "dppo", "dppo_kl": "dppo"}.get(mode, mode)
    d.spec(path, kind, o.origin(name, ACTOR + "loss_mode"), _clip_note(o, mode), **fields)
    return mode


def _drop_unread(d: Draft, used: Mapping[str, Fields], fields: Fields, name: str, why: str) -> None:
    """Record the options of the other modes, which the chosen one, with these `fields`, does not read."""
    named: set[str] = set()
    for other in used.values():
        named |= {origin for _, origin in other.values()}
    read = {origin for _, origin in fields.values()}
    for origin in sorted(named - read - {f"from {name}"}):
        if origin.startswith("from "):
            d.drops(origin.removeprefix("from "), why)


def _doubt_default_bounds(o: Options, fields: Fields) -> None:
    """Ask for the bounds that the file does not set beside a `clip_ratio` of its own, which only verl 0.3 reads."""
    both = o.number(ACTOR + "clip_ratio", default=0.2)
    if both == 0.2:
        return
    default = f"verl's default of {ACTOR}clip_ratio_"
    for field, (value, origin) in fields.items():
        if origin.startswith(default):
            side = origin.removeprefix(default)
            why = f"verl 0.3 clips at clip_ratio={both:g}; since 0.4 its own clip_ratio_{side} of 0.2 comes first"
            fields[field] = (value, f"{FILL_IN}: {why}")


def _clip_bound(o: Options, side: str) -> tuple[float, str]:
    """The clip bound of a side. Since 0.4, verl's own config sets both to .2, so `clip_ratio` is used only for a side
    that the file sets to null."""
    name = f"{ACTOR}clip_ratio_{side}"
    if name in o.flat:
        value, origin = o.sourced(name, f"{ACTOR}clip_ratio", default=0.2)
    else:
        value, origin = o.sourced(name, default=0.2)
    if side == "low" and value > 1:
        return 1.0, f"{origin}: {value:g} is not a lower bound"
    return value, origin


def _fields_by_mode(o: Options, name: str, bypass: bool) -> dict[str, Fields]:
    """The fields of each mode's surrogate, with their origins."""

    def of(option: str, default: float | None = None) -> tuple[Any, str]:
        return o.sourced(ACTOR + option, default=default)

    low = _clip_bound(o, "low")
    high = _clip_bound(o, "high")
    cap = of("clip_ratio_c", 3.0)
    clip: Fields = {"epsilon_low": low, "epsilon_high": high}
    centre: Fields = {}
    if not bypass:
        centre["centre"] = ("proximal", "verl measures from the recomputed log-probs")
    dppo: Fields = {"delta": high, "delta_low": low, "ratio_cap": cap, **centre}
    shares: Fields = {"low": of("policy_loss.clip_cov_lb", 1.0), "high": of("policy_loss.clip_cov_ub", 5.0)}
    budget: Fields = {name: of(f"policy_loss.cppo.cppo_{name}", ours) for name, ours in CPPO_DEFAULTS.items()}
    return {
        "vanilla": {**clip, "dual_clip": cap},
        "gspo": clip,
        "geo_mean": {**clip, "clip": ("log_ratio", "as verl clips")},
        "cispo": clip,
        "dppo_tv": {"divergence": ("binary_tv", f"from {name}"), **dppo},
        "dppo_kl": {"divergence": ("binary_kl", f"from {name}"), **dppo},
        "cppo": {"delta": of("clip_ratio", 0.2), **budget, **centre},
        "sapo": {"tau_positive": of("tau_pos", 1.0), "tau_negative": of("tau_neg", 1.05)},
        "clip_cov": {**clip, "share": of("policy_loss.clip_cov_ratio", 2e-4), **shares},
        "kl_cov": {"share": of("policy_loss.kl_cov_ratio", 2e-4), "coefficient": of("policy_loss.ppo_kl_coef", 0.1)},
        "gpg": {},
        "dro": {"beta": of("policy_loss.dro_beta")},
    }


CPPO = LOSS + "cppo."
CPPO_DEFAULTS = {"w_min": 0.8, "delta_b": 0.02}


def _cppo_budget(d: Draft, o: Options) -> None:
    """Record the options of verl's cppo that ours lacks: the budget's quantile and bounds, and a cap on the ratio."""
    for option, ours in (("delta_b_q", 0.9), ("delta_b_k", 1.0), ("delta_b_max_mult", 2.0)):
        name = f"{CPPO}cppo_{option}"
        value = o.number(name, default=ours)
        if value != ours:
            d.lacks(name, f"{value:g}: the budget here is the 90th percentile, at most 2 delta_b")
    cap = o.number(ACTOR + "clip_ratio_c", default=3.0)
    d.lacks(ACTOR + "clip_ratio_c", f"{cap:g}: verl's cppo bounds the ratio of the tokens it keeps; ours does not")


def _clip_note(o: Options, mode: str) -> str:
    if mode == "vanilla" and not o.given(ACTOR + "clip_ratio_c"):
        return "verl's dual clip, clip_ratio_c, is on by default."
    if mode.startswith("dppo"):
        return "The cap is clip_ratio_c, 3 by default; the 20 of verl's documentation is never reached (P4)."
    return ""


def _aggregate(d: Draft, o: Options, mode: str, longest: int) -> None:
    """`loss_agg_mode`, which two of verl's losses (sapo and geo_mean) don't read."""
    name = ACTOR + "loss_agg_mode"
    factor = ACTOR + "loss_scale_factor"
    first = ACTOR + "use_token_level_loss"
    default = "token-mean" if o.flag(first, default=True) else "seq-mean-token-mean"
    written = o.choice(AGGREGATES, name, default=default)
    if o.given(first) and not o.given(name):  # its name in the first DAPO scripts
        name = first
    scale = o.number(factor)
    kind = d.entries["algorithm.surrogate.kind"].value
    if mode in ("sapo", "geo_mean") and kind == mode:
        why = "verl's geo_mean always means over sequences (P10)"
        if mode == "sapo":
            why = "verl's sapo always does this (P6)"
        d.spec("algorithm.aggregate", "sequence_mean_token_mean", why)
        d.drops_given(o, f"verl's {mode} does not read it", name)
        return
    if written == "seq-mean-token-sum-norm":
        if scale is None:
            note = "without loss_scale_factor verl divides by the padded response length"
            common.horizon(d, o.origin(name), longest, o.origin("data.max_response_length"), note)
        else:
            common.horizon(d, o.origin(name), scale, o.origin(factor))
        return
    d.spec("algorithm.aggregate", AGGREGATES[written], o.origin(name))
    if scale is not None:
        d.drops(factor, "verl reads it for seq-mean-token-sum-norm only")


KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _penalties(d: Draft, o: Options) -> None:
    """KL towards the reference in loss and reward, and entropy."""
    kind = ACTOR + "kl_loss_type"
    coefficient = ACTOR + "kl_loss_coef"
    if o.flag(ACTOR + "use_kl_loss"):
        written, ours = _estimator(d, o, kind, "low_var_kl", "penalty")
        if ours is not None:
            fields: Fields = {"coefficient": o.sourced(coefficient, default=0.001)}
            if written.endswith("+"):
                fields["straight_through"] = (True, f"the + of {kind}")
            d.spec("algorithm.reference_kl", ours, o.origin(kind), **fields, **LIMITS.get(ours, {}))
    common.entropy(d, o, ACTOR + "entropy_coeff")
    if o.flag("algorithm.use_kl_in_reward"):
        _reward_kl(d, o)


LIMITS: dict[str, Fields] = {"k3": {"limit": (10.0, "verl clamps k3 at 10 (P22)")}}


def _estimator(d: Draft, o: Options, kind: str, default: str, what: str) -> tuple[str, str | None]:
    """The KL that the option `kind` names, as written and as ours; None if we don't have it."""
    written = o.choice([*KL_KINDS, *(f"{kl}+" for kl in KL_KINDS), "full"], kind, default=default)
    ours = KL_KINDS.get(written.removesuffix("+"))
    if ours is None:
        d.lacks(kind, f"{written}: needs the whole distribution of the reference; no such {what}")
    return written, ours


def _reward_kl(d: Draft, o: Options) -> None:
    """KL towards the reference in the reward. The + of a kind has no effect, because it only changes gradients."""
    path = "algorithm.reward_kl"
    kind = "algorithm.kl_penalty"
    control = "algorithm.kl_ctrl."
    _, ours = _estimator(d, o, kind, "kl", "estimator")
    if ours is None:
        return
    d.put(f"{path}.estimator", ours, o.origin(kind))
    if ours in LIMITS:
        d.put(f"{path}.limit", *LIMITS[ours]["limit"])
    d.copy(f"{path}.coefficient", o, control + "kl_coef", default=0.001)
    if o.choice(["fixed", "adaptive"], control + "type", default="fixed") == "adaptive":
        d.copy(f"{path}.adaptive.target", o, control + "target_kl", default=0.1)
        d.copy(f"{path}.adaptive.horizon", o, control + "horizon", default=10000.0)
    else:
        d.drops_given(o, "the coefficient is fixed", control + "target_kl", control + "horizon")


def _steps_within_horizon(d: Draft) -> None:
    """Record that verl moves an adaptive coefficient farther if a step has more completions than its horizon."""
    horizon = d.entries.get("algorithm.reward_kl.adaptive.horizon")
    size = math.prod(d.entries[f"train.{name}"].value for name in ("prompts_per_step", "completions_per_prompt"))
    if horizon is not None and size > horizon.value:
        name = "algorithm.kl_ctrl.horizon"
        most = 0.2 * size / horizon.value
        moved = f"a step of {size} completions moves verl's coefficient by up to {most:.0%} of itself"
        d.lacks(name, f"{horizon.value:g}: {moved}; here no step moves it by more than 20% (P23)")
