"""The workload of `proxima train`: RL, built from a config."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from proxima.config.estimate import at_once, group_arithmetic, pruned
from proxima.config.schema import RunConfig
from proxima.model.compute_thread import ComputeThread
from proxima.model.pretrained import LoadedModel
from proxima.rollout.collector import Collector, Pending
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.launch.generation import make_collector, make_evaluations, make_generator
from proxima.runtime.launch.learning import make_batch_builder, make_learner
from proxima.runtime.launch.models import describe_run
from proxima.runtime.launch.next_policy_cache import make_next_policy
from proxima.runtime.launch.run_data import load_run_data
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.publisher import DeviceTurns, Publisher, SharedDevices
from proxima.runtime.loop.training_loop import RunServices
from proxima.runtime.placement.follower import RankModels
from proxima.runtime.resume.changes import input_hashes
from proxima.runtime.resume.restore import restore_data
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.replay import ReplayCollector, rollouts_sha
from proxima.runtime.state.store import RolloutRecorder
from proxima.runtime.state.summary import algorithm_name
from proxima.runtime.watch.observer import RunInfo
from proxima.task.prompts import PromptSource
from proxima.training.checkpoint import Checkpoint
from proxima.training.learner import Learner
from proxima.training.ranks import Ranks


class RlWorkload:
    """The work of an RL run between its start and its end; `OfflineWorkload` has the same methods for training on a
    fixed data set. It is created with its data, before weights are loaded; `notes` are warnings about the data.
    `steps` are of the whole run; `images` is the `ImageStore` of the prompts; None: they are of text alone."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.steps = config, config.train.steps
        self.data = load_run_data(config)
        self.model = replace(config.model.source(config.seed, config.placement), images=self.data.images)
        self.notes, self.images = self.data.notes, self.data.images
        self._make_learner = partial(make_learner, config, self.model, engines=self.data.engines)
        self.checkpoint: Checkpoint | None = None  # that the run resumes from
        self.pending = Pending()  # the groups and prompts that the collector held for later steps

    def hashes(self) -> dict[str, str]:
        """SHA-256 of everything that the run reads, keyed by its name in messages."""
        return input_hashes(self.config, self.data.source, self.data.held_out)

    def rewind(self, checkpoint: Checkpoint, journal: Journal) -> None:
        """Restore the data cursor, and the other state in the checkpoint except weights and optimizer."""
        self.checkpoint, self.pending = checkpoint, restore_data(self.data.source, checkpoint, journal)

    def load(self, path: str | None) -> LoadedModel:
        """The model of the config, or that of a checkpoint in `path`. Called in the compute thread."""
        return self.model.load(path)

    def make_loop(self, loaded: LoadedModel, services: RunServices) -> Controller:
        """The loop and everything that it uses."""
        config, data, store = self.config, self.data, services.store
        if self.images is not None:
            self.images.keep_in(store.folder.images)
        restored, facts = (self.checkpoint.path, self.checkpoint.facts) if self.checkpoint else (None, {})
        learner = self._make_learner(
            loaded, services.compute, ranks=store.ranks, restored=restored, log=store.folder.engine_log
        )
        services.opened.callback(learner.close)
        batch_builder = make_batch_builder(config, learner, facts.get("kl_coefficient"))
        recorder = RolloutRecorder(store, data.source, services.observer)
        computes = getattr(config.engine, "needs_weights", False)  # in this process, alongside the training
        device = learner.stack.model.device if computes else "cpu"
        generator = make_generator(config, services.compute.call(learner.stack.gathered, device), data, services)
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
        publisher = Publisher(generator, learner, services, device_turns(config.placement, generator, learner))
        return Controller(config, collector, batch_builder, learner, publisher, evaluations, services)

    def rank_models(
        self, loaded: LoadedModel, compute: ComputeThread, ranks: Ranks, checkpoint: Path | None
    ) -> RankModels:
        """Build, on the other ranks, the models that `make_loop` builds on the first, in the same order; `checkpoint`
        is the one that the run resumes from. Called in the compute thread."""
        learner = self._make_learner(loaded, compute, ranks=ranks, restored=checkpoint)
        stacks, stages = {learner.stack.name: learner.stack}, {learner.stack.name: learner.stages}
        if (critic := learner.critic) is not None:
            stacks[critic.stack.name], stages[critic.stack.name] = critic.stack, [critic.stage]
        return RankModels(stacks=stacks, stages=stages)

    def info(self, loaded: LoadedModel | None, folder: Path, finished: int) -> RunInfo:
        """The facts known at the start, or when the run resumes after `finished` steps; without a model if none is
        left."""
        config, train = self.config, self.config.train
        size = train.completions_per_prompt
        prompts, kept = pruned(train.prompts_per_step, size, config.algorithm.selection)
        step = group_arithmetic(prompts, size, kept, at_once(prompts, config.algorithm.dynamic_sampling))
        return RunInfo(
            **describe_run(config, loaded, step, train.updates_per_step * train.epochs_per_step),
            algorithm=algorithm_name(config),
            folder=folder,
            steps=train.steps,
            resumed_at=finished,
            replay_of=config.replayed,
        )

    def facts(self, journal: Journal) -> Mapping[str, Any]:
        """`algorithm` and, for a replay, `replay`, for summary.json."""
        replay = None
        if (replayed := self.config.replayed) is not None:
            replay = {"run": str(replayed), "sha256": rollouts_sha(journal.get("inputs") or {})}
        return {"algorithm": algorithm_name(self.config), "replay": replay}

    def close(self) -> None:
        """Release what was opened, whether the run began or not."""
        self.data.close()
        if not isinstance(self.data.source, PromptSource):
            self.data.source.close()


def device_turns(placement: Any, generator: GroupGenerator | None, learner: Learner) -> DeviceTurns:
    """The turns of engine and trainer; each has its own devices unless they are colocated and the engine can sleep."""
    colocated = getattr(placement, "colocate", False)
    if generator is None or not colocated or not generator.engine.capabilities.sleeps:
        return DeviceTurns()

    return SharedDevices(generator.engine, learner.stack, learner.compute)
