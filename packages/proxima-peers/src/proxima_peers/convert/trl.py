"""TRL: `GRPOConfig` as YAML, JSON or a Python file's call; names and defaults of 1.16, older spellings understood."""

import math
import re
from typing import Any

from proxima.config.tree import FILL_IN
from proxima_peers.convert import common, multi_turn, trackers
from proxima_peers.convert.adapter import PEFT_TARGETS, LoraNames, lora
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options
from proxima_peers.convert.pruning_fork import is_pruning_fork
from proxima_peers.convert.rollout_servers import trl_engine
from proxima_peers.convert.trl_names import read_negated, says_grpo
from proxima_peers.convert.trl_rewards import reads_solutions, rewards

LIST = "algorithm.correction"
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def convert(o: Options) -> Draft:
    """A recipe from a GRPOConfig."""
    d = Draft()
    if not says_grpo(o):
        d.defaults.append("GRPOTrainer (no option tells it from RLOOTrainer: give a script with `trl rloo --config …`)")
    columns = questions_and_rewards(d, o)
    why = "TRL recomputes old_per_token_logps with the trainer, where an update could differ from it"
    d.put("algorithm.proximal", "recompute", why)
    kind = _surrogate(d, o)
    _aggregate(d, o, kind, completion_limit(o))
    _advantage(d, o)
    _corrections(d, o, kind)
    _penalties(d, o)
    common.pruned_groups(d, o, "pruning", "metric", "allocation", "filling")
    without_truncated(d, o, "after the advantages of the whole group, as in TRL")
    sampling_and_training(d, o, columns, group=8)
    return d


def completion_limit(o: Options) -> int:
    return int(o.whole("max_completion_length", default=512))


def questions_and_rewards(d: Draft, o: Options) -> dict[str, str]:
    """The model, the questions, the engine and the rewards of a trainer that generates; returns the task's columns."""
    read_negated(o)
    adapted_model(d, o)
    prompt = o.whole("max_prompt_length")
    if prompt is not None:
        longest = prompt + completion_limit(o)
        d.put("model.max_length", longest, "from max_prompt_length + max_completion_length")
    split = str(o.get("dataset_train_split", default="train"))
    subset = o.get("dataset_config")
    columns = _prompts(o)
    if reads_solutions(o):
        columns["answer"] = "solution"
    common.task(d, o, "dataset_name", split=split, **columns)
    if subset is not None and d.entries["task.kind"].value == "dataset":
        d.put("task.subset", str(subset), "from dataset_config")
    if o.given("train_dataset"):
        rows = f"the script makes its rows: {o.get('train_dataset')}"
        d.wait("task", "train_dataset", f"{rows}; write them to a file, or name the task's columns and data.system")
    if o.given("system_prompt"):
        d.put("data.system", str(o.get("system_prompt", default="")), o.origin("system_prompt"))
    if o.given("model_revision"):
        d.put("model.revision", str(o.get("model_revision", default="main")), o.origin("model_revision"))
    d.flag("data.shuffle", o, "shuffle_dataset")
    common.template_arguments(d, o, "chat_template_kwargs")
    trl_engine(d, o)
    rewards(d, o)
    return columns


def without_truncated(d: Draft, o: Options, note: str) -> None:
    """`mask_truncated_completions`."""
    if o.flag("mask_truncated_completions"):
        d.append("algorithm.selection", "drop_truncated", "from mask_truncated_completions", note)


def sampling_and_training(d: Draft, o: Options, columns: dict[str, str], *, group: int) -> int:
    """Sampling, batches, optimizer, evaluation and episodes; `group` is the trainer's default of `num_generations`.
    Returns the number of updates on a batch."""
    longest = completion_limit(o)
    names = {name: (name,) for name in ("temperature", "top_k", "top_p", "min_p")}
    common.sampling(d, o, names, {"temperature": 1.0, "top_k": 0, "top_p": 1.0})
    d.put("sampling.max_tokens", longest, o.origin("max_completion_length"))
    made = _batch(d, o, group)
    _training(d, o, made)
    _evaluation(d, o, made, columns)
    multi_turn.trl_episodes(d, o, (longest, o.origin("max_completion_length")))
    multi_turn.held_out(d)
    trackers.trl(d, o)
    return made


def _prompts(o: Options) -> dict[str, str]:
    """The column with the prompts: TRL reads a chat, or a text as it is; open-r1 makes a user's turn of a text, and so
    does the fork of it by the completion pruning's authors, where it is the column of MATH."""
    pruning = is_pruning_fork(o)
    of_open_r1 = pruning or o.given("dataset_prompt_column", "system_prompt")
    usual = "problem" if pruning else "prompt"
    column = str(o.get("dataset_prompt_column", default=usual))
    if of_open_r1:
        return {"question": column}
    return {"prompt": column}


OF_PEFT: dict[str, Any] = {  # options of peft's LoraConfig
    "rank": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "dropout": "lora_dropout",
    "rslora": "use_rslora",
    "dora": "use_dora",
}
OF_SCRIPT: dict[str, Any] = {field: f"peft_config.{name}" for field, name in OF_PEFT.items()}
PEFT = LoraNames(**OF_SCRIPT, default_targets=PEFT_TARGETS)
OF_COMMAND: dict[str, Any] = OF_PEFT | {
    "rank": "lora_r",
    "targets": "lora_target_modules",
    "default_rank": 16,
    "default_alpha": 32,
    "default_dropout": 0.05,
}
COMMAND_LINE = LoraNames(**OF_COMMAND, default_targets=PEFT_TARGETS)


def number_of_processes(o: Options) -> int | None:
    """All processes: accelerate's `num_processes` counts them, torchrun and deepspeed count those of a node."""
    whole = o.whole("num_processes", least=1)
    if whole is not None:
        o.given("num_machines", "nnodes", "nproc_per_node")
        return int(whole)
    here = o.whole("nproc_per_node", "num_gpus", least=1)
    nodes = o.whole("nnodes", "num_nodes", default=1, least=1)
    return None if here is None else int(here * nodes)


def rows_of_update(o: Options) -> tuple[int, str]:
    """The rows of an optimizer update of a trainer without groups, with their origin."""
    device = o.whole("per_device_train_batch_size", "per_gpu_train_batch_size", default=8, least=1)
    gather = o.whole("gradient_accumulation_steps", default=1, least=1)
    written = number_of_processes(o)
    processes = written or 1
    factors = f"{device} * {gather} * {processes}"
    counts = f"per_device_train_batch_size * gradient_accumulation_steps * num_processes: {factors}"
    if written:
        origin = f"from {counts}"
    else:
        origin = f"{FILL_IN}: {counts}; the file does not say num_processes, 1 is assumed"
    return device * gather * processes, origin


def adapted_model(d: Draft, o: Options) -> None:
    """The model of the trainers that generate, its dtypes and its adapter."""
    common.model(d, o, "model_name_or_path", "model")
    d.flag("model.gradient_checkpointing", o, "gradient_checkpointing")
    dtypes_and_adapter(d, o)


def dtypes_and_adapter(d: Draft, o: Options) -> None:
    """The dtypes, and `model.lora` from the command line's `use_peft` or the script's `LoraConfig(…)`."""
    compute = "bfloat16" if o.flag("bf16", default=True) else "float32"
    d.put("model.compute_dtype", compute, o.origin("bf16"))
    common.dtype(d, o, "dtype", "dtype", "torch_dtype", default="float32")
    written = any(name.startswith("peft_config.") for name in o.flat)
    if written:
        lora(d, o, PEFT)
    elif o.flag("use_peft"):
        lora(d, o, COMMAND_LINE)
    if written or not o.flag("use_peft"):
        why = "the script's LoraConfig holds" if written else "use_peft is off"
        d.drops_given(o, why, *(name for name in OF_COMMAND.values() if name in o.flat))


STRATEGIES = ("no", "steps", "epoch")


def evaluation_strategy(o: Options) -> str:
    """When the trainer evaluates: no, steps or epoch."""
    return o.choice(STRATEGIES, "eval_strategy", "evaluation_strategy", default="no")


def _evaluation(d: Draft, o: Options, made: int, columns: dict[str, str]) -> None:
    """`eval_strategy`: the test split of the same data, sampled as in training."""
    strategy = evaluation_strategy(o)
    if strategy == "no":
        return
    o.given("num_generations_eval", "eval_on_start")
    every = o.number("eval_steps", default=500, least=0, most=10**9)
    if strategy == "epoch":
        d.needs("eval.every", "eval_strategy: epoch; set it in steps")
        every = 0
    elif every < 1:
        d.needs("eval.every", f"eval_steps: {every:g} of the run; set it in steps")
        every = 0
    split = str(o.get("dataset_test_split", default="test"))
    due = (math.ceil(every / made), o.origin("eval_steps"))
    if not common.evaluation(d, o, "dataset_name", due, split=split, **columns):
        d.wait("eval.task", "eval.task", f"eval_strategy: {strategy}; which held-out questions, and eval.every")
        return
    d.put("eval.before", o.flag("eval_on_start"), o.origin("eval_on_start"))
    greedy = is_pruning_fork(o)  # in the evaluate() of its trainer
    common.eval_sampling(d, o, {"samples": ("num_generations_eval", "num_generations")}, {}, greedy=greedy)
    _keep_best(d, o)


BEST_BY = re.compile(r"(?:eval_)?(?:rewards?/)?(accuracy|reward)(?:_reward)?(?:/mean)?")


def _keep_best(d: Draft, o: Options) -> None:
    """`save_strategy: best`, where the evaluations measure its `metric_for_best_model`."""
    if o.get("save_strategy") != "best":
        return
    written = str(o.get("metric_for_best_model", default="loss"))
    metric = BEST_BY.fullmatch(written)
    if metric is None or o.flag("greater_is_better", default=True) is False:
        _lacks_best(d, written)
    else:
        d.put("checkpoint.keep_best", True, o.origin("save_strategy"))
        d.put("eval.metric", metric[1], o.origin("metric_for_best_model"))


def _lacks_best(d: Draft, metric: str) -> None:
    d.lacks("save_strategy", f"best, by {metric}: checkpoint.keep_best=true, with eval.task, keeps the best here")


def _surrogate(d: Draft, o: Options) -> str:
    """`loss_type` at its `importance_sampling_level`; returns the loss type."""
    kind = o.choice(LOSSES, "loss_type", default="dapo")
    level = o.choice(("token", "sequence", "sequence_token"), "importance_sampling_level", default="token")
    low = o.sourced("epsilon", default=0.2)
    high = o.sourced("epsilon_high", "epsilon", default=0.2)
    sequence = (level.replace("sequence_token", "token"), o.origin("importance_sampling_level"))
    path = "algorithm.surrogate"
    origin = o.origin("loss_type")
    read = {"cispo": ("epsilon_high",), "sapo": (), "vespo": ()}.get(kind, ("epsilon", "epsilon_high", "delta"))
    for name in ("epsilon", "epsilon_high", "delta"):
        if o.given(name) and name not in read:
            d.drops(name, f"not read by loss_type {kind} at level {level}")
    if kind == "cispo":
        added = f"TRL's epsilon_high is the cap itself, {high[0]:g}; ours is added to 1."
        note = f"{added} It has no lower bound: epsilon_low 1 (T2)."
        none = (1.0, "TRL's cispo has none")
        above = (round(high[0] - 1, 12), f"{high[1]}, minus 1")
        d.spec(path, "cispo", origin, note, epsilon_low=none, epsilon_high=above, level=sequence)
    elif kind in ("sapo", "vespo"):
        _smooth(d, o, kind, sequence)
    elif level != "token":
        form = "token" if level == "sequence_token" else "sequence"
        ours = "luspo" if kind == "luspo" else "gspo"
        d.spec(path, ours, sequence[1], epsilon_low=low, epsilon_high=high, form=(form, sequence[1]))
        _delta(d, o, high)
    else:
        note = ""
        if kind == "luspo":
            note = "TRL's luspo at token level is the clipped loss, summed over each sequence (T1)"
        d.spec(path, "ppo_clip", origin, note, epsilon_low=low, epsilon_high=high)
        _delta(d, o, high)
    return kind


def _smooth(d: Draft, o: Options, kind: str, level: tuple[str, str]) -> None:
    """sapo and vespo, which have no clip."""
    path = "algorithm.surrogate"
    origin = o.origin("loss_type")
    if kind == "sapo":
        fields: Fields = {
            "tau_positive": o.sourced("sapo_temperature_pos", default=1.0),
            "tau_negative": o.sourced("sapo_temperature_neg", default=1.05),
        }
        d.spec(path, kind, origin, "", **fields, level=level)
    else:
        fields = {
            "k_positive": o.sourced("vespo_k_pos", default=2.0),
            "k_negative": o.sourced("vespo_k_neg", default=3.0),
            "lambda_positive": o.sourced("vespo_lambda_pos", default=3.0),
            "lambda_negative": o.sourced("vespo_lambda_neg", default=2.0),
        }
        note = "TRL multiplies its sampler correction into the weight; here a correction multiplies the loss (T7)"
        d.spec(path, kind, origin, note, **fields)


def _delta(d: Draft, o: Options, high: tuple[float, str]) -> None:
    """The two-sided clip: min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    If delta >= 1 + epsilon_high, it is a dual clip. Below, it is the upper clip of positive advantages, and the bound
    for negative ones is still the larger of delta and 1 + epsilon_high.
    """
    value = o.number("delta")
    path = "algorithm.surrogate."
    if value is None:
        return
    if value >= 1 + high[0] and value > 1:
        d.put(path + "dual_clip", value, o.origin("delta"))
    elif value >= 1 and high[0] > 0:
        note = f"delta {value:g} is below 1 + epsilon_high, {1 + high[0]:g}: it bounds positive advantages"
        d.put(path + "epsilon_high", round(value - 1, 12), f"{o.origin('delta')}, minus 1", note)
        d.put(path + "dual_clip", 1 + high[0], f"1 + epsilon_high, {high[1]}", "the bound of negative advantages (T3)")
    else:
        d.lacks("delta", f"{value:g}: a cap of the ratio below 1")


def _aggregate(d: Draft, o: Options, kind: str, longest: int) -> None:
    """The denominator of each loss type."""
    origin = o.origin("loss_type")
    path = "algorithm.aggregate"
    if kind == "dr_grpo":
        common.horizon(d, origin, longest, o.origin("max_completion_length"), "TRL divides by max_completion_length")
    elif kind in ("grpo", "sapo"):
        d.spec(path, "sequence_mean_token_mean", origin, "TRL counts completions without a loss token too (T1)")
    elif kind == "luspo":
        d.spec(path, "sequence_mean_token_sum", origin)
    elif kind == "bnpo":
        note = "TRL divides by the tokens of each micro-batch; here by those of the whole update"
        d.spec(path, "token_mean", origin, note)
    else:
        d.spec(path, "token_mean", origin)


def _advantage(d: Draft, o: Options) -> None:
    """`scale_rewards`, `multi_objective_aggregation`."""
    written = str(o.get("scale_rewards", default="group"))
    scale = {"true": "group", "false": "none"}.get(written.lower(), written)
    if scale not in ("group", "batch", "none"):
        scale = o.refuse("known are group, batch, none, true and false", "scale_rewards", default="group")
    hows = ("sum_then_normalize", "normalize_then_sum")
    how = o.choice(hows, "multi_objective_aggregation", default="sum_then_normalize")
    epsilon = (1e-4, "TRL's constant")
    if how == "normalize_then_sum":
        fields: Fields = {
            "scale": ("group", "TRL: each reward by its own group"),
            "epsilon": epsilon,
            "finish": ("completions", "TRL: the sum is standardised over the batch"),
        }
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
    if not o.flag("use_vllm"):
        d.drops_given(o, "use_vllm is false: TRL corrects no sampler", *names)
    elif o.flag(prefix + "correction", default=not is_pruning_fork(o)):  # which has none
        _sampler_correction(d, o, prefix)
    else:
        d.drops_given(o, "the correction is switched off", *names)
    threshold = o.number("off_policy_mask_threshold")
    if threshold is not None:
        origin = "from off_policy_mask_threshold"
        d.append(LIST, "off_policy_sequence", origin, threshold=(threshold, origin))
    share = o.number("top_entropy_quantile", default=1.0)
    if share < 1:
        d.append(LIST, "top_entropy", "from top_entropy_quantile", share=(share, "from top_entropy_quantile"))


def _sampler_correction(d: Draft, o: Options, prefix: str) -> None:
    """TRL's weights for the gap between vLLM and the trainer, on by default with vLLM."""
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    capped = o.given(prefix + "cap") and not o.given(prefix + "mode", prefix + "clip_max")
    mode = "token_truncate" if capped else "sequence_mask"
    level, _, bound = o.choice(modes, prefix + "mode", default=mode).rpartition("_")
    cap = prefix + "cap"
    most = prefix + "clip_max"
    unbounded = most in o.flat and o.flat[most] is None
    if unbounded:
        high = math.inf
    else:
        high = o.number(cap, most, default=3.0)
    note = "where vLLM gave no log-prob TRL takes ratio 1 (T11)"
    if capped:
        origin = o.origin(prefix + "mode", cap)
        note = f"The versions of TRL with {prefix}cap and no {prefix}mode truncate the weight of each token; {note}"
    else:
        origin = o.origin(prefix + "mode")
    source = o.origin(cap, most) if o.given(cap) else o.origin(most)
    how = "clip" if bound == "mask" else "clamp"
    fields: Fields = {"level": (level, origin), "bound": (how, origin), "upper": (high, source)}
    least = prefix + "clip_min"
    low = o.number(least, default=0.0)
    source = o.origin(least) if o.given(least) else "no lower bound"
    fields["lower"] = (low, source)
    d.append(LIST, "importance", origin, note, **fields)


def _penalties(d: Draft, o: Options) -> None:
    """`beta`, `entropy_coef`."""
    beta = o.number("beta", default=0.0)
    if not beta:
        d.put("algorithm.reference_kl", None, f"{o.origin('beta')}: 0")
    else:
        unbiased = (o.flag("use_bias_correction_kl", default=True), o.origin("use_bias_correction_kl"))
        if is_pruning_fork(o) and not o.given("use_bias_correction_kl"):
            unbiased = (False, "CPPO's trainer does not correct it")
        origin = o.origin("beta")
        d.spec("algorithm.reference_kl", "k3", origin, coefficient=(beta, origin), unbiased=unbiased)
    common.entropy(d, o, "entropy_coef")


def _batch(d: Draft, o: Options, default_group: int) -> int:
    """One step is one generation of TRL: prompts, updates and passes. Returns its number of optimizer steps."""
    device = o.whole("per_device_train_batch_size", "per_gpu_train_batch_size", default=8, least=1)
    gather = o.whole("gradient_accumulation_steps", default=1, least=1)
    group = o.whole("num_generations", default=default_group, least=1)
    whole = o.whole("generation_batch_size", least=1)
    written = number_of_processes(o)
    processes = written or 1
    times = o.whole("steps_per_generation", least=1)
    if whole is None:
        times = times or gather
        total = device * processes * times
        factors = "per_device_train_batch_size * num_processes * steps_per_generation / num_generations"
        counts = f"{factors}: {device} * {processes} * {times} / {group}"
    else:
        times = times or max(1, whole // (device * processes))
        total = whole
        counts = "generation_batch_size / num_generations"
    origin = f"from {counts}"
    if whole is None and written is None:
        origin = f"{FILL_IN}: {counts}; the file does not say num_processes, 1 is assumed"
    elif total % group:
        origin = f"{FILL_IN}: {counts} is not a whole number"
    prompts = max(1, total // group)
    d.put("train.prompts_per_step", prompts, origin)
    d.put("train.completions_per_prompt", group, o.origin("num_generations"))
    made = common.updates(d, times / gather, "from steps_per_generation / gradient_accumulation_steps")
    passes = o.whole("num_iterations", default=1, least=1)
    d.put("train.epochs_per_step", passes, o.origin("num_iterations"))
    return made * int(passes)


def _training(d: Draft, o: Options, made: int) -> None:
    adamw(d, o, 1e-6)
    most = o.whole("max_steps", default=-1)
    note = f"TRL counts optimizer steps, {made} in each of ours"
    epochs = ("num_train_epochs", "TRL counts num_train_epochs, 3 by default")
    common.steps(d, o, math.ceil(most / made), o.origin("max_steps"), note, *epochs)
    warmup, share = warmups(o)
    common.warmup(d, warmup, share, made, rounded="up")
    clip_and_save(d, o, made, best_later=evaluation_strategy(o) != "no")


def adamw(d: Draft, o: Options, lr: float) -> None:
    """AdamW and its schedule; `lr` is TRL's default."""
    names = {
        "lr": ("learning_rate",),
        "beta1": ("adam_beta1",),
        "beta2": ("adam_beta2",),
        "eps": ("adam_epsilon",),
        "weight_decay": ("weight_decay",),
    }
    common.optimizer(d, o, names, {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0})
    if o.given("optim") and not str(o.get("optim")).startswith("adamw_torch"):
        d.lacks("optim", f"{o.get('optim')}: only AdamW")
    common.schedule(d, o, "lr_scheduler_type", default="linear")
    common.lowest_rate(d, o, ("lr_scheduler_kwargs.min_lr",), ("lr_scheduler_kwargs.min_lr_rate",))


def warmups(o: Options) -> tuple[tuple[int, str], tuple[float, str]]:
    """The warm-up in updates, and as a share of the run, each with its origin."""
    warmup = o.number("warmup_steps", default=0, least=0, most=10**9)
    share = o.number("warmup_ratio", default=0, least=0, most=1)
    spelled = ("warmup_ratio", "warmup_steps")
    if 0 < warmup < 1:  # a share of the run
        share = warmup
        warmup = 0
        spelled = ("warmup_steps", "warmup_ratio")
    return (int(warmup), o.origin("warmup_steps")), (share, o.origin(*spelled))


def clip_and_save(d: Draft, o: Options, made: int, *, best_later: bool = False) -> None:
    """Clipping, checkpoints and seed.

    Args:
        made: updates in each of our steps.
        best_later: the caller converts `save_strategy: best`.
    """
    d.copy("train.max_grad_norm", o, "max_grad_norm", default=1.0)
    strategy = o.choice(("steps", "epoch", "no", "best"), "save_strategy", default="steps")
    if strategy == "epoch":
        d.needs("checkpoint.every", "save_strategy: epoch; set it in steps")
    if strategy == "best" and not best_later:
        _lacks_best(d, str(o.get("metric_for_best_model", default="loss")))
    if strategy == "steps":
        save = o.number("save_steps", default=500, least=0, most=10**9)
        if 0 < save < 1:
            d.needs("checkpoint.every", f"save_steps: {save:g} of the run; set it in steps")
        elif save >= 1:
            note = f"in our steps of {made} updates" if made > 1 else ""
            d.put("checkpoint.every", math.ceil(save / made), o.origin("save_steps"), note)
        d.copy("checkpoint.keep_last", o, "save_total_limit", whole=True)
    d.copy("seed", o, "seed", default=42)
