"""Builds the learner from a config: the loss, the forward passes before it, and its batches."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxima.config.schema import RunConfig
from proxima.config.sections.algorithm_section import RECOMPUTED
from proxima.config.sections.sampling_section import replays_sampling_masks
from proxima.core import PENALTIES
from proxima.core.distillation import NoPolicyGradient
from proxima.engine.choice import EngineChoice
from proxima.model.compute_thread import ComputeThread
from proxima.model.model_source import ModelSource
from proxima.model.pretrained import LoadedModel
from proxima.reward.base import as_reward
from proxima.runtime.launch.critic_weights import make_critic
from proxima.runtime.launch.forward_passes import make_stages
from proxima.runtime.launch.models import make_stack
from proxima.training.batch_builder import BatchBuilder
from proxima.training.critic import ValueObjective
from proxima.training.forward_stage import ForwardStage
from proxima.training.learner import Learner
from proxima.training.objectives.policy_objective import DistillationTerm, PolicyObjective, ProximalSource
from proxima.training.objectives.preference_objective import PreferenceObjective
from proxima.training.objectives.protocol import Objective
from proxima.training.objectives.router_balance import RouterBalance
from proxima.training.ranks import ALONE, Ranks


def make_learner(
    config: RunConfig,
    source: ModelSource,
    loaded: LoadedModel,
    compute: ComputeThread,
    *,
    restored: Path | None = None,
    engines: Mapping[str, EngineChoice],
    log: Path | None = None,
    ranks: Ranks = ALONE,
) -> Learner:
    """Build the learner of a model that is loaded from `source`: the weights, their optimizer and loss, the critic, and
    the forward stages. `engines` run some of the stages, and write to `log`. `restored` is the checkpoint that the run
    resumes from. All ranks build their models in this order."""
    critic, head = None, None
    if config.critic is not None:
        critic, head = compute.call(make_critic, config.critic, config.train, source, loaded, restored, ranks)
    replays = config.algorithm.routing_replay != "off"
    policy = source.policy(loaded, head.layer if head else None, replays_routes=replays)
    passes: list[ForwardStage] = []
    if needs_stages(config):
        passes += make_stages(config, source, policy, compute, engines, log, leads=ranks.rank == 0)
    if head is not None:
        passes.append(head.stage(policy))
    train, waits = config.train, config.value_warmup
    planned = train.updates_per_step * train.epochs_per_step
    return Learner(
        policy=policy,
        stack=make_stack(train, policy, train.updates - waits * planned, ranks),
        objective=make_objective(config, None if head is None else head.objective),
        stages=passes,
        critic=critic,
        updates=planned,
        epochs=train.epochs_per_step,
        max_epoch_kl=None if train.target_kl is None else train.target_kl * train.target_kl_factor,
        guard=config.algorithm.mismatch,
        known_mismatch=getattr(config.engine, "mismatch", ""),
        compute=compute,
    )


def make_objective(config: RunConfig, value: ValueObjective | None = None) -> PolicyObjective | PreferenceObjective:
    """The objective of a config; `value` is that of a value head."""
    algorithm, mismatch = config.algorithm, config.algorithm.mismatch
    if algorithm.preference is not None:
        return PreferenceObjective(terms=[algorithm.preference], measure_mismatch=mismatch.measure)
    proximal: ProximalSource = "loglinear" if algorithm.proximal == "loglinear" else "given"
    if algorithm.proximal in RECOMPUTED and not config.recomputes_proximal:
        proximal = "first_forward"
    penalties = algorithm.penalties
    if algorithm.entropy_bonus > 0:
        penalties.append(PENALTIES["entropy"](algorithm.entropy_bonus))
    surrogate = algorithm.surrogate
    if surrogate is None:
        surrogate = NoPolicyGradient()
    teacher = None
    if (of := algorithm.distillation) is not None:
        teacher = DistillationTerm(divergence=of.divergence, aggregate=of.aggregate, coefficient=of.coefficient)
    terms: list[Objective[Any]] = [] if value is None else [value]
    if algorithm.router_balance is not None:
        terms.append(RouterBalance(coefficient=algorithm.router_balance.coefficient))
    return PolicyObjective(
        surrogate=surrogate,
        aggregate=algorithm.aggregate,
        corrections=algorithm.correction,
        penalties=penalties,
        proximal=proximal,
        next_missing=algorithm.next_missing if algorithm.proximal == "next" else None,
        skip_zero_advantage=algorithm.skip_zero_advantage,
        distillation=teacher,
        terms=terms,
        replays_routes=algorithm.routing_replay == "rollout"
        or (algorithm.routing_replay == "recompute" and config.recomputes_proximal),
        # A guard that rejects measures the mismatch before the update.
        measure_mismatch=mismatch.measure and mismatch.on_mismatch != "reject",
    )


def needs_stages(config: RunConfig) -> bool:
    """True if loss or reward read a forward pass before the update, of a recomputed, frozen or other policy."""
    algorithm = config.algorithm
    frozen = algorithm.needs_reference or algorithm.distillation is not None
    return frozen or config.recomputes_proximal or "score_variance" in algorithm.advantage.needs


def make_batch_builder(config: RunConfig, learner: Learner, kl_coefficient: float | None = None) -> BatchBuilder:
    """Build the batch builder from the slots that act before the update; `kl_coefficient` comes from a checkpoint."""
    algorithm, train = config.algorithm, config.train
    reward_kl = algorithm.reward_kl
    if reward_kl is not None and kl_coefficient is not None:
        reward_kl = replace(reward_kl, coefficient=kl_coefficient)
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
        rewards=[as_reward(reward).label for reward in config.reward],
        fill=learner.fill,
        reward_kl=reward_kl,
        value_warmup=config.value_warmup,
        unscored=not config.algorithm.trains_on_rewards and config.critic is None,  # a critic learns from scores
        turn_weight=sum(
            reward.weight for reward in map(as_reward, config.reward) if getattr(reward, "kind", "") == "environment"
        ),
    )
