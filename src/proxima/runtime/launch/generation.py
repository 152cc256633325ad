"""Builds generation from a config: the engine, the rewards, the collector of a step's groups, and the held-out sets."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.core.advantage import needs_baseline
from proxima.core.selection import prompts_factor
from proxima.data import Prompt
from proxima.engine.executor import Executor
from proxima.engine.protocol import Engine, EngineSetup
from proxima.evaluate.held_out import Evaluation
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread
from proxima.reward.runner import RewardRunner
from proxima.rollout.admission import Admission
from proxima.rollout.collector import BatchCollector, Pending, Refill, Reject
from proxima.rollout.generator import EpisodePlayer, GroupGenerator, GroupSpec, RolloutListener
from proxima.runtime.launch.engine_needs import build_engine
from proxima.runtime.launch.run_data import RunData
from proxima.runtime.launch.services import RunServices
from proxima.runtime.placement.placed_engine import placed_engine
from proxima.runtime.state.folder import ENVIRONMENTS_LOG
from proxima.runtime.watch.observer import evaluation_progress
from proxima.task.prompts import PromptSource

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig
    from proxima.rollout.async_collector import AsyncCollector
    from proxima.runtime.launch.episodes import AgentWorld, World


def make_rewards(config: "RunConfig | EvaluateConfig", specs: Sequence[Any], compute: ComputeThread) -> RewardRunner:
    """Build the rewards, start their workers in the background and load their models; the caller closes them."""
    runtime = config.runtime
    placement, workers, pool = getattr(config, "placement", None), runtime.reward_workers, None
    if count := getattr(placement, "reward_workers", 0):
        from proxima.runtime.placement.reward_actors import ActorPool

        workers, pool = count, ActorPool
    rewards = RewardRunner(
        specs,
        timeout=runtime.reward_timeout,
        workers=workers,
        memory_mb=runtime.reward_memory_mb,
        compute=compute,
        pool=pool,
    )
    rewards.start()
    return rewards


def player_of(
    world: "World | AgentWorld | None", engine: Engine, folder: Path | None, services: RunServices | None = None
) -> EpisodePlayer | None:
    """The player of a task's episodes, which logs to a folder and to the run's timeline; None for a task without
    episodes."""
    if world is None:
        return None
    from proxima.rollout.episodes.played import EpisodeTimes

    times = None if services is None else EpisodeTimes(services.store.activity.played)
    return world.player(engine, folder and folder / ENVIRONMENTS_LOG, times)


def make_generator(
    config: "RunConfig", policy: LoadedModel, data: RunData, services: RunServices, opened: ExitStack
) -> GroupGenerator | None:
    """Build the generator on an engine with its hooks and rewards, both closed by `opened`; None for a replay without
    held-out questions."""
    if not data.held_out and not isinstance(data.source, PromptSource):
        return None
    # A server loads the recipe's model, and receives the newest weights from this process, not from the checkpoint
    # of a resumed run: that is deleted some steps later, and a server that is restarted would look for it.
    path, spread, log = config.model.path, _spread(config, services), services.store.folder.engine_log
    setup = EngineSetup.of(policy, data.needs.max_length)
    setup = replace(setup, model_path=path, compute=services.compute, log=log, spread=spread, seed=config.seed)
    engine, notes = build_engine(placed_engine(config.engine), setup, data.needs)
    executor = engine if isinstance(engine, Executor) else Executor(engine)  # the user's spec may build one with hooks
    opened.callback(executor.close)
    for note in notes:
        services.observer.warning(note)
    rewards = make_rewards(config, config.reward, services.compute)
    opened.callback(rewards.close)
    player = player_of(data.world, executor, services.store.folder.path, services)
    return GroupGenerator(executor, rewards, training_groups(config), services.store.activity.clock.now, player)


def _spread(config: "RunConfig", services: RunServices) -> Callable[[Path, Sequence[Path]], None] | None:
    """The function that copies weights to the nodes of the other ranks; None if no servers can run there."""
    elsewhere = getattr(config.engine, "allow_remote", False) or getattr(config.placement, "engines", 0)
    if services.store.ranks.size == 1 or not elsewhere:
        return None
    from proxima.train.node_folders import NodeFolders

    return NodeFolders(services.store.ranks).send


def make_collector(
    config: "RunConfig",
    generator: GroupGenerator,
    source: PromptSource,
    listener: RolloutListener,
    reject: Reject,
    pending: Pending,
    finished: int,
) -> "BatchCollector | AsyncCollector":
    """Build the collector that fills the batches of a run that generates, by default between the updates, or
    asynchronously. It continues after `finished` steps with the `pending` groups of a checkpoint."""
    runtime, dynamic = config.runtime, config.algorithm.dynamic_sampling
    refill = None
    if dynamic is not None:
        refill = Refill(sampling=dynamic, reject=reject, max_unscored=max_unscored_steps(config))
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
    admission = Admission(
        prompts=prompts,
        concurrent=runtime.max_concurrent_rollouts or 1,
        max_lag=runtime.max_lag,
        steps=config.train.steps,
        over_age=runtime.over_age,
        retries=runtime.rollout_retries,
    )
    from proxima.rollout.async_collector import AsyncCollector

    collector = AsyncCollector(
        generator, source, admission, refill=refill, listener=listener, pending=pending, finished=finished
    )
    if isinstance(generator.engine, Executor):
        generator.engine.register_post_pause_hook(collector.engine_paused)
        generator.engine.register_post_resume_hook(collector.engine_resumed)
    return collector


def make_evaluation(
    config: "RunConfig", data: RunData, training: GroupGenerator | None, services: RunServices, opened: ExitStack
) -> Evaluation | None:
    """Build the evaluation of the held-out sets that have prompts, on the training's engine; `opened` closes a set's
    own rewards. None without `eval.task`."""
    if training is None:
        return None
    progress = evaluation_progress(services.observer)
    sets: dict[str, tuple[Sequence[Prompt], GroupGenerator]] = {}
    for held_out in data.held_out:
        spec, groups = held_out.spec, held_out.groups
        rewards = make_rewards(config, spec.reward, services.compute) if spec.reward else training.rewards
        if spec.reward:
            opened.callback(rewards.close)
        if held_out.prompts:
            player = player_of(held_out.world, training.engine, services.store.folder.path, services)
            sets[spec.name] = held_out.prompts, GroupGenerator(training.engine, rewards, groups, training.now, player)
    if "" not in sets:
        return None
    others = {name: Evaluation(*parts, progress) for name, parts in sets.items() if name}
    return Evaluation(*sets[""], progress, others)


def training_groups(config: "RunConfig") -> GroupSpec:
    """The settings with which training groups are generated."""
    return GroupSpec(
        sampling=config.sampling,
        completions=config.train.completions_per_prompt,
        seed=config.seed,
        greedy_baseline=needs_baseline(config.algorithm.advantage),
    )


def max_unscored_steps(config: "RunConfig") -> int:
    """The number of steps without a score after which the run ends; 0 if it does not train on scores."""
    return config.runtime.max_unscored_steps if config.algorithm.trains_on_rewards else 0
