"""Builds the RL loop from a config, around a learner that `learning` has built."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.engine.protocol import Engine
from proxima.rollout.collector import Collector, Pending
from proxima.runtime.launch.generation import make_collector, make_evaluation, make_generator
from proxima.runtime.launch.run_data import RunData
from proxima.runtime.launch.services import RunServices
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.publisher import DeviceTurns, Publisher
from proxima.runtime.state.store import RolloutRecorder
from proxima.task.prompts import PromptSource
from proxima.train.batch_builder import BatchBuilder
from proxima.train.learner import Learner

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig
    from proxima.train.next_policy import NextLogProbs


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state in a checkpoint other than weights, optimizer and data cursor; the defaults are those of a new run.

    Args:
        path: the checkpoint's folder.
        pending: the groups and prompts that the collector held for later steps; `next_log_probs` belongs to these.
        kl_coefficient: the coefficient of the KL penalty in the reward.
    """

    path: Path | None = None
    pending: Pending = field(default_factory=Pending)
    next_log_probs: Sequence["NextLogProbs"] = ()
    kl_coefficient: float | None = None


def make_controller(
    config: "RunConfig",
    learner: Learner,
    batch_builder: BatchBuilder,
    data: RunData,
    services: RunServices,
    restored: Restored,
    opened: ExitStack,
) -> Controller:
    """Build the loop and everything that it uses, which the loop closes. `opened` gets what is started here."""
    recorder = RolloutRecorder(services.store, data.source, services.observer)
    computes = getattr(config.engine, "needs_weights", False)  # in this process, alongside the training
    device = learner.stack.model.device if computes else "cpu"
    generator = make_generator(config, services.compute.call(learner.stack.gathered, device), data, services, opened)
    evaluation = make_evaluation(config, data, generator, services, opened)
    collector: Collector
    if not isinstance(data.source, PromptSource):
        from proxima.runtime.state.replay import ReplayCollector

        collector = ReplayCollector(data.source, generator, recorder)
    else:
        assert generator is not None
        reject = partial(learner.compute.run, batch_builder.reject)
        finished = services.store.journal.step
        collector = make_collector(config, generator, data.source, recorder, reject, restored.pending, finished)
        if config.algorithm.proximal == "next":
            from proxima.runtime.launch.next_policy_cache import make_next_policy

            log_prob = partial(learner.compute.run, learner.stack.log_prob)
            stored, player = restored.next_log_probs, generator.episodes
            playing = None if player is None else player.unfinished
            cache = make_next_policy(
                config.algorithm, generator.engine, collector.unconsumed, log_prob, stored, playing
            )
            learner = replace(learner, next_policy=cache)
    turns = None if generator is None else device_turns(config.placement, generator.engine, learner)
    return Controller(
        config,
        collector,
        batch_builder,
        learner,
        Publisher(generator, learner, services.store, services.observer, turns),
        services.store,
        evaluation,
        services.observer,
    )


def device_turns(placement: Any, engine: Engine, learner: Learner) -> DeviceTurns | None:
    """The turns of engine and trainer, if they share the devices and the engine can sleep."""
    if not getattr(placement, "colocate", False) or not engine.capabilities.sleeps:
        return None
    from proxima.runtime.loop.shared_devices import SharedDevices

    return SharedDevices(engine, learner.stack, learner.compute)
