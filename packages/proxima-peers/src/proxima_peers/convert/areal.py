"""AReaL: its actor and rollout YAML."""

from proxima_peers.convert import common, multi_turn, trackers
from proxima_peers.convert.adapter import LoraNames, lora
from proxima_peers.convert.areal_policies import policies, segment_wise
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options
from proxima_peers.convert.rollout_servers import areal_engine

LENGTHS = ("gconfig.max_new_tokens", "rollout.gconfig.max_new_tokens", "actor.max_new_tokens")
GROUPS = ("gconfig.n_samples", "actor.group_size", "group_size", "rollout.gconfig.n_samples")
BIAS = "actor.reward_bias"


def convert(o: Options) -> Draft:
    """A recipe from AReaL's options."""
    d = Draft()
    areal_model(d, o, "actor.")
    longest = o.whole(*LENGTHS, default=16384)
    _context(d, o, longest)
    common.task(d, o, "train_dataset.path", split=str(o.get("train_dataset.split", default="train")))
    d.flag("data.shuffle", o, "train_dataset.shuffle")
    normalised = _advantage(d, o)
    _rewards(d, o, normalised, longest)
    _asynchrony(d, o)
    areal_engine(d, o)
    policies(d, o)
    _surrogate(d, o)
    d.spec("algorithm.aggregate", "token_mean", "AReaL's loss: over all loss tokens, rejected ones included (A1)")
    _penalties(d, o)
    _selection(d, o)
    names = {name: (f"gconfig.{name}", f"rollout.gconfig.{name}") for name in ("temperature", "top_k", "top_p")}
    common.sampling(d, o, names, {"temperature": 1.0, "top_k": 0, "top_p": 1.0})
    d.put("sampling.max_tokens", longest, o.origin(*LENGTHS))
    stop = o.get("gconfig.stop")
    if stop:
        stops = stop if isinstance(stop, list) else [stop]
        d.put("sampling.stop", stops, "from gconfig.stop")
    tempered = o.number("actor.temperature")
    if tempered is not None and tempered != d.entries["sampling.temperature"].value:
        d.lacks("actor.temperature", f"{tempered:g}, not the rollouts': here the trainer reads it from the data")
    _batch(d, o)
    _training(d, o)
    _evaluation(d, o)
    multi_turn.workflow_turns(d, o, "max_turns", "agent_run_args.max_turns")
    trackers.areal(d, o)
    return d


def areal_model(d: Draft, o: Options, prefix: str) -> None:
    """The model of a section, its dtype and its adapter."""
    common.model(d, o, f"{prefix}path")
    note = "master weights stay float32 here"
    common.dtype(d, o, "compute_dtype", f"{prefix}dtype", default="bfloat16", note=note)
    d.flag("model.gradient_checkpointing", o, f"{prefix}gradient_checkpointing")
    if o.flag(f"{prefix}use_lora"):
        names = LoraNames(
            rank=f"{prefix}lora_rank",
            alpha=f"{prefix}lora_alpha",
            targets=f"{prefix}target_modules",
            default_rank=32,
            default_alpha=16,
        )
        lora(d, o, names)
        kind = str(o.get(f"{prefix}peft_type", default="lora"))
        if kind != "lora":
            d.lacks(f"{prefix}peft_type", f"{kind}: only LoRA")


def _context(d: Draft, o: Options, longest: int) -> None:
    """`model.max_length`, from the longest prompts that AReaL keeps and the context of its servers."""
    prompts = o.whole("train_dataset.max_length")
    total = o.whole("gconfig.max_tokens")
    limits = []
    if prompts:
        limits.append((prompts + longest, f"{o.origin('train_dataset.max_length')} + max_new_tokens"))
    if total:
        limits.append((total, o.origin("gconfig.max_tokens")))
    for name in ("sglang.context_length", "vllm.max_model_len"):
        context = o.whole(name)
        if context is not None and not limits:
            limits.append((context, o.origin(name)))
        elif context is not None and context < limits[0][0]:
            d.lacks(name, f"{context} tokens, below prompt and completion")
    if limits:
        d.put("model.max_length", *min(limits))


def _evaluation(d: Draft, o: Options) -> None:
    """`valid_dataset`, `evaluator`, `eval_gconfig`."""
    every = (o.whole("evaluator.freq_steps", default=0) or 0, o.origin("evaluator.freq_steps"))
    before = o.flag("evaluator.eval_before_train")
    names = {name: (f"eval_gconfig.{name}",) for name in ("temperature", "top_k", "top_p")}
    names |= {"samples": ("eval_gconfig.n_samples",), "max_tokens": ("eval_gconfig.max_new_tokens",)}
    greedy = o.flag("eval_gconfig.greedy")
    for spellings in names.values():
        o.given(*spellings)
    split = str(o.get("valid_dataset.split", default="test"))
    if common.evaluation(d, o, "valid_dataset.path", every, split=split):
        d.put("eval.before", before, o.origin("evaluator.eval_before_train"))
        common.eval_sampling(d, o, names, {}, greedy=greedy)
        not_in_steps(d, o, "evaluator", "eval.every")
    else:
        d.drops_given(o, "there are no held-out questions", "evaluator.freq_epochs", "evaluator.freq_secs")


def not_in_steps(d: Draft, o: Options, section: str, path: str) -> None:
    """Record that a frequency in epochs or seconds has to be set in steps."""
    for name in (f"{section}.freq_epochs", f"{section}.freq_secs"):
        if o.given(name):
            d.needs(path, f"{name}: {o.get(name)}; set it in steps")


REWARD = "actor.reward_norm."
ADV = "actor.adv_norm."
LEVEL = "actor.importance_sampling_level"


def _advantage(d: Draft, o: Options) -> str:
    """Reward and advantage normalisation; returns the scope of the deviation used: `group`, `batch` or `none`."""
    for name in ("group_size", "std_unbiased", "eps"):
        o.given(REWARD + name, ADV + name)
    mean = _level(o, REWARD, "mean_level")
    std = _level(o, REWARD, "std_level")
    adv_mean = _level(o, ADV, "mean_level")
    adv_std = _level(o, ADV, "std_level")
    leave = o.flag(REWARD + "mean_leave1out")
    note = ""
    prefix = REWARD
    if o.flag("actor.group_reward_norm") and mean is None:
        mean = std = "group"
    if mean is None and std is None and adv_mean == "group":
        mean = "group"
        std = adv_std
        leave = o.flag(ADV + "mean_leave1out")
        prefix = ADV
        note = "AReaL takes this mean over tokens, so that long completions weigh more in it. "
    else:
        d.drops_given(o, "rewards are normalised already", ADV + "mean_leave1out")
        for name, level in (("mean_level", adv_mean), ("std_level", adv_std)):
            if level == "group" and (mean or std):
                d.lacks(ADV + name, "group, for rewards that are normalised already")
        if adv_std == "batch" and adv_mean is None:
            d.lacks(ADV + "mean_level", "none, with std_level batch: whitening here subtracts the mean too")
    if o.given("critic.path"):
        common.critic(d, o, "critic.path", "actor.discount", "actor.gae_lambda")
        return "batch"
    whitened = adv_std == "batch"
    if mean == "group" and std == "batch" and not whitened:
        why = "AReaL divides by the deviation of the rewards around their groups' means, `scale: batch` around one mean"
        d.lacks(prefix + "std_level", f"batch, with mean_level group: {why}")
    if mean == "group":
        _by_group(d, o, prefix, note, std or "none", leave, whitened)
        if not whitened:
            _by_turn(d, o, prefix, std)
    else:
        _by_batch(d, o, whitened)
        if std == "group":
            d.lacks(prefix + "std_level", f"group, with mean_level {mean or 'null'}: no group's mean is subtracted")
    if whitened:
        return "batch"
    return std or "none"


def _level(o: Options, prefix: str, name: str) -> str | None:
    """`mean_level` or `std_level`; batch if the section exists but does not set it."""
    if o.get(prefix + name) is None:
        if prefix + name not in o.flat and any(other.startswith(prefix) for other in o.flat):
            return "batch"
        return None
    return o.choice(("group", "batch"), prefix + name, default="batch")


def _by_group(d: Draft, o: Options, prefix: str, note: str, std: str, leave: bool, whitened: bool) -> None:
    """Rewards minus the mean of their group."""
    path = "algorithm.advantage"
    origin = o.origin(prefix + "mean_level", "actor.group_reward_norm")
    epsilon = (o.number(prefix + "eps", default=1e-5), o.origin(prefix + "eps"))
    biased = "AReaL's variances are biased (A7)."
    if whitened and std == "group":
        scale = ("group", f"from {prefix}std_level")
        finish = ("tokens", f"from {ADV}std_level")
        note += f"Normalised in the group, then whitened over the tokens of the batch. {biased}"
        d.spec(path, "gdpo", origin, note, scale=scale, epsilon=epsilon, finish=finish)
        if leave:
            why = "leaving one out, where rewards are divided by the group's standard deviation"
            d.lacks(prefix + "mean_leave1out", why)
    elif whitened:
        where = "the tokens of the batch"
        if leave:
            where = "tokens, where the factor n / (n - 1) of leaving one out cancels"
        elif std == "batch":
            where = "tokens, where a standard deviation of the batch cancels"
        note += f"Rewards minus the mean of their group. Then whitened over {where}. {biased}"
        d.spec(path, "reinforce_pp_baseline", origin, note)
    elif leave:
        d.spec(path, "rloo", f"from {prefix}mean_leave1out", note.strip())
        if std != "none":
            d.lacks(prefix + "std_level", "dividing after a leave-one-out mean")
    else:
        d.spec(path, "grpo", origin, f"{note}{biased}", scale=(std, f"from {prefix}std_level"), epsilon=epsilon)
    for name in ("actor.discount", "actor.gae_lambda"):
        if o.number(name, default=1.0) != 1:
            d.lacks(name, "a discount within a completion, under an advantage of whole completions")


TURN_DISCOUNTS = ("rollout.agent.turn_discount", "rollout.openai.turn_discount", "turn_discount")


def _by_turn(d: Draft, o: Options, prefix: str, std: str | None) -> None:
    """`turn_discount`: the rewards of turns, which `set_reward` gives, and what later turns return."""
    name = next((option for option in TURN_DISCOUNTS if o.given(option)), None)
    if name is None:
        return
    gamma = o.number(name, default=1.0, least=0, most=1)
    if gamma == 1 and name not in o.doubts:
        d.drops(name, "off, or neutral")
        return
    path = "algorithm.advantage"
    for place in list(d.entries):
        if place.startswith(f"{path}."):
            del d.entries[place]
    note = "AReaL compares the returns of all turns of a group; here each turn with that turn of the other episodes."
    d.spec(path, "turn_returns", o.origin(name), note, gamma=(gamma, o.origin(name)))
    if std is not None:
        d.lacks(f"{prefix}std_level", f"{std}: returns of turns are not divided by a standard deviation here")


def _by_batch(d: Draft, o: Options, whitened: bool) -> None:
    """REINFORCE++ without a group baseline, whitened over the batch."""
    note = "rewards to go, whitened over the batch"
    gamma = o.sourced("actor.discount", default=1.0)
    d.spec("algorithm.advantage", "reinforce_pp", o.origin(ADV + "std_level"), note, gamma=gamma)
    if not whitened:
        d.lacks("actor.adv_norm", "advantages that are not whitened over the batch, without a baseline by group")
    if o.number("actor.gae_lambda", default=1.0) != 1:
        d.lacks("actor.gae_lambda", "a lambda without a critic")


def _rewards(d: Draft, o: Options, normalised: str, longest: int) -> None:
    """`reward_scaling`, and the overlong penalty."""
    d.default(o, "actor.reward_clip", 20.0, "AReaL clips the scaled rewards at it; here no reward is clipped")
    scale = o.number("actor.reward_scaling", default=1.0)
    weight = None
    if normalised == "none" and scale != 1:
        weight = (scale, "from actor.reward_scaling")
    common.reward(d, weight)
    kind = d.entries["algorithm.advantage.kind"].value
    bias = 0
    if kind == "reinforce_pp" and normalised == "none":
        bias = o.number(BIAS, default=0)
    if bias:
        d.lacks(BIAS, f"{bias:g}: no mean is taken off the rewards, so that it counts")
    else:
        d.drops_given(o, "cancels: the mean is taken off", BIAS)
    if weight is None:
        why = "cancels: rewards or advantages are divided by their standard deviation"
        d.drops_given(o, why, "actor.reward_scaling")
    if not o.flag("actor.overlong_reward_penalty"):
        return
    names = (LENGTHS[2], *LENGTHS[:2])
    most = (o.whole(*names, default=longest), o.origin(*names))
    buffer = (o.whole("actor.overlong_tokens"), o.origin("actor.overlong_tokens"))
    common.overlong(d, most, buffer, o.sourced("actor.overlong_penalty_factor"))
    if weight is not None:
        d.put("reward.1.weight", *weight)


def _surrogate(d: Draft, o: Options) -> None:
    """PPO's clip, GSPO, SAPO or CISPO."""
    path = "algorithm.surrogate"
    low = o.sourced("actor.eps_clip", default=0.2)
    high = o.sourced("actor.eps_clip_higher", "actor.eps_clip", default=0.2)
    level = (o.choice(("token", "sequence"), LEVEL, default="token"), o.origin(LEVEL))
    dual = o.number("actor.c_clip")
    if o.flag("actor.use_sapo_loss"):
        taus: Fields = {
            "tau_positive": o.sourced("actor.sapo_tau_pos", default=1.0),
            "tau_negative": o.sourced("actor.sapo_tau_neg", default=1.05),
        }
        d.spec(path, "sapo", "from actor.use_sapo_loss", **taus, level=level)
        d.drops_given(o, "SAPO has no clip", "actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip")
        return
    if o.flag("actor.use_cispo_loss"):
        d.spec(path, "cispo", "from actor.use_cispo_loss", epsilon_low=low, epsilon_high=high)
    elif level[0] == "sequence":
        note = "AReaL's token mean weighs sequences by their length (A5)"
        form = ("sequence", f"from {LEVEL}")
        d.spec(path, "gspo", form[1], note, epsilon_low=low, epsilon_high=high, form=form)
    else:
        d.spec(path, "ppo_clip", "AReaL's actor loss", epsilon_low=low, epsilon_high=high)
        if dual is not None:
            d.put(f"{path}.dual_clip", dual, "from actor.c_clip")
        return
    if dual is not None:
        d.lacks("actor.c_clip", f"dual clip with {d.entries[f'{path}.kind'].value}")


def _penalties(d: Draft, o: Options) -> None:
    """KL in the reward, on by default in AReaL."""
    value = o.number("actor.kl_ctl", default=0.1)
    if value:
        default = "" if o.given("actor.kl_ctl") else " (AReaL's default)"
        why = "KL of tokens beside a normalised score; algorithm.reward_kl is near"
        d.lacks("actor.kl_ctl", f"{value:g}{default}: {why}")
        if o.given("actor.kl_estimator"):
            d.lacks("actor.kl_estimator", "of the KL in the reward")
    else:
        d.drops_given(o, "kl_ctl is 0: off", "actor.kl_ctl", "actor.kl_estimator")


def _selection(d: Draft, o: Options) -> None:
    """Dropping of uniform groups, which AReaL calls dynamic sampling, and of completions without an end token."""
    if o.flag("actor.dynamic_sampling"):
        note = "AReaL trains on what is left and generates nothing in its place; algorithm.dynamic_sampling would"
        d.append("algorithm.selection", "drop_uniform_groups", "from actor.dynamic_sampling", note)
    if o.flag("actor.mask_no_eos_with_zero"):
        d.append("algorithm.selection", "drop_truncated", "from actor.mask_no_eos_with_zero")


def _batch(d: Draft, o: Options) -> None:
    names = ("train_dataset.batch_size", "rollout.consumer_batch_size")
    d.put("train.prompts_per_step", o.whole(*names, default=1), o.origin(*names))
    d.put("train.completions_per_prompt", o.whole(*GROUPS, default=1), o.origin(*GROUPS))
    common.updates(d, o.whole("actor.ppo_n_minibatches", default=4), o.origin("actor.ppo_n_minibatches"))
    d.copy("train.tokens_per_micro_batch", o, "actor.mb_spec.max_tokens_per_mb")


def _training(d: Draft, o: Options) -> None:
    prefix = "actor.optimizer."
    areal_optimizer(d, o, prefix)
    steps = o.whole("total_train_steps")
    common.steps(d, o, steps, "from total_train_steps", "", "total_train_epochs", "AReaL counts total_train_epochs")
    proportion = prefix + "warmup_steps_proportion"
    made = d.entries["train.updates_per_step"].value
    fixed = o.whole(prefix + "warmup_steps", default=0)
    origin = o.origin(prefix + "warmup_steps")
    if fixed and made > 1:
        origin += f", which counts steps: {made} updates in each"
    share = (o.number(proportion, default=0.001, least=0, most=1), o.origin(proportion))
    common.warmup(d, (fixed * made, origin), share, made)
    areal_clipping_and_saving(d, o, prefix)


def areal_optimizer(d: Draft, o: Options, prefix: str) -> None:
    """AdamW, and the shape of its schedule."""
    kind = o.get(prefix + "type", default="adam")
    if kind not in ("adam", "adamw"):
        d.lacks(prefix + "type", f"{kind}: only AdamW, with its states in float32")
    names = {name: (prefix + name,) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    common.optimizer(d, o, names, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01})
    common.schedule(d, o, prefix + "lr_scheduler_type", default="constant")


def areal_clipping_and_saving(d: Draft, o: Options, prefix: str) -> None:
    """The end of the schedule, clipping, checkpoints and seed."""
    common.lowest_rate(d, o, (), (prefix + "min_lr_ratio",))
    d.copy("train.max_grad_norm", o, prefix + "gradient_clipping", default=1.0)
    every = o.whole("saver.freq_steps")
    if every:
        d.put("checkpoint.every", every, o.origin("saver.freq_steps"))
    d.copy("seed", o, "seed", default=1)


def _asynchrony(d: Draft, o: Options) -> None:
    """`async_training`, the bound of the lag, and the number of prompts that are generated at once."""
    names = ("rollout.max_head_offpolicyness", "max_head_offpolicyness")
    batch = "rollout.consumer_batch_size"
    concurrent = "rollout.max_concurrent_rollouts"
    size = "train_dataset.batch_size"
    lag = o.whole(*names, default=0, least=0)
    overlaps = o.flag("async_training", default=True)
    if not overlaps:
        d.drops_given(o, "async_training is false: synchronous", *names)
    if not (lag and overlaps):
        why = o.origin(*names) if overlaps else "from async_training"
        d.put("runtime.max_lag", 0, why)
        d.drops_given(o, "the run is synchronous", concurrent)
        return
    prompts = o.whole(size, batch, default=1)
    meaning = "AReaL counts its bound of the lag in these, where its examples write the batch size; here as they do"
    d.default(o, batch, 1, meaning)
    consumed = o.whole(batch, default=prompts)
    if consumed != prompts:
        d.lacks(batch, f"{consumed}, not the {prompts} prompts of a step: AReaL's bound of the lag counts in these")
    d.put("runtime.max_lag", lag, o.origin(*names))
    at_once = o.whole(concurrent, least=1) or consumed
    origin = o.origin(concurrent, batch, size)
    most = (lag + 1) * prompts
    if at_once > most and o.given(size, batch):  # not by a batch of 1 that is only the default
        origin = f"{origin}, {at_once}: no more than (max_lag + 1) x {prompts} are ever admitted"
        at_once = most
    d.put("runtime.max_concurrent_rollouts", at_once, origin)
    late, like = ("drops", "drop") if segment_wise(o) else ("trains on", "train")
    note = f"AReaL takes what is finished, the oldest first, and {late} what is beyond the bound."
    note += f" Not so here: `wait` takes the groups in the order of admission, so that none gets beyond it. `{like}` is"
    note += " AReaL's way."
    d.put("runtime.over_age", "wait", f"ours; AReaL {late} such groups: {like}", note)
    d.put("engine.kind", "local_process", "it works beside the trainer")
