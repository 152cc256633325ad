"""Batches and optimizers of verl's actor and critic."""

import math

from proxima.config.tree import FILL_IN
from proxima_peers.convert import common
from proxima_peers.convert.adapter import LoraNames, lora
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
AGGREGATES = {mode: mode.replace("seq-", "sequence-").replace("-", "_") for mode in MODES}


def lora_names(prefix: str) -> LoraNames:
    """The options of the adapter of the model with this prefix."""
    names = ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path")
    rank, alpha, targets, path = (prefix + name for name in names)
    return LoraNames(rank=rank, alpha=alpha, targets=targets, path=path, default_alpha=16)


def lora_by_rank(d: Draft, o: Options, names: LoraNames) -> bool:
    """Put `model.lora` if the rank is above 0; return True if it is."""
    on = o.whole(names.rank, default=0) > 0
    if on:
        lora(d, o, names)
    else:
        d.drops_given(o, "lora_rank is 0: off", names.rank, names.alpha, names.targets, names.path)
    return bool(on)


def batch(d: Draft, o: Options) -> None:
    """Prompts, completions, updates."""
    prompts = o.whole("data.train_batch_size", default=1024, least=1)
    mini = o.whole(ACTOR + "ppo_mini_batch_size", default=256, least=1)
    d.put("train.prompts_per_step", prompts, o.origin("data.train_batch_size"))
    d.put("train.completions_per_prompt", o.whole(ROLLOUT + "n", default=1), o.origin(ROLLOUT + "n"))
    note = f"{prompts} prompts in mini batches of {mini}: verl counts both in prompts"
    common.updates(d, math.ceil(prompts / mini), o.origin(ACTOR + "ppo_mini_batch_size"), note)
    d.copy("train.epochs_per_step", o, ACTOR + "ppo_epochs", default=1)
    _micro_batches(d, o, ACTOR)
    if o.flag(ACTOR + "use_dynamic_bsz"):
        d.copy("train.tokens_per_micro_batch", o, ACTOR + "ppo_max_token_len_per_gpu", default=16384)


def _micro_batches(d: Draft, o: Options, prefix: str) -> None:
    """`ppo_micro_batch_size`: up to verl 0.7, actor and critic use the mean of the micro batches' means."""
    later = o.given("model_engine", "trainer.use_v1", "trainer.use_legacy_worker_impl")
    aggregate = "algorithm.aggregate.kind" if prefix == ACTOR else "critic.aggregate.kind"
    tokens = d.entries[aggregate].value == "token_mean"
    dynamic = o.flag(prefix + "use_dynamic_bsz", default=o.flag(ACTOR + "use_dynamic_bsz"))
    for name in (prefix + "ppo_micro_batch_size", prefix + "ppo_micro_batch_size_per_gpu"):
        if not o.given(name) or dynamic:
            d.drops_given(o, "use_dynamic_bsz is on", name)
        elif later or not tokens:
            if later:
                why = "the mean is that of the mini batch"
            else:
                why = "sequences count alike in each micro batch"
            d.drops(name, why)
        else:
            why = "up to verl 0.7 the token mean is that of each micro batch, in which short completions weigh more"
            d.lacks(name, f"{o.get(name)}: {why}; here, as since 0.8, that of the mini batch")


def training(d: Draft, o: Options) -> None:
    """Optimizer, schedule, steps, checkpoints."""
    prefix = ACTOR + "optim."
    _adamw(d, o, "train", prefix, lr=1e-6)
    total = o.whole("trainer.total_training_steps", prefix + "total_training_steps", default=0)
    origin = o.origin("trainer.total_training_steps", prefix + "total_training_steps")
    common.steps(d, o, total, origin, "", "trainer.total_epochs", "verl counts trainer.total_epochs, 30 by default")
    made = math.prod(d.entries[f"train.{name}"].value for name in ("updates_per_step", "epochs_per_step"))
    common.warmup(d, *_warmup(o, prefix, made), made)
    d.copy("train.max_grad_norm", o, ACTOR + "grad_clip", prefix + "clip_grad", default=1.0)
    d.put("checkpoint.every", max(0, o.whole("trainer.save_freq", default=-1)), o.origin("trainer.save_freq"))
    d.copy("checkpoint.keep_last", o, "trainer.max_actor_ckpt_to_keep", whole=True)
    d.copy("seed", o, "data.seed", ACTOR + "data_loader_seed")


def _adamw(d: Draft, o: Options, path: str, prefix: str, lr: float) -> None:
    """AdamW and the shape of its schedule, for `train` or `critic`."""
    names = {name: (prefix + name,) for name in ("lr", "weight_decay", "eps")}
    common.optimizer(d, o, names, {"lr": lr, "weight_decay": 0.01}, path)
    common.betas(d, o, prefix + "betas", path)
    spellings = (prefix + "lr_scheduler_type", prefix + "lr_decay_style", prefix + "warmup_style")
    common.schedule(d, o, *spellings, default="constant", path=path)
    lowest, shares = ((prefix + a, prefix + b) for a, b in (("min_lr", "lr_min"), ("min_lr_ratio", "min_lr_factor")))
    common.lowest_rate(d, o, lowest, shares, path)


def _warmup(o: Options, prefix: str, made: int) -> tuple[tuple[int, str], tuple[float, str]]:
    """The warm-up in updates, and as a share of the run, each with its origin."""
    steps = o.whole(prefix + "lr_warmup_steps", default=-1)
    share = o.sourced(prefix + "lr_warmup_steps_ratio", default=0.0)
    counts = ""
    if made > 1 and steps > 0:
        counts = f", which counts steps: {made} updates in each"
    return (steps * made, o.origin(prefix + "lr_warmup_steps") + counts), share


def gae_critic(d: Draft, o: Options) -> None:
    """The critic of `gae`; with another estimator, its options have no effect."""
    enabled = o.get("critic.enable")
    if d.entries["algorithm.advantage.kind"].value != "gae":
        why = "no advantage here reads its values: a critic would only cost time"
        d.drops_given(o, why, *(name for name in o.flat if name.startswith("critic.")), "trainer.critic_warmup")
        return
    if enabled is not None and not o.flag("critic.enable", default=True):
        d.lacks("critic.enable", "false, with gae: verl has no values then and stops; here the critic is on")
    d.spec("critic", "model", o.origin("algorithm.adv_estimator"), "the critic of gae")
    model = "critic.model.path"
    if o.get(model) is None:
        d.ask("critic.path", None, f"the critic's model, {model}; null is a copy of the policy with a new head")
    else:
        d.put("critic.path", str(o.get(model)), o.origin(model))
    d.put("critic.head_std", 0.02, "transformers draws a new head with initializer_range, mostly .02")
    d.put("critic.bootstrap", False, "verl gives a truncated completion no value after its end")
    waits = o.whole("trainer.critic_warmup", default=0)
    why = ""
    if waits > 0:
        why = "verl's first step is number 1: its policy waits for one step less"
    d.put("critic.value_warmup_steps", max(0, waits - 1), o.origin("trainer.critic_warmup"), why)
    d.put("critic.loss.epsilon", *o.sourced("critic.cliprange_value", default=0.5))
    _critic_aggregate(d, o)
    prompts = d.entries["train.prompts_per_step"].value
    if o.given("critic.ppo_mini_batch_size"):
        mini = o.whole("critic.ppo_mini_batch_size", default=256, least=1)
        common.updates(d, math.ceil(prompts / mini), o.origin("critic.ppo_mini_batch_size"), path="critic")
    d.copy("critic.epochs_per_step", o, "critic.ppo_epochs", whole=True)
    if o.flag("critic.use_dynamic_bsz", default=o.flag(ACTOR + "use_dynamic_bsz")):
        d.copy("critic.tokens_per_micro_batch", o, "critic.ppo_max_token_len_per_gpu", default=32768)
    else:
        d.drops_given(o, "use_dynamic_bsz is off", "critic.ppo_max_token_len_per_gpu")
    _micro_batches(d, o, "critic.")
    _adamw(d, o, "critic", "critic.optim.", lr=1e-5)
    d.copy("critic.max_grad_norm", o, "critic.grad_clip", "critic.optim.clip_grad", default=1.0)
    if "critic.final_lr_ratio" not in d.entries:
        d.put("critic.final_lr_ratio", 0.0, "verl's default of critic.optim.min_lr_ratio")
    _critic_warmup(d, o)


def _critic_aggregate(d: Draft, o: Options) -> None:
    """`critic.loss_agg_mode`, by default the actor's."""
    names = ("critic.loss_agg_mode", ACTOR + "loss_agg_mode")
    written = o.choice(AGGREGATES, *names, default="token-mean")
    d.spec("critic.aggregate", AGGREGATES[written], o.origin(*names))
    factors = ("critic.loss_scale_factor", ACTOR + "loss_scale_factor")
    if written == "seq-mean-token-sum-norm":
        lengths = ("data.max_response_length", ROLLOUT + "response_length")
        longest = o.whole(*lengths, default=512)
        scale = o.number(*factors)
        if scale is None:
            horizon = (longest, o.origin(*lengths))
        else:
            horizon = (scale, o.origin(*factors))
        d.put("critic.aggregate.horizon", *horizon)
    else:
        d.drops_given(o, "verl reads it for seq-mean-token-sum-norm only", factors[0])


def _critic_warmup(d: Draft, o: Options) -> None:
    """`critic.warmup_steps`; a share of the run needs the number of its steps."""
    per_step = [f"{name}_per_step" for name in ("updates", "epochs")]
    made = math.prod(d.entries.get(f"critic.{name}", d.entries[f"train.{name}"]).value for name in per_step)
    (fixed, origin), (share, of_share) = _warmup(o, "critic.optim.", made)
    steps = d.entries["train.steps"]
    if fixed <= 0 and share > 0 and steps.origin.startswith(FILL_IN):
        d.ask("critic.warmup_steps", 0, f"{share:g} of the updates of the run ({of_share}), {made} a step")
    elif fixed <= 0 and share > 0:
        total = steps.value * made
        d.put("critic.warmup_steps", math.floor(share * total + 1e-9), f"{of_share}, times the {total} updates")
    else:
        d.put("critic.warmup_steps", max(0, fixed), origin)


GPUS = ("trainer.n_gpus_per_node", "trainer.nnodes")


def placement(d: Draft, o: Options) -> None:
    """The GPUs of a node times the nodes: as many ranks on Ray, whose devices the servers share, as verl's do."""
    if not o.given(*GPUS):
        return
    each = o.whole(GPUS[0], default=8, least=1)
    nodes = o.whole(GPUS[1], default=1, least=1)
    ranks = each * nodes
    if ranks == 1:
        d.drops_given(o, "one GPU, as without a placement", *GPUS)
        return
    origin = f"from {GPUS[0]} * {GPUS[1]}"
    d.spec("placement", "ray", origin, "Started on a Ray cluster, as verl is; placement=local trains in one process.")
    d.put("placement.ranks", ranks, origin)
    parallel = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    devices = o.whole(parallel, default=1, least=1)
    if "engine.serve.replicas" in d.entries and ranks % devices == 0:
        if devices > 1:
            origin += f", over {parallel}"
        d.put("placement.engines", ranks // devices, origin)
        d.put("placement.colocate", True, "verl's servers have the trainer's GPUs")
