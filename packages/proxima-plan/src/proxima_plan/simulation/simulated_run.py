"""A run of the real `Controller` on virtual time, with an engine, rewards and a trainer that only take time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

from proxima.config import RunConfig
from proxima.config.sections.eval_section import CheckpointConfig
from proxima.data import UserError
from proxima.engine.executor import Executor
from proxima.engine.protocol import Interrupt
from proxima.reward.base import as_reward
from proxima.rollout.collector import Pending
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.launch.generation import make_collector, training_groups
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.publisher import Publisher
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.store import RolloutRecorder
from proxima.runtime.watch.observer import Observer, Record
from proxima.runtime.watch.virtual_time import VirtualClock, run_virtually
from proxima.train.batch_builder import BatchBuilder
from proxima_plan.simulation.parts import (
    RecordsInMemory,
    TimedAdvantage,
    TimedPrompts,
    TimedRewards,
    TimedThread,
    timed_learner,
    timed_reject,
)
from proxima_plan.simulation.timed_engine import TimedEngine
from proxima_plan.simulation.times import Times


@dataclass(frozen=True, kw_only=True)
class SpeedFigures:
    """Means over the steps of a run, without evaluations and checkpoints. A lag is in policy versions, from the oldest
    token of a group to its update."""

    steps: int
    tokens_per_second: float  # of the completions that steps took, used or dropped
    steps_per_hour: float
    idle_trainer: float  # share of the steps in which the trainer waits for groups
    idle_engine: float  # share of the steps in which nothing is generated
    mean_lag: float
    max_lag: float
    evicted: int  # groups dropped because they were too far behind


def figures_of(steps: Sequence[Record]) -> SpeedFigures:
    """Compute the figures from the records of steps.

    Raises:
        UserError: there is no finished step.
    """
    if not steps:
        raise UserError("no finished step, so no speed")
    in_steps = sum(record["time/step"] for record in steps)

    def share(key: str, *stages: str) -> float:
        """Return the mean of a share, weighted by step duration; a synchronous run records `stages` instead."""
        spent = (
            record[key] * record["time/step"] if key in record else sum(record.get(stage, 0.0) for stage in stages)
            for record in steps
        )
        return float(sum(spent) / in_steps)

    used = sum(record["prompts_used"] for record in steps)
    return SpeedFigures(
        steps=len(steps),
        tokens_per_second=sum(record["tokens/generated"] for record in steps) / in_steps,
        steps_per_hour=3600 * len(steps) / in_steps,
        idle_trainer=share("idle/trainer", "time/generate", "time/score"),
        idle_engine=share("idle/engine", "time/score", "time/train", "time/publish"),
        mean_lag=sum(record["age/mean"] * record["prompts_used"] for record in steps) / max(1, used),
        max_lag=max(record["age/max"] for record in steps),
        evicted=sum(int(record.get("prompts_dropped_stale", 0)) for record in steps),
    )


def simulate_run(
    config: RunConfig, times: Times, replicas: int, slots: int, *, in_thread: bool = False
) -> list[dict[str, Any]]:
    """Simulate the whole run of a config, from its first step, and return the records of its steps. The same config and
    times give the same run.

    Args:
        replicas, slots: the engines, instead of the recipe's, of which only `interrupt` is used.
        in_thread: the engine decodes in the trainer's thread, and stops while it trains.

    Raises:
        UserError: the run ended before its last step.
    """
    clock = VirtualClock()
    interrupt: Interrupt = getattr(config.engine, "interrupt", "recompute")
    with TemporaryDirectory() as place, Journal(":memory:", clock) as journal:
        folder = RunFolder(place)

        async def run() -> list[dict[str, Any]]:
            timed = TimedEngine(times, replicas, slots, interrupt=interrupt, seed=config.seed, now=clock.now)
            thread = TimedThread(timed if in_thread else None)
            store = RecordsInMemory(journal, folder, clock)
            controller = _controller(config, times, store, timed, thread, clock)
            try:
                await controller.train()
            finally:
                controller.close()
            return store.steps

        try:
            return run_virtually(run(), clock)
        except RunEnded as end:
            raise UserError(f"the simulated run ends early: {end}") from end


def _controller(
    config: RunConfig,
    times: Times,
    store: RecordsInMemory,
    engine: TimedEngine,
    thread: TimedThread,
    clock: VirtualClock,
) -> Controller:
    """Build a controller like `runtime.launch.build.make_controller`, with parts that only take time."""
    observer, prompts = Observer(), cast(Any, TimedPrompts(times.load.prompt))
    rewards = TimedRewards(times, whole_batch=any(as_reward(reward).whole_batch for reward in config.reward))
    generator = GroupGenerator(Executor(cast(Any, engine)), rewards, training_groups(config), clock.now)
    recorder = RolloutRecorder(store, prompts, observer)
    reject = partial(thread.run, timed_reject, times, config.seed)
    collector = make_collector(config, generator, prompts, recorder, reject, Pending(), 0)
    alone = replace(config, checkpoint=CheckpointConfig())  # steps, and nothing between them
    builder = BatchBuilder(advantage=TimedAdvantage(times, thread), selection=(), seed=config.seed)
    learner = timed_learner(times, thread)
    publisher = Publisher(generator, learner, store, observer)
    return Controller(alone, collector, builder, learner, publisher, store, None, observer)
