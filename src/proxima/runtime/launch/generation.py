"""Builds generation from a config: the engine, the rewards, the collector of a step's groups, and the held-out sets."""

from collections.abc import Sequence
from typing import Any

from proxima.config.schema import RunConfig
from proxima.core.advantage.protocol import needs_baseline
from proxima.core.selection.protocol import prompts_factor
from proxima.engine.executor import Executor
from proxima.evaluation.held_out import Evaluation
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel
from proxima.reward.runner import RewardRunner
from proxima.rollout.async_collector import AsyncCollector
from proxima.rollout.collector import BatchCollector, Pending, Refill, Reject
from proxima.rollout.episodes.settings import ENVIRONMENTS_LOG
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.rollout.prompt_limits import InFlightLimit
from proxima.runtime.launch.run_data import RunData
from proxima.runtime.loop.training_loop import RunServices
from proxima.runtime.placement.ray_cluster import ActorPool
from proxima.task.prompts import PromptSource


def make_rewards(config: RunConfig, specs: Sequence[Any], compute: ComputeThread) -> RewardRunner:
    """Build the rewards, start their workers in the background and load their models; the caller closes them."""
    how: dict[str, Any] = {}
    if count := getattr(config.placement, "reward_workers", 0):
        how = {"workers": count, "pool": ActorPool}
    rewards = config.runtime.rewards(specs, compute=compute, **how)
    rewards.start()
    return rewards


def make_generator(
    config: RunConfig, policy: LoadedModel, data: RunData, services: RunServices
) -> GroupGenerator | None:
    """Build the generator on an engine with its hooks and rewards; None for a replay without held-out questions."""
    if (choice := data.engines.get("engine")) is None:
        return None
    # A server loads the recipe's model, and receives the newest weights from this process, not from the checkpoint
    # of a resumed run: that is deleted some steps later, and a server that is restarted would look for it.
    store = services.store
    how: Any = {"compute": services.compute, "log": store.folder.engine_log, "seed": config.seed}
    engine, notes = choice.build(lambda: policy, **how)
    executor = engine if isinstance(engine, Executor) else Executor(engine)  # the user's spec may build one with hooks
    services.opened.callback(executor.close)
    for note in notes:
        services.observer.warning(note)
    rewards = make_rewards(config, config.reward, services.compute)
    services.opened.callback(rewards.close)
    player = None
    if data.world is not None:
        player = data.world.player(executor, store.folder.path / ENVIRONMENTS_LOG, store.activity.played)
    return GroupGenerator(executor, rewards, training_groups(config), store.activity.clock.now, player)


def make_collector(
    config: RunConfig,
    generator: GroupGenerator,
    source: PromptSource,
    listener: RolloutListener,
    reject: Reject,
    pending: Pending,
    finished: int,
) -> BatchCollector | AsyncCollector:
    """Build the collector that fills the batches of a run that generates, by default between the updates, or
    asynchronously. It continues after `finished` steps with the `pending` groups of a checkpoint."""
    runtime, dynamic = config.runtime, config.algorithm.dynamic_sampling
    refill = None
    if dynamic is not None:
        refill = Refill(sampling=dynamic, reject=reject, max_unscored=config.max_unscored_steps)
    prompts = config.train.prompts_per_step * prompts_factor(config.algorithm.selection, generator.spec.completions)
    if not runtime.overlaps:
        return BatchCollector(
            generator,
            source,
            prompts=prompts,
            refill=refill,
            max_lag=runtime.max_lag,
            listener=listener,
            carried=pending.groups,
        )

    limit = InFlightLimit(
        prompts=prompts,
        concurrent=runtime.max_concurrent_rollouts or 1,
        max_lag=runtime.max_lag,
        steps=config.train.steps,
        over_age=runtime.over_age,
    )
    collector = AsyncCollector(
        generator, source, limit, refill=refill, listener=listener, pending=pending, finished=finished
    )
    if isinstance(generator.engine, Executor):
        generator.engine.register_post_pause_hook(collector.engine_paused)
        generator.engine.register_post_resume_hook(collector.engine_resumed)
    return collector


def make_evaluations(
    config: RunConfig, data: RunData, training: GroupGenerator | None, services: RunServices
) -> dict[str, Evaluation]:
    """Build the evaluations of the held-out sets that have prompts, on the training's engine, by name. The first is
    that of `eval.task`, whose name is empty; without it there are none."""
    evaluations: dict[str, Evaluation] = {}
    asked = {held_out.name: held_out for held_out in data.held_out if held_out.prompts}
    if training is None or "" not in asked:
        return evaluations
    store, progress = services.store, services.observer.progress
    log, told = store.folder.path / ENVIRONMENTS_LOG, store.activity.played
    for name, held_out in asked.items():
        rewards = training.rewards
        if held_out.rewards:
            rewards = make_rewards(config, held_out.rewards, services.compute)
            services.opened.callback(rewards.close)
        evaluations[name] = held_out.evaluation(training.engine, rewards, training.now, progress, log, told)
    return evaluations


def training_groups(config: RunConfig) -> GroupSpec:
    """The settings with which training groups are generated."""
    return GroupSpec(
        sampling=config.sampling,
        completions=config.train.completions_per_prompt,
        seed=config.seed,
        greedy_baseline=needs_baseline(config.algorithm.advantage),
    )
