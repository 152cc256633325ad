"""UniRL: the autoregressive trainer's YAML, with CPPO, DPPO, DRPO (SPO), GRPO or GSPO."""

from typing import Any

from proxima.config.problems import one_problem
from proxima_peers.convert import common, multi_turn, trackers
from proxima_peers.convert.adapter import LoraNames, lora
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options
from proxima_peers.convert.rollout_servers import unirl_engine

ALGORITHM = "algorithm."
HORIZON = 8192
FUNCTION = "{kind: function, path: ./FILE.py:FUNCTION}"
BY_OPTION = {name: name.partition("_")[0] for name in ("cppo_delta", "cppo_w_min", "cppo_delta_b", "dppo_delta")}
BY_OPTION |= {"drpo_epsilon": "drpo", "clip_range": "grpo"}
LORA = LoraNames(
    rank="backend.lora_cfg.rank",
    alpha="backend.lora_cfg.alpha",
    targets="backend.lora_cfg.target_modules",
    dropout="backend.lora_cfg.dropout",
    default_alpha=16,
    default_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
)


def convert(o: Options) -> Draft:
    """A recipe from UniRL's options."""
    d = Draft()
    common.model(d, o, *(f"{section}.config.pretrained_model_ckpt_path" for section in ("bundle", "rollout")))
    if any(name.startswith("backend.lora_cfg.") for name in o.flat):
        lora(d, o, LORA)
    common.dtype(d, o, "dtype", "bundle.config.model_precision", default="fp32")
    autocast = ("pipeline.autocast_precision", "bundle.config.autocast_precision")
    common.dtype(d, o, "compute_dtype", *autocast, default="fp32")
    common.dtype(d, o, "compute_dtype", "backend.fsdp_cfg.param_dtype", default="bf16")
    instructions = ("rollout.config.system_instruction", "pipeline.system_instruction")
    if o.given(*instructions):
        d.put("data.system", str(o.get(*instructions, default="")), o.origin(*instructions))
    common.task(d, o, "data_source.args.run.data_path")
    d.flag("data.shuffle", o, "data_source.args.run.shuffle")
    common.template_arguments(d, o, "rollout.config.chat_template_kwargs", enable_thinking="pipeline.enable_thinking")
    unirl_engine(d, o)
    _rewards(d, o)
    kind = _algorithm(d, o)
    _proximal(d, o, kind)
    _surrogate(d, o, kind)
    _aggregate(d, o, kind)
    _advantage(d, o, kind)
    names = {name: (f"sampling.{name}", f"sampling.ar.{name}") for name in ("temperature", "top_k", "top_p")}
    names["max_tokens"] = ("sampling.max_new_tokens", "sampling.ar.max_new_tokens")
    common.sampling(d, o, names, {"temperature": 0.7, "top_k": 1024, "top_p": 0.9, "max_tokens": 512})
    for field in ("temperature", "top_p", "top_k"):
        _copy_of_engine(d, o, field, field)
    _copy_of_engine(d, o, "max_tokens", "max_new_tokens")
    prompts = ("bundle.config.max_prompt_length", "pipeline.max_prompt_length")
    prompt = o.whole(*prompts)
    if prompt is not None:
        longest = prompt + d.entries["sampling.max_tokens"].value
        d.put("model.max_length", longest, f"{o.origin(*prompts)} + max_new_tokens")
    tempered = o.number(ALGORITHM + "sampling_temperature")
    if tempered is not None and tempered != d.entries["sampling.temperature"].value:
        why = f"{tempered:g}, not the sampling's: here the trainer reads the temperature from the data"
        d.lacks(ALGORITHM + "sampling_temperature", why)
    _batch(d, o)
    _training(d, o)
    _evaluation(d, o)
    multi_turn.workflow_turns(d, o, "rollout.config.max_turns", "rollout.config.env.max_turns")
    trackers.unirl(d, o)
    return d


def _copy_of_engine(d: Draft, o: Options, field: str, option: str) -> None:
    """Record the engine's own copy of a field of `sampling`, if it differs."""
    name = f"rollout.config.{option}"
    value = o.number(name)
    if value is None:
        return
    ours = d.entries[f"sampling.{field}"].value
    theirs = common.top_k_of(value) if field == "top_k" else value
    if theirs != ours:
        d.lacks(name, f"{value:g}, not the {ours:g} of `sampling`")


def _evaluation(d: Draft, o: Options) -> None:
    """`eval_interval` and `eval_*`: by default 16 answers per question at temperature 1; before rollout 1, too."""
    names = {"samples": ("eval_samples_per_prompt",), "temperature": ("eval_temperature",)}
    every = o.whole("eval_interval", default=0)
    if not every:
        return
    o.given("eval_samples_per_prompt", "eval_temperature", "eval_batch_size")
    limit = o.whole("eval_num_prompts", default=60)
    if common.evaluation(d, o, "data_source.args.run.eval_data_path", (every, o.origin("eval_interval"))):
        d.put("eval.limit", limit, o.origin("eval_num_prompts"))
        common.eval_sampling(d, o, names, {"temperature": 1.0}, greedy=False)
        d.put("eval.samples", o.whole(*names["samples"], default=16), o.origin(*names["samples"]))
    elif not o.given("data_source.args.run.eval_data_path"):
        d.wait("eval.task", "eval.task", f"eval_interval: {every}; which held-out questions, and eval.every")


def _rewards(d: Draft, o: Options) -> None:
    """The scorer by its class."""
    scorer = str(o.get("reward.backend._target_", default="")).rpartition(".")[2]
    scorers = {"MathVerifyRewardScorer": "math", "MathBoxedRewardScorer": "boxed"}
    if scorer in scorers:
        d.append("reward", scorers[scorer], "from reward.backend")
    else:
        common.reward(d)
        if scorer:
            d.wait("reward", "reward.backend._target_", f"{scorer}: choose `reward`, or port it: {FUNCTION}")
    truncated = str(o.get("reward.truncated_reward", default="zero"))
    if truncated != "keep":
        written = f"{truncated} ({o.origin('reward.truncated_reward')})"
        why = "a cut completion keeps its score here; algorithm.selection drop_truncated leaves it out"
        d.lacks("reward.truncated_reward", f"{written}: {why}")


def _algorithm(d: Draft, o: Options) -> str:
    """The algorithm: by its class, else by the names of its options."""
    target = str(o.get(ALGORITHM + "_target_", default="")).rpartition(".")[2]
    algorithms = {name.upper(): name for name in ("cppo", "dppo", "drpo", "grpo", "gspo", "ppo")} | {"ARGRPO": "grpo"}
    if target and target not in algorithms:
        message = f"is not a training of a language model with rewards; known are {', '.join(algorithms)}"
        raise one_problem(ALGORITHM + "_target_", message, target, o.file)
    kinds = (kind for option, kind in BY_OPTION.items() if o.flat.get(ALGORITHM + option) is not None)
    algorithm = algorithms.get(target) or next(kinds, None)
    if algorithm is None:
        o.refuse(f"known are {', '.join(algorithms)}; the default is used", ALGORITHM + "_target_")
    return algorithm or "grpo"


def _proximal(d: Draft, o: Options, kind: str) -> None:
    """`old_logp_source`: `rollout` is the engine's log-probs, `replay` the trainer's before the first update."""
    name = ALGORITHM + "old_logp_source"
    if kind in ("grpo", "gspo", "ppo"):
        d.put("algorithm.proximal", "behavior", f"UniRL's {kind.upper()} is always anchored on the rollout")
        return
    source = o.choice(("rollout", "replay"), name, default="rollout")
    proximal = "behavior" if source == "rollout" else "recompute"
    d.put("algorithm.proximal", proximal, o.origin(name))


def _surrogate(d: Draft, o: Options, kind: str) -> None:
    target = ALGORITHM + "_target_"
    if o.given(target):
        origin = f"from {target}"
    else:
        origin = "from the names of the options"
    replayed = d.entries["algorithm.proximal"].value == "recompute"

    def own(name: str, default: Any) -> tuple[Any, str]:
        return o.sourced(ALGORITHM + name, default=default)

    fields: Fields
    note = ""
    if kind == "cppo":
        defaults = {"delta": 0.2, "w_min": 0.8, "delta_b": 0.02}
        fields = {name: own(f"cppo_{name}", value) for name, value in defaults.items()}
    elif kind == "dppo":
        fields = {"divergence": ("binary_tv", "UniRL's DPPO"), "delta": own("dppo_delta", 0.15)}
    elif kind == "drpo":
        weighted = o.flag(ALGORITHM + "penalty_mu_weighted", default=True)
        fields = {"epsilon": own("drpo_epsilon", 12.5)}
        if not weighted:
            kind = "spo"
            note = "penalty_mu_weighted is false: plain SPO"
        elif replayed:
            note = "UniRL's replay weighs the pull by the replayed probability; here it stays the behavior policy's"
            d.lacks(ALGORITHM + "old_logp_source", "DRPO's weight from the replayed policy")
    else:
        usual = 3e-4 if kind == "gspo" else 1e-4
        low = own("clip_range", usual)
        names = (ALGORITHM + "clip_range_high", ALGORITHM + "clip_range")
        fields = {"epsilon_low": low, "epsilon_high": o.sourced(*names, default=low[0])}
        if kind == "gspo":
            fields["form"] = ("sequence", "UniRL's GSPO")
        written = o.get(ALGORITHM + "clip_schedule", default="constant")
        if written != "constant":
            d.lacks(ALGORITHM + "clip_schedule", f"{written}: the clip range is constant here")
    if replayed and kind in ("cppo", "dppo"):
        fields["centre"] = ("proximal", f"from {ALGORITHM}old_logp_source: replay overwrites mu too")
    d.spec("algorithm.surrogate", {"grpo": "ppo_clip", "ppo": "ppo_clip"}.get(kind, kind), origin, note, **fields)


AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}


def _aggregate(d: Draft, o: Options, kind: str) -> None:
    """`loss_agg_mode` with its `horizon`."""
    names = (ALGORITHM + "loss_agg_mode", ALGORITHM + "loss_agg")
    horizon = ALGORITHM + "horizon"
    written = o.choice(AGGREGATES, *names, default="token-mean")
    if kind == "gspo":
        d.spec("algorithm.aggregate", "sequence_mean_token_mean", "UniRL's GSPO is a mean over sequences")
        d.drops_given(o, "UniRL's GSPO does not read it", *names, horizon)
        return
    if written == "seq-mean-token-sum-norm":
        common.horizon(d, o.origin(*names), o.number(horizon, default=HORIZON), o.origin(horizon))
        return
    note = ""
    if written == "token-mean":
        note = "UniRL before its aggregate_token_losses divides by all packed tokens, masked ones too (U3)"
    d.spec("algorithm.aggregate", AGGREGATES[written], o.origin(*names), note)
    d.drops_given(o, f"not read by {written}", horizon)


def _advantage(d: Draft, o: Options, kind: str) -> None:
    """`adv_normalization_scope`, `normalize_adv_by_std`."""
    scope = o.choice(("group", "global"), "adv_normalization_scope", default="group")
    by_std = o.flag("normalize_adv_by_std", default=True)
    if kind == "ppo":
        names = ("gae_gamma", "gae_lambda", "vf_coef", "cliprange_value")
        common.critic(d, o, ALGORITHM + "_target_", "advantage_mode", *(ALGORITHM + name for name in names))
        return
    if scope == "global":
        d.lacks("adv_normalization_scope", "global: one mean over all prompts; the mean is each group's here")
    if not by_std:
        scale = "none"
    elif scope == "group":
        scale = "group"
    else:
        scale = "batch"
    fields = {"scale": (scale, o.origin("normalize_adv_by_std")), "epsilon": (1e-8, "UniRL's constant")}
    d.spec("algorithm.advantage", "grpo", o.origin("adv_normalization_scope"), **fields)


def _batch(d: Draft, o: Options) -> None:
    names = ("batch_size", "data_source.args.algorithm.prompts_per_rollout")
    d.put("train.prompts_per_step", o.whole(*names, default=1, least=1), o.origin(*names))
    groups = ("sampling.samples_per_prompt", "sampling.ar.samples_per_prompt")
    d.put("train.completions_per_prompt", o.whole(*groups, default=1), o.origin(*groups))
    count = "stack.num_updates_per_batch"
    common.updates(d, o.whole(count, default=1), o.origin(count))
    d.copy("train.tokens_per_micro_batch", o, "stack.micro_planner.token_budget")
    d.copy("train.max_grad_norm", o, "stack.max_grad_norm", default=1.0)
    d.copy("train.steps", o, "num_rollouts", whole=True)
    if "train.steps" not in d.entries:
        d.ask("train.steps", 100, "UniRL's num_rollouts")


def _training(d: Draft, o: Options) -> None:
    prefix = "backend.optimizer_cfg."
    scheduler = "backend.scheduler_cfg."
    theirs = ("learning_rate", "weight_decay", "adam_epsilon", "adam_beta1", "adam_beta2")
    ours = ("lr", "weight_decay", "eps", "beta1", "beta2")
    names = {name: (prefix + option,) for name, option in zip(ours, theirs, strict=True)}
    common.optimizer(d, o, names, {"lr": 1e-6})
    common.schedule(d, o, scheduler + "type", default="constant")
    made = d.entries["train.updates_per_step"].value
    ratio = scheduler + "warmup_ratio"
    ends = d.entries["train.steps"].value * made
    total = o.whole(scheduler + "total_steps")
    if total in (None, ends) or d.entries["train.schedule"].value == "constant":
        d.drops_given(o, "the schedule ends with the run, or is constant", scheduler + "total_steps")
    else:
        d.lacks(scheduler + "total_steps", f"{total}: the schedule ends with the run here, after {ends} updates")
    updates = (o.whole(scheduler + "warmup_steps", default=0), o.origin(scheduler + "warmup_steps"))
    common.warmup(d, updates, (o.number(ratio, default=0.0, least=0, most=1), o.origin(ratio)), made)
    d.copy("seed", o, "data_source.args.run.seed")
