"""From a config to the objects of a run; those without weights are in `run_data`, the critic in `build_critic`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proxima import __version__
from proxima.config.algorithm_checks import trains_on_rewards, unsupported_by_loop
from proxima.config.critic_schema import ModelCritic
from proxima.config.describe import kind_of
from proxima.config.sampling_checks import replays_sampling_masks
from proxima.core.advantage import needs_baseline
from proxima.core.distillation import NoPolicyGradient
from proxima.core.penalty import EntropyBonus
from proxima.core.selection import prompts_factor
from proxima.data import FieldError
from proxima.engine.executor import Executor
from proxima.engine.protocol import Engine, EngineSetup
from proxima.evaluate.held_out import Evaluation
from proxima.model import LoadedModel, PackedModel, Policy
from proxima.model.compute_thread import ComputeThread
from proxima.model.model_source import ModelSource
from proxima.reward.base import as_reward
from proxima.reward.runner import RewardRunner
from proxima.rollout.admission import Admission
from proxima.rollout.async_collector import AsyncCollector
from proxima.rollout.collector import BatchCollector, Collector, Pending, Reject
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.runtime.launch.engine_needs import REFERENCE, TEACHER, build_engine, evaluation_sampling, rollout_needs
from proxima.runtime.launch.run_data import RunData
from proxima.runtime.launch.teacher import make_distillation, make_engine_stage, make_teacher_stage
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.training_loop import Plan
from proxima.runtime.state.next_policy_file import NEXT_POLICY, write_next_policy
from proxima.runtime.state.replay import StoredRollouts
from proxima.runtime.state.store import RolloutRecorder, RunStore
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer, evaluation_progress
from proxima.task.prompts import PromptSource
from proxima.train import (
    ForwardStage,
    LogProbStage,
    PolicyObjective,
    PreferenceObjective,
    Schedule,
    ScoreVarianceStage,
    TrainStack,
    ValueStage,
)
from proxima.train.batch_builder import BatchBuilder
from proxima.train.critic import Critic, ValueHead
from proxima.train.learner import Learner
from proxima.train.next_policy import LogProbs, NextLogProbs, NextPolicy, Unconsumed
from proxima.train.objectives import ProximalSource

if TYPE_CHECKING:
    from proxima.config.algorithm_schema import AlgorithmConfig
    from proxima.config.offline_schema import OfflineConfig
    from proxima.config.schema import EvaluateConfig, ModelConfig, OptimizationConfig, RunConfig

RECOMPUTED = ("recompute", "next")  # the centre is the policy that the update starts from
StageFactory = Callable[[Policy], Sequence[ForwardStage]]  # called in the compute thread


def load_model(config: "RunConfig | EvaluateConfig | OfflineConfig", path: str | None = None) -> LoadedModel:
    """The weights at `config.model.path`, or at another path of the same architecture; with LoRA that model, and the
    adapter of `model.lora`, or at that other path."""
    return model_source(config.model, config.seed).load(path)


def make_policy(model: "ModelConfig", loaded: LoadedModel, value_head: nn.Linear | None = None) -> Policy:
    """The policy over loaded weights."""
    return model_source(model).policy(loaded, value_head)


def model_source(model: "ModelConfig", seed: int = 0) -> ModelSource:
    """The model of a config; `seed` is for new adapters and heads."""
    return ModelSource(
        path=model.path,
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        lora=model.lora,
        seed=seed,
        attention=model.attention,
        share_prompt=model.share_prompt,
        compute_dtype=model.compute_dtype,
        gradient_checkpointing=model.gradient_checkpointing,
        log_prob_chunk=model.log_prob_chunk,
    )


def make_rewards(config: "RunConfig | EvaluateConfig", specs: Sequence[Any], compute: ComputeThread) -> RewardRunner:
    """The rewards, whose workers start in the background and whose models are loaded; the caller closes them."""
    runtime = config.runtime
    rewards = RewardRunner(
        specs,
        timeout=runtime.reward_timeout,
        workers=runtime.reward_workers,
        memory_mb=runtime.reward_memory_mb,
        compute=compute,
    )
    rewards.start()
    return rewards


def make_plan(config: "RunConfig | OfflineConfig", steps: int, **more: Any) -> Plan:
    """When the loop does what, in a run of so many steps."""
    return Plan(
        steps=steps,
        seed=config.seed,
        evaluate_every=config.eval.every,
        evaluate_before=config.eval.before,
        evaluate_after=config.eval.after,
        stop_after=config.eval.stop_after,
        checkpoint_every=config.checkpoint.every,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        stall_seconds=config.runtime.stall_seconds,
        **more,
    )


def describe_model(config: "RunConfig | OfflineConfig", loaded: LoadedModel) -> dict[str, Any]:
    """What `RunInfo` says of the model and the machine, whatever is trained."""
    return {
        "version": __version__,
        "model": Path(config.model.path).name,
        "parameters": loaded.parameters,
        "adapter": loaded.adapter_parameters,
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "dtype": config.model.compute_dtype,
        "seed": config.seed,
        "tokens_per_micro_batch": config.train.tokens_per_micro_batch,
    }


def make_stack(train: "OptimizationConfig", model: PackedModel, updates: int) -> TrainStack:
    """Optimizer, micro-batches, and the schedule over the `updates` of the run."""
    return TrainStack(
        model,
        optimizer=train.optimizer,
        schedule=Schedule(
            train.schedule, total_updates=updates, warmup=train.warmup_of(updates), final_ratio=train.final_lr_ratio
        ),
        max_grad_norm=train.max_grad_norm,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
    )


def make_objective(config: "RunConfig") -> PolicyObjective | PreferenceObjective:
    """The loss."""
    algorithm, mismatch = config.algorithm, config.algorithm.mismatch
    if algorithm.preference is not None:
        return PreferenceObjective(terms=[algorithm.preference], measure_mismatch=mismatch.measure)
    proximal: ProximalSource = "loglinear" if algorithm.proximal == "loglinear" else "given"
    if algorithm.proximal in RECOMPUTED and not recomputes_proximal(config):
        proximal = "first_forward"
    in_loss = algorithm.reference_kl is not None and algorithm.reference_kl.coefficient > 0
    penalties = [algorithm.reference_kl] if in_loss else []
    if algorithm.entropy_bonus > 0:
        penalties.append(EntropyBonus(algorithm.entropy_bonus))
    return PolicyObjective(
        surrogate=NoPolicyGradient() if algorithm.surrogate is None else algorithm.surrogate,
        aggregate=algorithm.aggregate,
        corrections=algorithm.correction,
        penalties=penalties,
        proximal=proximal,
        next_missing=algorithm.next_missing if algorithm.proximal == "next" else None,
        skip_zero_advantage=algorithm.skip_zero_advantage,
        distillation=make_distillation(config),
        # A guard that rejects has measured before the update.
        measure={"entropy", "mismatch"} if mismatch.measure and mismatch.on_mismatch != "reject" else {"entropy"},
    )


def recomputes_proximal(config: "RunConfig") -> bool:
    """True when the proximal log-probs have a forward pass of their own. The first forward of the update gives them
    where there is one update a step and no reward that reads them before."""
    several = config.train.updates_per_step * config.train.epochs_per_step > 1
    return config.algorithm.proximal in RECOMPUTED and (several or config.algorithm.reward_kl is not None)


def make_stages(
    config: "RunConfig", policy: Policy, compute: ComputeThread, log: Path | None = None
) -> list[ForwardStage]:
    """The forward passes that loss and reward need before the update; `log` is for engines that run some of them."""
    stages: list[ForwardStage] = []
    if recomputes_proximal(config):
        stages.append(LogProbStage("proximal_log_prob", policy))
    if "score_variance" in config.algorithm.advantage.needs:
        stages.append(ScoreVarianceStage(policy))
    algorithm, loaded = config.algorithm, policy.loaded
    if algorithm.needs_reference and algorithm.reference_engine is not None:
        stages.append(make_engine_stage(config, REFERENCE, loaded, compute, log))
    elif algorithm.needs_reference and config.model.lora is not None:
        stages.append(LogProbStage("reference_log_prob", policy, adapter=False))
    elif algorithm.needs_reference:
        frozen = compute.call(load_model, config)
        frozen.model.requires_grad_(False)
        stages.append(LogProbStage("reference_log_prob", make_policy(config.model, frozen)))
    if (distillation := algorithm.distillation) is not None and distillation.engine is not None:
        stages.append(make_engine_stage(config, TEACHER, loaded, compute, log))
    elif distillation is not None:
        stages.append(make_teacher_stage(config, distillation, compute))
    return stages


def make_batch_builder(config: "RunConfig", learner: Learner, kl_coefficient: float | None = None) -> BatchBuilder:
    """The slots that act before the update; `kl_coefficient` is that of a checkpoint.

    Raises:
        FieldError: nothing supplies what the advantage needs.
    """
    algorithm, train = config.algorithm, config.train
    supplied = {stage.column for stage in learner.stages} | ({"value"} if learner.critic is not None else set())
    if missing := unsupported_by_loop(algorithm.advantage, supplied):
        remedy = "set critic, give train() a forward stage that fills it, or use another advantage"
        raise FieldError("algorithm.advantage", kind_of(algorithm.advantage), missing, remedy=remedy)
    return BatchBuilder(
        advantage=algorithm.advantage,
        selection=algorithm.selection,
        behavior=algorithm.behavior,
        reads_behavior=algorithm.reads_behavior,
        needs_sampling_mask=replays_sampling_masks(config),
        updates=train.updates_per_step,
        epochs=train.epochs_per_step,
        seed=config.seed,
        rewards=[as_reward(reward).label for reward in config.reward],
        fill=learner.fill,
        reward_kl=algorithm.reward_kl,
        kl_coefficient=kl_coefficient,
        value_warmup=value_warmup(config),
        unscored=not trains_on_rewards(config) and config.critic is None,  # a critic learns from scores
    )


def value_warmup(config: "RunConfig") -> int:
    """The first steps, in which the policy waits for the critic."""
    return config.critic.value_warmup_steps if isinstance(config.critic, ModelCritic) else 0


def make_learner(
    config: "RunConfig",
    loaded: LoadedModel,
    compute: ComputeThread,
    stages: StageFactory | None = None,
    critic: Critic | ValueHead | None = None,
    log: Path | None = None,
) -> Learner:
    """The weights, their optimizer and loss, and the forward stages; `stages` adds some."""
    head = critic if isinstance(critic, ValueHead) else None
    policy = make_policy(config.model, loaded, head.layer if head else None)
    train, objective, waits = config.train, make_objective(config), value_warmup(config)
    if head is not None and isinstance(objective, PolicyObjective):
        objective = replace(objective, value=head.objective)
    planned = train.updates_per_step * train.epochs_per_step
    return Learner(
        policy=policy,
        stack=make_stack(train, policy, train.updates - waits * planned),
        objective=objective,
        stages=[
            *make_stages(config, policy, compute, log),
            *([] if head is None else [ValueStage(policy, head.bootstrap)]),
            *(compute.call(stages, policy) if stages else ()),
        ],
        critic=critic if isinstance(critic, Critic) else None,
        updates=planned,
        epochs=train.epochs_per_step,
        max_epoch_kl=None if train.target_kl is None else train.target_kl * train.target_kl_factor,
        guard=config.algorithm.mismatch,
        compute=compute,
    )


def make_controller(
    config: "RunConfig",
    loaded: LoadedModel,
    data: RunData,
    store: RunStore,
    compute: ComputeThread,
    *,
    observer: Observer,
    clock: Clock,
    pending: Pending | None = None,
    kl_coefficient: float | None = None,
    next_log_probs: Sequence[NextLogProbs] = (),
    stages: StageFactory | None = None,
    critic: Critic | ValueHead | None = None,
) -> Controller:
    """Everything that the loop touches. A checkpoint kept `pending`, what the collector held for later steps, with the
    `next_log_probs` of these, and the `kl_coefficient` of the reward."""
    learner = make_learner(config, loaded, compute, stages, critic, log := store.folder.engine_log)
    batch_builder = make_batch_builder(config, learner, kl_coefficient)
    recorder = RolloutRecorder(store, data.source, observer)
    generator = evaluation = None
    if data.held_out or not isinstance(data.source, StoredRollouts):
        setup = EngineSetup.of(loaded, max_length=data.max_length, compute=compute, log=log)
        # A server loads the recipe's model, and gets the newest weights from here: the checkpoint that a resumed run
        # has them from is deleted some steps later, and a server that is restarted would look for it.
        setup = replace(setup, model_path=config.model.path)
        built, notes = build_engine(config.engine, setup, rollout_needs(config, loaded.tokenizer, data.max_length))
        for note in notes:
            observer.warning(note)
        engine = built if isinstance(built, Executor) else Executor(built)  # one with hooks of the user's spec
        rewards = make_rewards(config, config.reward, compute)
        generator = GroupGenerator(engine, rewards, training_groups(config), clock.now)
        evaluation = make_evaluation(config, data, generator, compute, observer)
    collector: Collector
    if isinstance(data.source, StoredRollouts):
        collector = data.source
        collector.generator, collector.listener = generator, recorder
    else:
        assert generator is not None
        reject = partial(compute.run, batch_builder.reject)
        made = (pending or Pending(), store.journal.step)
        collector = make_collector(config, generator, data.source, recorder, reject, *made)
        if config.algorithm.proximal == "next":
            log_prob = partial(compute.run, learner.stack.log_prob)
            cache = make_next_policy(config.algorithm, generator.engine, collector.unconsumed, log_prob, next_log_probs)
            learner = replace(learner, run_stages=[cache])
    metric, unscored = config.eval.metric, max_unscored_steps(config)
    plan = make_plan(config, config.train.steps, metric=metric, max_unscored_steps=unscored)
    return Controller(plan, collector, batch_builder, learner, store, evaluation, observer, clock)


def max_unscored_steps(config: "RunConfig") -> int:
    """Steps without a score after which the run ends; 0 where it does not train on scores."""
    return config.runtime.max_unscored_steps if trains_on_rewards(config) else 0


def make_collector(
    config: "RunConfig",
    generator: GroupGenerator,
    source: PromptSource,
    listener: RolloutListener,
    reject: Reject,
    pending: Pending,
    finished: int,
) -> Collector:
    """What fills the batches of a run that generates: asynchronously or, by default, between the updates; after
    `finished` steps, with what a checkpoint kept."""
    runtime, factor = config.runtime, prompts_factor(config.algorithm.selection, generator.spec.completions)
    prompts, refill = config.train.prompts_per_step * factor, config.algorithm.dynamic_sampling
    common: dict[str, Any] = {"reject": reject, "refill": refill, "listener": listener}
    collector: BatchCollector | AsyncCollector
    if not runtime.overlaps:
        common |= {"prompts": prompts, "max_lag": runtime.max_lag, "carried": pending.groups}
        collector = BatchCollector(generator, source, **common)
        collector.max_unscored = max_unscored_steps(config)
        return collector
    admission = Admission(
        prompts=prompts,
        concurrent=runtime.max_concurrent_rollouts or 1,
        max_lag=runtime.max_lag,
        steps=config.train.steps,
        over_age=runtime.over_age,
        retries=runtime.rollout_retries,
    )
    common |= {"pending": pending, "finished": finished}
    collector = AsyncCollector(generator, source, admission, **common)
    collector.max_unscored = max_unscored_steps(config)
    if isinstance(generator.engine, Executor):
        generator.engine.register_post_pause_hook(collector.engine_paused)
        generator.engine.register_post_resume_hook(collector.engine_resumed)
    return collector


def make_evaluation(
    config: "RunConfig", data: RunData, training: GroupGenerator, compute: ComputeThread, observer: Observer
) -> Evaluation | None:
    """The held-out sets with any prompt, on the engine of the training; None without `eval.task`."""
    sets: dict[str, Evaluation] = {}
    for one in data.held_out:
        spec = one.spec
        sampling = evaluation_sampling(config.sampling, spec)
        groups = GroupSpec(sampling=sampling, completions=spec.samples, seed=config.seed)
        rewards = make_rewards(config, spec.reward, compute) if spec.reward else training.rewards
        if one.prompts:
            generator = GroupGenerator(training.engine, rewards, groups, training.now)
            sets[spec.name] = Evaluation(one.prompts, generator, evaluation_progress(observer))
    main = sets.pop("", None)
    if main is not None:
        main.others = sets
    return main


def training_groups(config: "RunConfig") -> GroupSpec:
    """How the training groups are generated."""
    return GroupSpec(
        sampling=config.sampling,
        completions=config.train.completions_per_prompt,
        seed=config.seed,
        greedy_baseline=needs_baseline(config.algorithm.advantage),
    )


def make_next_policy(
    algorithm: "AlgorithmConfig",
    engine: Engine,
    unconsumed: Unconsumed,
    trainer: LogProbs,
    entries: Iterable[NextLogProbs],
) -> NextPolicy:
    """The cache of a run, its hook registered.

    Raises:
        FieldError: the engine can't say what is in flight, or can't score.
    """
    assert isinstance(engine, Executor)
    by_engine = algorithm.next_from == "engine"
    if not engine.capabilities.in_flight:
        remedy = "use local or local_process, or algorithm.proximal=recompute"
        raise FieldError("engine", type(engine.engine).__name__, "can't say what is in flight", remedy=remedy)
    if by_engine and not engine.capabilities.score:
        remedy = "set algorithm.next_from=trainer"
        raise FieldError("engine", type(engine.engine).__name__, "can't score given tokens", remedy=remedy)
    cache = NextPolicy(engine, unconsumed, None if by_engine else trainer, entries, (NEXT_POLICY, write_next_policy))
    if by_engine:
        engine.register_pre_pause_hook(cache.before_pause)
    return cache
