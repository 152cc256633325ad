"""The workload of `proxima train`, RL, built from a config: the engine, the rewards, the collector of a step's groups,
the held-out sets, and the loop that uses them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from proxima.config.batch_arithmetic import group_arithmetic, prompts_and_kept, prompts_at_once
from proxima.config.describe import setting
from proxima.config.outcomes import AUTO, Outcome, attention_outcome, decoder_outcome, unanswered
from proxima.config.schema import RunConfig
from proxima.config.sections.algorithm import AlgorithmConfig
from proxima.config.sections.placement import RayPlacement
from proxima.core.advantage.protocol import needs_baseline
from proxima.core.selection.dropping import Prune
from proxima.core.selection.protocol import prompts_factor
from proxima.core.selection.stopping import StopRule
from proxima.data import FieldError
from proxima.data.pending import Pending
from proxima.engine.engine_selection import computes_here
from proxima.engine.executor import Executor
from proxima.evaluation.held_out import Evaluation
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel
from proxima.model.proof import proof_of
from proxima.reward.runner import RewardRunner
from proxima.rollout.async_collector import AsyncCollector
from proxima.rollout.collector import BatchCollector, Collector, Refill, Reject
from proxima.rollout.episodes.played import EpisodePlayer
from proxima.rollout.episodes.settings import ENVIRONMENTS_LOG
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.rollout.prompt_limits import InFlightLimit
from proxima.rollout.sources import player_by_source, rewards_by_source, sampling_by_source
from proxima.runtime.launch.learning import make_batch_builder, make_learner
from proxima.runtime.launch.run_data import RunData, load_run_data
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.publisher import DeviceTurns, Publisher, SharedDevices
from proxima.runtime.loop.training_loop import RunServices
from proxima.runtime.placement.follower import RankModels
from proxima.runtime.placement.ray_cluster import ActorPool
from proxima.runtime.resume.changes import input_hashes
from proxima.runtime.resume.restore import restore_data
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.pending_files import read_next_policy, write_next_policy
from proxima.runtime.state.replay import ReplayCollector, rollouts_sha
from proxima.runtime.state.store import RolloutRecorder
from proxima.runtime.state.summary import algorithm_name, run_info
from proxima.runtime.watch.observer import RunInfo
from proxima.task.mix import sources_of
from proxima.task.prompts import PromptSource
from proxima.training.checkpoint import NEXT_POLICY, Checkpoint
from proxima.training.learner import BOUND_FACTOR, Learner
from proxima.training.next_policy import NextPolicy
from proxima.training.ranks import Ranks


class RlWorkload:
    """The `Workload` of RL. `images` is the `ImageStore` of the prompts; None: they are of text alone."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.steps = config.train.steps
        self.chosen: list[Outcome] = []
        self.data = load_run_data(config)
        self.chosen += self.data.chosen
        source = config.model.source(config.seed, config.placement)
        self.model = replace(source, images=self.data.images, lends_memory=lends_memory(config))
        self.notes = self.data.notes
        self.images = self.data.images
        self._make_learner = partial(make_learner, config, self.model, engines=self.data.engines)
        self.checkpoint: Checkpoint | None = None  # that the run resumes from
        self.pending = Pending()  # the groups and prompts that the collector held for later steps

    @property
    def has_held_out(self) -> bool:
        return bool(self.data.held_out)

    def hashes(self) -> dict[str, str]:
        return input_hashes(self.config, self.data.source, self.data.held_out)

    def rewind(self, checkpoint: Checkpoint, journal: Journal) -> None:
        self.checkpoint = checkpoint
        self.pending = restore_data(self.data.source, checkpoint, journal)

    def load(self, path: str | None) -> LoadedModel:
        return self.model.load(path)

    def make_loop(self, loaded: LoadedModel, services: RunServices) -> Controller:
        config = self.config
        data = self.data
        store = services.store
        if self.images is not None:
            self.images.keep_in(store.folder.images)
        restored: Path | None = None
        facts: Mapping[str, Any] = {}
        if self.checkpoint is not None:
            restored = self.checkpoint.path
            facts = self.checkpoint.facts
        log = store.folder.engine_log
        learner = self._make_learner(loaded, services.compute, ranks=store.ranks, restored=restored, log=log)
        services.opened.callback(learner.close)
        if config.model.attention == AUTO:
            model = learner.stack.model
            proof = proof_of(model.model)
            self.chosen.append(attention_outcome(config.model, proof, model.attention, model.device))
        if setting(config.engine, "decoder") == AUTO and data.engines.get("engine") is not None:
            self.chosen.append(decoder_outcome(proof_of(loaded.model), images=self.images is not None))
        if learner.held is not None and BOUND_FACTOR in facts:
            held = replace(learner.held, factor=facts[BOUND_FACTOR])
            learner = replace(learner, held=held)
        batch_builder = make_batch_builder(config, learner, facts.get("kl_coefficient"))
        recorder = RolloutRecorder(store, data.source, services.observer)
        # an engine in this process computes alongside the training
        device = learner.stack.model.device if computes_here(config.engine) else "cpu"
        load_weights = partial(services.compute.call, learner.stack.gathered, device)  # a server never calls it
        generator = make_generator(config, load_weights, data, services)
        evaluations = make_evaluations(config, data, generator, services)
        collector: Collector
        if not isinstance(data.source, PromptSource):
            collector = ReplayCollector(data.source, generator, recorder)
        else:
            assert generator is not None
            reject = partial(learner.compute.run, batch_builder.reject)
            collector = make_collector(
                config, generator, data.source, recorder, reject, self.pending, store.journal.step
            )
            if config.algorithm.proximal == "next":
                cache = make_next_policy(config.algorithm, generator, collector, learner, restored)
                learner = replace(learner, next_policy=cache)
        services.opened.callback(collector.abandon)  # before the engine is closed
        turns = device_turns(config.placement, generator, learner)
        publisher = Publisher(generator, learner, services, turns)
        return Controller(config, collector, batch_builder, learner, publisher, evaluations, services)

    def rank_models(
        self, loaded: LoadedModel, compute: ComputeThread, ranks: Ranks, checkpoint: Path | None
    ) -> RankModels:
        """Build, on the other ranks, the models that `make_loop` builds on the first, in the same order; `checkpoint`
        is the one that the run resumes from. Called in the compute thread."""
        learner = self._make_learner(loaded, compute, ranks=ranks, restored=checkpoint)
        stacks = {learner.stack.name: learner.stack}
        stages = {learner.stack.name: learner.stages}
        critic = learner.critic
        if critic is not None:
            stacks[critic.stack.name] = critic.stack
            stages[critic.stack.name] = [critic.stage]
        return RankModels(stacks=stacks, stages=stages)

    def info(self, loaded: LoadedModel | None, folder: Path, finished: int) -> RunInfo:
        config = self.config
        train = self.config.train
        size = train.completions_per_prompt
        prompts, kept = prompts_and_kept(train.prompts_per_step, size, config.algorithm.selection)
        at_once = prompts_at_once(prompts, config.algorithm.dynamic_sampling)
        step = group_arithmetic(prompts, size, kept, at_once)
        return run_info(
            config,
            loaded,
            folder,
            algorithm=algorithm_name(config),
            step=step,
            updates=train.updates_per_step * train.epochs_per_step,
            steps=train.steps,
            finished=finished,
            rows=self.data.rows,
            replay_of=config.replayed,
            chosen=[*self.chosen, *unanswered(config, self.chosen)],
        )

    def facts(self, journal: Journal) -> Mapping[str, Any]:
        """`algorithm` and, for a replay, `replay`, for summary.json."""
        replay = None
        replayed = self.config.replayed
        if replayed is not None:
            replay = {"run": str(replayed), "sha256": rollouts_sha(journal.get("inputs") or {})}
        return {"algorithm": algorithm_name(self.config), "replay": replay}

    def close(self) -> None:
        """Release what was opened, whether the run began or not."""
        self.data.close()
        if not isinstance(self.data.source, PromptSource):
            self.data.source.close()


# ---- the parts of its loop -------------------------------------------------------------------------------------------


def lends_memory(config: RunConfig) -> bool:
    """True if servers read new weights from the memory of the ranks."""
    transfer = setting(config.engine, "transfer")
    return transfer == "ipc" or (transfer == AUTO and bool(setting(config.placement, "colocate")))


def make_generator(
    config: RunConfig, load_weights: Callable[[], LoadedModel], data: RunData, services: RunServices
) -> GroupGenerator | None:
    """Build the generator on an engine with its hooks and rewards; None for a replay without held-out questions."""
    choice = data.engines.get("engine")
    if choice is None:
        return None
    # A server loads the recipe's model, and receives the newest weights from this process, not from the checkpoint
    # of a resumed run: that is deleted some steps later, and a server that is restarted would look for it.
    store = services.store
    log = store.folder.engine_log
    engine, notes = choice.build(load_weights, compute=services.compute, log=log, seed=config.seed)
    executor = engine if isinstance(engine, Executor) else Executor(engine)  # the user's spec may build one with hooks
    services.opened.callback(executor.close)
    for note in notes:
        services.observer.warning(note)
    make = partial(make_rewards, config, compute=services.compute, folder=store.folder.path)
    rewards = rewards_by_source(data.sources, config.reward, make)
    services.opened.callback(rewards.close)
    log = store.folder.path / ENVIRONMENTS_LOG
    on_played = store.activity.played

    def make_player(path: str) -> EpisodePlayer | None:
        return data.worlds[path].player(executor, log, on_played)

    player = player_by_source(data.sources, executor, make_player, on_played)
    now = store.activity.clock.now
    return GroupGenerator(executor, rewards, training_groups(config), now, player, stop_rule(config.algorithm))


def stop_rule(algorithm: AlgorithmConfig) -> StopRule | None:
    """By which completions are stopped; None: all are finished."""
    for spec in algorithm.selection:
        if isinstance(spec, Prune) and spec.stop and spec.reward_range is not None:
            low, high = spec.reward_range
            return StopRule(spec, algorithm.advantage.centre, low, high, spec.stop_chance)
    return None


def training_groups(config: RunConfig) -> GroupSpec:
    """The settings with which training groups are generated."""
    return GroupSpec(
        sampling=config.sampling,
        completions=config.train.completions_per_prompt,
        seed=config.seed,
        greedy_baseline=needs_baseline(config.algorithm.advantage),
        sampling_by_prompt=sampling_by_source(sources_of(config.task), config.sampling),
    )


def make_rewards(config: RunConfig, specs: Sequence[Any], compute: ComputeThread, folder: Path) -> RewardRunner:
    """Build the rewards, which may keep what they need in the run's folder, start their workers in the background and
    load their models; the caller closes them."""
    placement = config.placement
    if isinstance(placement, RayPlacement) and placement.reward_workers:
        rewards = config.runtime.rewards(specs, compute=compute, workers=placement.reward_workers, pool=ActorPool)
    else:
        rewards = config.runtime.rewards(specs, compute=compute)
    rewards.keep_in(folder)
    rewards.start()
    return rewards


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
    runtime = config.runtime
    dynamic = config.algorithm.dynamic_sampling
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
    sets = {held_out.name: held_out for held_out in data.held_out if held_out.prompts}
    if training is None or "" not in sets:
        return evaluations
    store = services.store
    progress = services.observer.progress
    log = store.folder.path / ENVIRONMENTS_LOG
    on_played = store.activity.played
    for name, held_out in sets.items():
        rewards = training.rewards
        sources_have_own = any(source.reward for source in (*held_out.sources, *data.sources))
        if held_out.rewards or sources_have_own:
            make = partial(make_rewards, config, compute=services.compute, folder=store.folder.path)
            rewards = rewards_by_source(held_out.sources, held_out.rewards or config.reward, make)
            services.opened.callback(rewards.close)
        evaluations[name] = held_out.evaluation(training.engine, rewards, training.now, progress, log, on_played)
    return evaluations


def make_next_policy(
    algorithm: AlgorithmConfig, generator: GroupGenerator, collector: Collector, learner: Learner, restored: Path | None
) -> NextPolicy:
    """Build the cache of the next policy's log-probs, for `algorithm.proximal: next`, and register
    its hook; `restored` is the checkpoint that the run resumes from.

    Raises:
        FieldError: the engine can't report completions in flight, or can't score.
    """
    engine = generator.engine
    by_engine = algorithm.next_from == "engine"
    assert isinstance(engine, Executor)
    if not engine.capabilities.in_flight:
        remedy = "use local or local_process, or algorithm.proximal=recompute"
        raise FieldError("engine", type(engine.engine).__name__, "doesn't report the requests in flight", remedy=remedy)
    if by_engine and not engine.capabilities.score:
        remedy = "set algorithm.next_from=trainer"
        raise FieldError("engine", type(engine.engine).__name__, "can't score given tokens", remedy=remedy)
    trainer = None
    if not by_engine:
        trainer = partial(learner.compute.run, learner.stack.log_prob)
    entries = () if restored is None else read_next_policy(restored / NEXT_POLICY)
    episodes = generator.episodes
    playing = None if episodes is None else episodes.unfinished
    file = NEXT_POLICY, write_next_policy
    cache = NextPolicy(engine, collector.unconsumed, trainer, entries, file, playing, algorithm.chain)
    if by_engine:
        engine.register_pre_pause_hook(cache.before_pause)
    return cache


def device_turns(placement: object, generator: GroupGenerator | None, learner: Learner) -> DeviceTurns:
    """The turns of engine and trainer; devices are separate unless they are colocated and the engine can sleep."""
    colocated = isinstance(placement, RayPlacement) and placement.colocate
    if generator is None or not colocated or not generator.engine.capabilities.sleeps:
        return DeviceTurns()
    return SharedDevices(generator.engine, learner.stack, learner.compute)
