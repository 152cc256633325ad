"""A run of the real `Controller` on virtual time, with an engine, rewards and a trainer that only take time."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

from proxima.config.schema import RunConfig
from proxima.config.sections.eval import CheckpointConfig
from proxima.core.aggregate import TokenMean
from proxima.core.distillation import NoPolicyGradient
from proxima.core.selection.protocol import prompts_factor
from proxima.data import UserError
from proxima.data.pending import Pending
from proxima.engine.executor import Executor
from proxima.reward.base import as_reward
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.launch.rl_workload import make_collector
from proxima.runtime.loop.controller import Controller
from proxima.runtime.loop.publisher import DeviceTurns, Publisher
from proxima.runtime.loop.training_loop import RunEnded, RunServices, Stopped
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.store import RolloutRecorder
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from proxima.runtime.watch.observer import Observer, Record
from proxima.training.batch_builder import BatchBuilder
from proxima.training.learner import Learner
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima_plan.simulation.parts import (
    RecordsInMemory,
    TimedAdvantage,
    TimedPrompts,
    TimedRewards,
    TimedStack,
    TimedThread,
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
    """Compute the figures from the records of steps, at least one."""
    in_steps = sum(record["time/step"] for record in steps)

    def share(key: str, stages: Callable[[Record], float]) -> float:
        """Return the mean of a share, weighted by step duration; a synchronous run records the seconds of its `stages`
        instead."""
        spent = [record[key] * record["time/step"] if key in record else stages(record) for record in steps]
        return float(sum(spent) / in_steps)

    used = sum(record["prompts_used"] for record in steps)
    return SpeedFigures(
        steps=len(steps),
        tokens_per_second=sum(record["tokens/generated"] for record in steps) / in_steps,
        steps_per_hour=3600 * len(steps) / in_steps,
        idle_trainer=share("idle/trainer", lambda r: r.get("time/generate", 0.0) + r.get("time/score", 0.0)),
        idle_engine=share("idle/engine", lambda r: r["time/step"] - r.get("time/generate", 0.0)),
        mean_lag=sum(record["age/mean"] * record["prompts_used"] for record in steps) / max(1, used),
        max_lag=max(record["age/max"] for record in steps),
        evicted=sum(int(record.get("prompts_dropped_stale", 0)) for record in steps),
    )


def simulate_run(
    config: RunConfig, times: Times, replicas: int, slots: int, *, most: int | None = None, in_thread: bool = False
) -> list[dict[str, Any]]:
    """Simulate the run of a config from its first step, and return the records of its steps. The same config and times
    give the same run.

    Args:
        replicas, slots: the engines, instead of the recipe's, of which only `interrupt` is used.
        most: steps after which the simulation ends; None: it is that of the whole run.
        in_thread: the engine decodes in the trainer's thread, and stops while it trains.

    Raises:
        UserError: the run ended before its last step.
    """
    clock = VirtualClock()
    with TemporaryDirectory() as place, Journal(":memory:", clock) as journal:
        store = RecordsInMemory(journal, RunFolder(place), clock, most or config.train.steps)

        async def run() -> None:
            thread = TimedThread(TimedEngine(config, times, replicas, slots, clock.now), shared=in_thread)
            controller = _controller(config, store, thread)
            try:
                with suppress(Stopped):
                    await controller.train()
            finally:
                controller.collector.abandon()

        try:
            run_virtually(run(), clock)
        except RunEnded as end:
            raise UserError(f"the simulated run ends early: {end}") from end
    return store.steps


def _controller(config: RunConfig, store: RecordsInMemory, thread: TimedThread) -> Controller:
    """Build a controller like that of `RlWorkload`, with parts that only take time. Each prompt has
    one completion, which stands for all of them."""
    engine = thread.engine
    times = thread.engine.times
    factor = prompts_factor(config.algorithm.selection, config.train.completions_per_prompt)
    config = replace(  # steps, and nothing between them
        config,
        algorithm=replace(config.algorithm, selection=()),
        train=replace(config.train, prompts_per_step=factor * config.train.prompts_per_step),
        checkpoint=CheckpointConfig(),
    )
    observer = Observer()
    prompts = cast(Any, TimedPrompts(times.load.prompt))
    rewards = TimedRewards(times, whole_batch=any(as_reward(reward).whole_batch for reward in config.reward))
    spec = replace(engine.spec, completions=1, greedy_baseline=False)
    generator = GroupGenerator(Executor(cast(Any, engine)), cast(Any, rewards), spec, engine.now)
    recorder = RolloutRecorder(store, prompts, observer)
    reject = partial(thread.run, timed_reject, times, config.seed)
    collector = make_collector(config, generator, prompts, recorder, reject, Pending(), 0)
    builder = BatchBuilder(advantage=TimedAdvantage(thread), selection=(), seed=config.seed)
    learner = Learner(
        policy=cast(Any, SimpleNamespace(loaded=None, value_head=None)),
        stack=cast(Any, TimedStack(thread)),
        objective=PolicyObjective(surrogate=NoPolicyGradient(), aggregate=TokenMean()),
        compute=thread,
    )
    services = RunServices(store, thread, observer, ExitStack())
    publisher = Publisher(generator, learner, services, DeviceTurns())
    return Controller(config, collector, builder, learner, publisher, {}, services)
