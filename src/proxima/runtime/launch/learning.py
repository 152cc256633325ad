"""Builds the learner from a config: the optimizer, the loss, the batches, the critic, and the forward passes before the
update, of recomputed, frozen and other policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from proxima.config.describe import kind_of
from proxima.config.schema import RunConfig
from proxima.config.sections.algorithm import RECOMPUTED, DistillationConfig
from proxima.config.sections.critic import HeadCritic, ModelCritic
from proxima.config.sections.sampling import replays_sampling_masks
from proxima.config.sections.train import OptimizationConfig, TrainConfig
from proxima.core import PENALTIES
from proxima.core.distillation import NoPolicyGradient
from proxima.core.hold import DRIFT
from proxima.data import FieldError, renamed
from proxima.data.flow import Prompt
from proxima.engine.engine_selection import EngineSelection
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import close_engine
from proxima.model.compute_thread import ComputeThread
from proxima.model.model_source import ModelSource
from proxima.model.packed_model import PackedModel
from proxima.model.parallel.shard import auxiliary_sharding
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima.model.scalar_model import make_value_head
from proxima.reward import REWARDS
from proxima.reward.base import as_reward
from proxima.runtime.launch.run_data import REFERENCE, TEACHER
from proxima.task.mix import TaskSource, source_of, sources_of
from proxima.training.batch_builder import BatchBuilder
from proxima.training.checkpoint import CRITIC, VALUE_HEAD
from proxima.training.critic import Critic, ValueHead, ValueObjective, ValueStage
from proxima.training.forward_stage import EngineStage, ForwardStage, LogProbStage, ScoreVarianceStage, TeacherStage
from proxima.training.learner import HeldBounds, Learner
from proxima.training.objectives.echo import Echo
from proxima.training.objectives.policy_objective import DistillationTerm, PolicyObjective, ProximalSource
from proxima.training.objectives.preference_objective import PreferenceObjective
from proxima.training.objectives.protocol import Objective
from proxima.training.objectives.router_balance import RouterBalance
from proxima.training.optimizer import Schedule
from proxima.training.ranks import ALONE, Ranks
from proxima.training.stack import POLICY, TrainStack

TEACHER_PATH = "algorithm.distillation.path"


def make_learner(
    config: RunConfig,
    source: ModelSource,
    loaded: LoadedModel,
    compute: ComputeThread,
    *,
    restored: Path | None = None,
    engines: Mapping[str, EngineSelection],
    log: Path | None = None,
    ranks: Ranks = ALONE,
) -> Learner:
    """Build the learner of a model that is loaded from `source`: the weights, their optimizer and loss, the critic, and
    the forward stages. `engines` run some of the stages, and write to `log`. `restored` is the checkpoint that the run
    resumes from. All ranks build their models in this order."""
    critic: Critic | None = None
    head: ValueHead | None = None
    if config.critic is not None:
        critic, head = compute.call(make_critic, config.critic, config.train, source, loaded, restored, ranks)
    replays = config.algorithm.routing_replay != "off"
    value_layer = None if head is None else head.layer
    policy = source.policy(loaded, value_layer, replays_routes=replays)
    passes: list[ForwardStage] = []
    if needs_stages(config):
        passes += make_stages(config, source, policy, compute, engines, log, leads=ranks.rank == 0)
    if head is not None:
        passes.append(head.stage(policy))
    train = config.train
    planned = train.updates_per_step * train.epochs_per_step
    updates = train.updates - config.value_warmup * planned
    max_epoch_kl = None
    if train.target_kl is not None:
        max_epoch_kl = train.target_kl * train.target_kl_factor
    held = None
    if config.algorithm.hold is not None:
        held = HeldBounds(config.algorithm.hold)
    return Learner(
        policy=policy,
        stack=make_stack(train, policy, updates, ranks),
        objective=make_objective(config, None if head is None else head.objective),
        stages=passes,
        critic=critic,
        updates=planned,
        epochs=train.epochs_per_step,
        max_epoch_kl=max_epoch_kl,
        held=held,
        guard=config.algorithm.mismatch,
        known_mismatch=config.engine.mismatch if isinstance(config.engine, Local) else "",
        compute=compute,
    )


def make_stack(
    train: OptimizationConfig, model: PackedModel, updates: int, ranks: Ranks = ALONE, name: str = POLICY
) -> TrainStack:
    """Build the optimizer, micro-batches, and schedule over the `updates` of the run."""
    warmup = train.warmup_of(updates)
    schedule = Schedule(train.schedule, total_updates=updates, warmup=warmup, final_ratio=train.final_lr_ratio)
    return TrainStack(
        model,
        optimizer=train.optimizer,
        schedule=schedule,
        max_grad_norm=train.max_grad_norm,
        on_zero_gradient=train.on_zero_gradient,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        ranks=ranks,
        name=name,
    )


def make_objective(config: RunConfig, value: ValueObjective | None = None) -> PolicyObjective | PreferenceObjective:
    """The objective of a config; `value` is that of a value head."""
    algorithm = config.algorithm
    mismatch = config.algorithm.mismatch
    if algorithm.preference is not None:
        return PreferenceObjective(terms=[algorithm.preference], measure_mismatch=mismatch.measure)
    proximal: ProximalSource = "given"
    if algorithm.proximal == "loglinear":
        proximal = "loglinear"
    if algorithm.proximal in RECOMPUTED and not config.recomputes_proximal:
        proximal = "first_forward"
    penalties = algorithm.penalties
    if algorithm.entropy_bonus > 0:
        penalties.append(PENALTIES["entropy"](algorithm.entropy_bonus))
    surrogate = algorithm.surrogate
    if surrogate is None:
        surrogate = NoPolicyGradient()
    teacher = None
    of = algorithm.distillation
    if of is not None:
        teacher = DistillationTerm(divergence=of.divergence, aggregate=of.aggregate, coefficient=of.coefficient)
    terms = list[Objective[Any]]()
    if value is not None:
        terms.append(value)
    if algorithm.router_balance is not None:
        terms.append(RouterBalance(coefficient=algorithm.router_balance.coefficient))
    if algorithm.echo is not None:
        terms.append(Echo())
    replays_routes = algorithm.routing_replay == "rollout"
    if algorithm.routing_replay == "recompute":
        replays_routes = config.recomputes_proximal
    return PolicyObjective(
        surrogate=surrogate,
        aggregate=algorithm.aggregate,
        corrections=algorithm.correction,
        penalties=penalties,
        proximal=proximal,
        next_missing=algorithm.next_missing if algorithm.proximal == "next" else None,
        chain=algorithm.chain,
        skip_zero_advantage=algorithm.skip_zero_advantage,
        distillation=teacher,
        terms=terms,
        replays_routes=replays_routes,
        measures_drift=algorithm.hold is not None and algorithm.hold.metric == DRIFT,
        # A guard that rejects measures the mismatch before the update.
        measure_mismatch=mismatch.measure and mismatch.on_mismatch != "reject",
    )


def make_batch_builder(config: RunConfig, learner: Learner, kl_coefficient: float | None = None) -> BatchBuilder:
    """Build the batch builder from the slots that act before the update; `kl_coefficient` comes from a checkpoint."""
    algorithm = config.algorithm
    train = config.train
    reward_kl = algorithm.reward_kl
    if reward_kl is not None and kl_coefficient is not None:
        reward_kl = replace(reward_kl, coefficient=kl_coefficient)
    labels = [as_reward(reward).label for reward in training_rewards(config)]
    sources = sources_of(config.task)
    return BatchBuilder(
        advantage=algorithm.advantage,
        selection=algorithm.selection,
        behavior=algorithm.behavior,
        reads_behavior=algorithm.reads_behavior,
        needs_sampling_mask=replays_sampling_masks(config.sampling, config.algorithm),
        replays_routes=algorithm.routing_replay == "rollout",
        updates=train.updates_per_step,
        epochs=train.epochs_per_step,
        seed=config.seed,
        rewards=list(dict.fromkeys(labels)),
        fill=learner.fill,
        reward_kl=reward_kl,
        value_warmup=config.value_warmup,
        unscored=not config.algorithm.trains_on_rewards and config.critic is None,  # a critic learns from scores
        echo={} if algorithm.echo is None else algorithm.echo.roles,
        taught=taught_prompts(sources),
        turn_weight=partial(turn_weight, sources, config.reward),
    )


def taught_prompts(sources: Sequence[TaskSource]) -> Callable[[Prompt], bool] | None:
    """True for a prompt whose completions learn from the teacher alone; None where no source says so, and all
    completions have the whole loss of the run."""
    if all(source.learns_from != "teacher" for source in sources):
        return None
    return lambda prompt: source_of(sources, prompt.metadata).learns_from == "teacher"


def training_rewards(config: RunConfig) -> list[Any]:
    """The rewards that score training completions: those of the run, unless every source has its own, and those of the
    sources."""
    sources = sources_of(config.task)
    rewards = list[Any]()
    if not all(source.reward for source in sources):
        rewards.extend(config.reward)
    for source in sources:
        rewards.extend(source.reward)
    return rewards


def turn_weight(sources: Sequence[TaskSource], rewards: Sequence[Any], prompt: Prompt) -> float:
    """The weight of the environment's reward in the score of a prompt's completions."""
    specs = source_of(sources, prompt.metadata).reward or rewards
    return sum(reward.weight for reward in map(as_reward, specs) if REWARDS.holds(reward, "environment"))


# ---- the critic ------------------------------------------------------------------------------------------------------


def make_critic(
    spec: HeadCritic | ModelCritic,
    train: TrainConfig,
    source: ModelSource,
    policy: LoadedModel,
    restored: Path | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Critic | None, ValueHead | None]:
    """Build a critic, a model or a head on the trunk of `policy`, which is loaded from `source`. Called in the compute
    thread. `restored` is the checkpoint that the run resumes from.

    Raises:
        UserError: `critic.path` can't be loaded.
    """
    if isinstance(spec, ModelCritic):
        return _critic_model(spec, train, source, restored, ranks), None
    return None, _value_head(spec, policy, source.seed, restored)


def _value_head(spec: HeadCritic, policy: LoadedModel, seed: int, restored: Path | None) -> ValueHead:
    objective = ValueObjective(loss=spec.loss, aggregate=spec.aggregate, coefficient=spec.coefficient)
    layer = make_value_head(policy.model, spec.head_std, seed)
    if restored is not None:
        with torch.no_grad():
            layer.weight.copy_(load_file(restored / VALUE_HEAD)["weight"])
    return ValueHead(layer=layer, objective=objective, bootstrap=spec.bootstrap)


def _critic_model(
    spec: ModelCritic, train: TrainConfig, source: ModelSource, restored: Path | None, ranks: Ranks
) -> Critic:
    path = source.path
    revision = source.revision
    if spec.path:
        path = spec.path
        revision = spec.revision
    spread = auxiliary_sharding(source.sharding, path, revision)
    critic_source = replace(source, path=path, revision=revision, lora=None, sharding=spread)
    saved = None if restored is None else str(restored / CRITIC)
    with renamed("model.path", "critic.path"):
        model = source.scalar(critic_source.load_scalar(saved, head_std=spec.head_std))
    train = spec.training(train)
    planned = train.updates_per_step * train.epochs_per_step
    return Critic(
        stack=make_stack(train, model, train.steps * planned, ranks, CRITIC),
        objective=ValueObjective(loss=spec.loss, aggregate=spec.aggregate),
        stage=ValueStage(model, spec.bootstrap),
        updates=train.updates_per_step,
        epochs=train.epochs_per_step,
        seed=source.seed,
    )


# ---- the forward passes before the update ----------------------------------------------------------------------------


def needs_stages(config: RunConfig) -> bool:
    """True if loss or reward read a forward pass before the update, of a recomputed, frozen or other policy."""
    algorithm = config.algorithm
    frozen = algorithm.needs_reference or algorithm.distillation is not None
    return frozen or config.recomputes_proximal or "score_variance" in algorithm.advantage.needs


def make_stages(
    config: RunConfig,
    source: ModelSource,
    policy: Policy,
    compute: ComputeThread,
    engines: Mapping[str, EngineSelection],
    log: Path | None,
    *,
    leads: bool,
) -> list[ForwardStage]:
    """Build the forward stages that loss and reward need before the update. `engines` run some of them, and write to
    `log`; only the rank that `leads` queries these engines."""
    stages: list[ForwardStage] = []
    if config.recomputes_proximal:
        records = config.algorithm.routing_replay == "recompute"
        stages.append(LogProbStage("proximal_log_prob", policy, records_routes=records))
    if "score_variance" in config.algorithm.advantage.needs:
        stages.append(ScoreVarianceStage(policy))
    algorithm = config.algorithm
    distillation = algorithm.distillation
    if algorithm.needs_reference and algorithm.reference_engine is not None:
        if leads:
            stages.append(make_engine_stage(source, engines[REFERENCE], compute, log))
    elif algorithm.needs_reference and source.lora is not None:
        stages.append(LogProbStage("reference_log_prob", policy, adapter=False))
    elif algorithm.needs_reference:
        frozen = compute.call(source.load)
        frozen.model.requires_grad_(False)
        stages.append(LogProbStage("reference_log_prob", source.policy(frozen)))
    if distillation is not None and distillation.engine is not None:
        if leads:
            stages.append(make_engine_stage(source, engines[TEACHER], compute, log))
    elif distillation is not None:
        stages.append(make_teacher_stage(source, distillation, policy.loaded, compute))
    return stages


def make_teacher_stage(
    source: ModelSource, distillation: DistillationConfig, student: LoadedModel, compute: ComputeThread
) -> ForwardStage:
    """Load the weights of a teacher beside those of the student, which come from `source`, and build its stage. Token
    ids that one of the models lacks are padding of the other's output layer.

    Raises:
        FieldError: the weights can't be loaded.
    """
    divergence = distillation.divergence
    path = distillation.path
    spread = auxiliary_sharding(source.sharding, path)
    teacher_source = replace(source, path=path, revision=None, lora=None, sharding=spread, attention="auto")
    with renamed("model.path", TEACHER_PATH):
        teacher = compute.call(teacher_source.load)
    teacher.model.requires_grad_(False)
    policy = replace(teacher_source, gradient_checkpointing=False).policy(teacher)
    vocabulary = min(int(each.model.config.get_text_config().vocab_size) for each in (student, teacher))
    return TeacherStage(policy=policy, top_k=divergence.top_k, top_k_of=divergence.top_k_of, vocabulary=vocabulary)


def make_engine_stage(
    source: ModelSource, choice: EngineSelection, compute: ComputeThread, log: Path | None
) -> ForwardStage:
    """Build the engine of the reference or the teacher, and the stage that queries it. Its weights are loaded as those
    of the policy, which come from `source`, without an adapter. `log` is a file for the output of processes that the
    engine starts.

    Raises:
        FieldError: the engine does not score, or its weights can't be loaded.
    """
    model = choice.needs.model
    path = choice.path
    if path == TEACHER:
        field = TEACHER_PATH
        column = "teacher_log_prob"
    else:
        field = "model.path"
        column = "reference_log_prob"
    model_source = replace(source, path=model.path, revision=model.revision, lora=None, sharding=None)
    with renamed("model.path", field):
        engine, _ = choice.build(model_source.load, compute=compute, log=log, seed=source.seed)
    if not engine.capabilities.score:
        close_engine(engine)
        remedy = f"set {path}=null, or use one that does"
        raise FieldError(path, kind_of(choice.spec), "does not score tokens", remedy=remedy)
    return EngineStage(column=column, engine=engine)
