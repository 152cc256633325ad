"""A run of the real `Controller` on virtual time, with an engine, rewards and a trainer that only take time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

from proxima.config import RunConfig
from proxima.config.describe import kind_of
from proxima.data import UserError
from proxima.engine.decoder import padded_rows
from proxima.engine.executor import Executor
from proxima.engine.local import Local
from proxima.engine.local_process import LocalProcess
from proxima.lab.simulate.timed_engine import Fleet, TimedEngine
from proxima.lab.simulate.timed_parts import (
    RecordsInMemory,
    TimedAdvantage,
    TimedEpisodes,
    TimedEvaluation,
    TimedPrompts,
    TimedRewards,
    TimedThread,
    timed_learner,
    timed_reject,
)
from proxima.lab.simulate.times import Times
from proxima.reward.base import as_reward
from proxima.rollout.collector import Pending
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.launch.build import make_plan
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


@dataclass(frozen=True, kw_only=True)
class SpeedFigures:
    """Means over the steps of a run. A lag is in policy versions, from the oldest token of a group to its update."""

    tokens_per_second: float  # of the completions that steps took, used or dropped
    steps_per_hour: float  # evaluations and checkpoints between the steps included
    idle_trainer: float  # share of the steps in which the trainer waits for groups
    idle_engine: float  # share of the steps in which nothing is generated
    mean_lag: float
    max_lag: float
    evicted: int  # groups dropped because they were too far behind


def figures_of(records: Sequence[Record]) -> SpeedFigures:
    """Compute the figures from the records of metrics.jsonl.

    Raises:
        UserError: there is no finished step.
    """
    steps = [record for record in records if record["kind"] == "train"]
    if not steps:
        raise UserError("no finished step, so no speed")
    seconds = steps[-1]["time"] - steps[0]["time"] + steps[0]["time/step"]
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
        tokens_per_second=sum(record["tokens/generated"] for record in steps) / seconds,
        steps_per_hour=3600 * len(steps) / seconds,
        idle_trainer=share("idle/trainer", "time/generate", "time/score"),
        idle_engine=share("idle/engine", "time/score", "time/train", "time/publish"),
        mean_lag=sum(record["age/mean"] * record["prompts_used"] for record in steps) / max(1, used),
        max_lag=max(record["age/max"] for record in steps),
        evicted=sum(int(record.get("prompts_dropped_stale", 0)) for record in steps),
    )


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The metrics.jsonl records of a simulated run, and their summary. In seconds since its start: the changes in the
    number of running completions, and the intervals in which the trainer worked and the engine received weights."""

    records: list[dict[str, Any]]
    figures: SpeedFigures
    running: list[tuple[float, int]]
    trained: list[tuple[float, float]]
    published: list[tuple[float, float]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of the training steps."""
        return [record for record in self.records if record["kind"] == "train"]


def simulate_run(config: RunConfig, times: Times, fleet: Fleet | None = None) -> SimulatedRun:
    """Simulate the whole run of a config, from its first step. The same config and times give the same run.

    Args:
        fleet: replaces the recipe's engine, of which only `interrupt` is used.

    Raises:
        UserError: the recipe has no engine with slots, or generates nothing; the run ended before its last step.
    """
    engine: Any = config.engine
    if fleet is None and not isinstance(engine, Local):
        remedy = "choose engine.kind=local or local_process"
        raise UserError(f"engine.kind={kind_of(engine)} has no number of slots to simulate", remedy=remedy)
    if config.rollouts is not None:
        raise UserError(f"rollouts={config.rollouts} trains on stored rollouts", remedy="set rollouts=null")
    clock = VirtualClock()
    with TemporaryDirectory() as place, Journal(":memory:", clock) as journal:
        folder = RunFolder(place)

        async def run() -> SimulatedRun:
            several = fleet or Fleet(1, padded_rows(engine.slots))
            timed = TimedEngine(
                times, several, interrupt=getattr(engine, "interrupt", "recompute"), seed=config.seed, now=clock.now
            )
            beside = fleet is not None or isinstance(engine, LocalProcess)
            thread = TimedThread(None if beside else timed, clock.now)
            store = RecordsInMemory(journal, folder, clock, partial(thread.spend, times.checkpoint))
            controller = _controller(config, times, store, timed, thread, clock)
            try:
                await controller.train()
            finally:
                controller.close()
            return SimulatedRun(
                records=store.records,
                figures=figures_of(store.records),
                running=timed.trace,
                trained=thread.trace,
                published=timed.published,
            )

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
    observer, prompts = Observer(), cast(Any, TimedPrompts(times.prompt_length))
    rewards = TimedRewards(
        times, config.seed, whole_batch=any(as_reward(reward).whole_batch for reward in config.reward)
    )
    executor = Executor(engine)
    episodes = None if times.turns is None else TimedEpisodes(executor, times, config.seed, store.activity.played)
    generator = GroupGenerator(executor, rewards, training_groups(config), clock.now, episodes)
    recorder = RolloutRecorder(store, prompts, observer)
    reject = partial(thread.run, timed_reject, times, config.seed)
    collector = make_collector(config, generator, prompts, recorder, reject, Pending(), 0)
    plan = replace(
        make_plan(config, config.train.steps),
        evaluate_every=config.eval.every if times.evaluate else 0,
        evaluate_before=False,
        evaluate_after=False,
        stop_after=None,
        checkpoint_every=config.checkpoint.every if times.checkpoint else 0,
    )
    builder = BatchBuilder(advantage=TimedAdvantage(times, thread), selection=(), seed=config.seed)
    learner, evaluation = timed_learner(times, thread), TimedEvaluation(times, thread, generator)
    publisher = Publisher(generator, learner, store, observer)
    return Controller(plan, collector, builder, learner, publisher, store, evaluation, observer)
