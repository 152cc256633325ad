"""TRL: `GRPOConfig` as YAML, JSON or a Python file's call; names and defaults of 1.16, older spellings understood."""

import math

from proxima.config.problems import one_problem
from proxima.peers.convert import common
from proxima.peers.convert.draft import Draft, Fields
from proxima.peers.convert.options import Options
from proxima.peers.convert.trl_rewards import rewards

LIST = "algorithm.correction"
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def convert(o: Options) -> Draft:
    """A recipe from a GRPOConfig."""
    d = Draft()
    common.model(d, o, "model_name_or_path", "model")
    d.flag("model.gradient_checkpointing", o, "gradient_checkpointing")
    if o.given("bf16"):
        d.put("model.compute_dtype", "bfloat16" if o.flag("bf16") else "float32", "from bf16")
    longest = o.whole("max_completion_length", default=512)
    prompt = o.whole("max_prompt_length")
    if prompt is not None:
        d.put("model.max_length", prompt + longest, "from max_prompt_length + max_completion_length")
    common.task(d, o, "dataset_name")
    d.flag("data.shuffle", o, "shuffle_dataset")
    rewards(d, o)
    why = "TRL recomputes old_per_token_logps with the trainer, where an update could differ from it"
    d.put("algorithm.proximal", "recompute", why)
    kind = _surrogate(d, o)
    _aggregate(d, o, kind, longest)
    _advantage(d, o)
    _corrections(d, o, kind)
    _penalties(d, o)
    if o.flag("mask_truncated_completions"):
        note = "after the advantages of the whole group, as in TRL"
        d.append("algorithm.selection", "drop_truncated", "from mask_truncated_completions", note)
    names = {name: (name,) for name in ("temperature", "top_k", "top_p", "min_p")}
    common.sampling(d, o, names, {"temperature": 1.0, "top_k": 0, "top_p": 1.0})
    d.put("sampling.max_tokens", longest, o.origin("max_completion_length"))
    steps = _batch(d, o)
    _training(d, o, steps)
    return d


def _surrogate(d: Draft, o: Options) -> str:
    """`loss_type` at its `importance_sampling_level`; the loss type."""
    kind = str(o.get("loss_type", default="dapo"))
    level = str(o.get("importance_sampling_level", default="token"))
    if kind not in LOSSES:
        raise one_problem("loss_type", f"no loss of this name; known: {', '.join(LOSSES)}", kind, o.file)
    if level not in ("token", "sequence", "sequence_token"):
        raise one_problem("importance_sampling_level", "must be token or sequence", level, o.file)
    low, high = o.sourced("epsilon", default=0.2), o.sourced("epsilon_high", "epsilon", default=0.2)
    sequence = (level.replace("sequence_token", "token"), o.origin("importance_sampling_level"))
    path, origin = "algorithm.surrogate", o.origin("loss_type")
    clipping = ("epsilon", "epsilon_high", *(["delta"] if level == "token" else []))
    read = {"cispo": ("epsilon_high",), "sapo": (), "vespo": ()}.get(kind, clipping)
    for name in ("epsilon", "epsilon_high", "delta"):
        if o.given(name) and name not in read:
            d.drops(name, f"not read by loss_type {kind} at level {level}")
    if kind == "cispo":
        note = f"TRL's epsilon_high is the cap itself, {high[0]:g}; ours is added to 1."
        none, above = (1.0, "TRL's cispo has none"), (round(high[0] - 1, 12), f"{high[1]}, minus 1")
        note += " It has no lower bound: epsilon_low 1 (T2)."
        d.spec(path, "cispo", origin, note, epsilon_low=none, epsilon_high=above, level=sequence)
    elif kind in ("sapo", "vespo"):
        _smooth(d, o, kind, sequence)
    elif level != "token":
        form = ("token" if level == "sequence_token" else "sequence", sequence[1])
        ours = "luspo" if kind == "luspo" else "gspo"
        d.spec(path, ours, sequence[1], epsilon_low=low, epsilon_high=high, form=form)
    else:
        note = "TRL's luspo at token level is the clipped loss, summed over each sequence (T1)"
        d.spec(path, "ppo_clip", origin, note if kind == "luspo" else "", epsilon_low=low, epsilon_high=high)
        _delta(d, o, high[0])
    return kind


def _smooth(d: Draft, o: Options, kind: str, level: tuple[str, str]) -> None:
    """sapo and vespo, which have no clip."""
    if kind == "sapo":
        defaults = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
        names = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
        note, more = "", {"level": level}
    else:
        signs = (("positive", "pos"), ("negative", "neg"))
        names = {f"{ours}_{sign}": f"vespo_{ours}_{short}" for ours in ("k", "lambda") for sign, short in signs}
        defaults = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
        note = "TRL multiplies its sampler correction into the weight; here a correction multiplies the loss (T7)"
        more = {}
    fields = {ours: o.sourced(name, default=defaults[name]) for ours, name in names.items()}
    d.spec("algorithm.surrogate", kind, o.origin("loss_type"), note, **fields, **more)


def _delta(d: Draft, o: Options, high: float) -> None:
    """The two-sided clip: what our dual clip does, above 1 + epsilon_high."""
    value = o.number("delta")
    if value is None:
        return
    if value <= 1:
        d.lacks("delta", f"{value:g}: a cap of the ratio at or below 1 has no equivalent")
        return
    note = "below 1 + epsilon_high TRL also caps tokens with a positive advantage; ours does not (T3)"
    d.put("algorithm.surrogate.dual_clip", value, "from delta", "" if value >= 1 + high else note)


def _aggregate(d: Draft, o: Options, kind: str, longest: int) -> None:
    """How each loss type divides."""
    origin, path = o.origin("loss_type"), "algorithm.aggregate"
    if kind == "dr_grpo":
        common.horizon(d, origin, longest, o.origin("max_completion_length"), "TRL divides by max_completion_length")
    elif kind in ("grpo", "sapo"):
        d.spec(path, "sequence_mean_token_mean", origin, "TRL counts completions without a loss token too (T1)")
    elif kind == "luspo":
        d.spec(path, "sequence_mean_token_sum", origin)
    else:
        note = "TRL divides by the tokens of each micro-batch; here by those of the whole update"
        d.spec(path, "token_mean", origin, note if kind == "bnpo" else "")


def _advantage(d: Draft, o: Options) -> None:
    """`scale_rewards`, `multi_objective_aggregation`."""
    written = o.get("scale_rewards", default="group")
    scale = {"true": "group", "false": "none"}.get(str(written).lower(), written)
    if scale not in ("group", "batch", "none"):
        raise one_problem("scale_rewards", "must be group, batch, none, true or false", str(written), o.file)
    how = str(o.get("multi_objective_aggregation", default="sum_then_normalize"))
    epsilon = (1e-4, "TRL's constant")
    if how == "normalize_then_sum":
        fields: Fields = {"scale": ("group", "TRL: each reward by its own group"), "epsilon": epsilon}
        fields["finish"] = ("completions", "TRL: the sum is standardised over the batch")
        weights = o.get("reward_weights")
        if isinstance(weights, list):
            fields["weights"] = (weights, "from reward_weights")
        d.spec("algorithm.advantage", "gdpo", o.origin("multi_objective_aggregation"), **fields)
    else:
        d.spec("algorithm.advantage", "grpo", "GRPOConfig", scale=(scale, o.origin("scale_rewards")), epsilon=epsilon)


def _corrections(d: Draft, o: Options, kind: str) -> None:
    """The sampler correction, off-policy sequence mask, top-entropy mask."""
    prefix = "vllm_importance_sampling_"
    names = [prefix + name for name in ("correction", "mode", "clip_max", "clip_min", "cap")]
    if o.flag("use_vllm") and o.flag(prefix + "correction", default=True):
        _sampler_correction(d, o, prefix)
    else:
        off = "the correction is switched off" if o.flag("use_vllm") else "use_vllm is false: TRL corrects no sampler"
        d.drops_given(o, off, *names)
    for name, ours, field, default in (
        ("off_policy_mask_threshold", "off_policy_sequence", "threshold", None),
        ("top_entropy_quantile", "top_entropy", "share", 1.0),
    ):
        value = o.number(name, default=default)
        if value is not None and (default is None or value < default):
            d.append(LIST, ours, f"from {name}", "", **{field: (value, f"from {name}")})


def _sampler_correction(d: Draft, o: Options, prefix: str) -> None:
    """TRL's weights for the gap between vLLM and the trainer, on by default with vLLM."""
    mode = str(o.get(prefix + "mode", default="sequence_mask"))
    level, _, bound = mode.rpartition("_")
    if level not in ("token", "sequence") or bound not in ("truncate", "mask"):
        bounds = "must be token_truncate, token_mask, sequence_truncate or sequence_mask"
        raise one_problem(prefix + "mode", bounds, mode, o.file)
    caps, low = (prefix + "cap", prefix + "clip_max"), prefix + "clip_min"
    unbounded = caps[1] in o.flat and o.flat[caps[1]] is None
    high = math.inf if unbounded else o.number(*caps, default=3.0)
    origin = o.origin(prefix + "mode")
    fields: Fields = {
        "level": (level, origin),
        "bound": ("clip" if bound == "mask" else "clamp", origin),
        "upper": (high, o.origin(*(caps if o.given(caps[0]) else caps[1:]))),
        "lower": (o.number(low, default=0.0), o.origin(low) if o.given(low) else "no lower bound"),
    }
    d.append(LIST, "importance", origin, "where vLLM gave no log-prob TRL takes ratio 1 (T11)", **fields)


def _penalties(d: Draft, o: Options) -> None:
    """`beta`, `entropy_coef`."""
    beta = o.number("beta", default=0.0)
    unbiased = o.flag("use_bias_correction_kl", default=True)
    if beta:
        fields = {"coefficient": (beta, o.origin("beta")), "unbiased": (unbiased, o.origin("use_bias_correction_kl"))}
        d.spec("algorithm.reference_kl", "k3", o.origin("beta"), **fields)
    else:
        d.drops_given(o, "beta is 0: no reference", "use_bias_correction_kl")
    common.entropy(d, o, "entropy_coef")


def _batch(d: Draft, o: Options) -> int:
    """One step is one generation of TRL: prompts, updates, passes; the optimizer steps it makes."""
    device = o.whole("per_device_train_batch_size", default=8)
    gather = o.whole("gradient_accumulation_steps", default=1)
    group = o.whole("num_generations", default=8)
    whole = o.whole("generation_batch_size")
    times = o.whole("steps_per_generation", default=gather if whole is None else max(1, whole // max(1, device)))
    total = device * times if whole is None else whole
    if group < 1 or gather < 1 or times < 1 or total % group:
        why = f"does not divide the {total} completions of a generation"
        raise one_problem("num_generations", why, str(group), o.file)
    named = "generation_batch_size / num_generations"
    if whole is None:
        factors = f"{o.origin('per_device_train_batch_size')} * steps_per_generation / num_generations"
        named = f"{factors}: {device} * {times} / {group}"
    d.put("train.prompts_per_step", total // group, named, common.ONE_PROCESS)
    d.put("train.completions_per_prompt", group, o.origin("num_generations"))
    made = common.updates(d, total // group, times / gather, "from steps_per_generation / gradient_accumulation_steps")
    passes = o.whole("num_iterations", default=1, least=1)
    d.put("train.epochs_per_step", passes, o.origin("num_iterations"))
    return made * int(passes)


def _training(d: Draft, o: Options, made: int) -> None:
    """Optimizer, schedule, steps, checkpoints."""
    names = {"lr": ("learning_rate",), "eps": ("adam_epsilon",), "weight_decay": ("weight_decay",)}
    names |= {"beta1": ("adam_beta1",), "beta2": ("adam_beta2",)}
    common.optimizer(d, o, names, {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0})
    if o.given("optim") and not str(o.get("optim")).startswith("adamw_torch"):
        d.lacks("optim", f"{o.get('optim')}: only AdamW")
    common.schedule(d, o, "lr_scheduler_type", default="linear")
    most = o.whole("max_steps", default=-1)
    note = f"TRL counts optimizer steps, {made} in each of ours"
    epochs = ("num_train_epochs", "TRL counts num_train_epochs, 3 by default")
    common.steps(d, o, math.ceil(most / made), "from max_steps", note, *epochs)
    warmup = o.number("warmup_steps", default=0, least=0, most=10**9)
    ratio = o.number("warmup_ratio", default=0, least=0, most=1)
    if 0 < warmup < 1:
        warmup, ratio = 0, warmup
    if warmup >= 1:
        d.put("train.warmup_steps", int(warmup), "from warmup_steps")
    elif ratio > 0:
        name = "warmup_ratio" if o.given("warmup_ratio") else "warmup_steps"
        updates = math.ceil(ratio * d.entries["train.steps"].value * made)
        d.put("train.warmup_steps", updates, f"from {name}, times the updates of the run")
    d.copy("train.max_grad_norm", o, "max_grad_norm", default=1.0)
    if o.get("save_strategy", default="steps") == "steps":
        save = o.number("save_steps", default=500, least=0, most=10**9)
        if save >= 1:
            note = f"in our steps of {made} updates" if made > 1 else ""
            d.put("checkpoint.every", math.ceil(save / made), o.origin("save_steps"), note)
        keep = o.whole("save_total_limit")
        if keep is not None:
            d.put("checkpoint.keep_last", keep, "from save_total_limit")
    d.copy("seed", o, "seed", default=42)
