"""The `runtime` section: the loop and its machine, and the checks of asynchronous runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.config.describe import kind_of
from proxima.config.problems import require_at_least
from proxima.config.resolved import Findings
from proxima.config.sections.algorithm import AlgorithmConfig, supplied_by
from proxima.config.sections.train import TrainConfig
from proxima.data import require, require_threads
from proxima.data.kinds import Slot
from proxima.model.compute_thread import ComputeThread
from proxima.reward.runner import RewardRunner
from proxima.reward.workers.pool import WorkerPool
from proxima.rollout.prompt_limits import OverAge

# fields of every run, beside `placement`
Folder = Annotated[str | None, "run folder; null: runs/<recipe>-<time>"]
Monitor = Annotated[Any, Slot("proxima.view.trackers:TRACKERS", many=True), "trackers that also log the run"]
View = Annotated[bool, "start `proxima view` of the run with it, and print its address"]

STALL = "seconds without a token or a finished stage before a warning says what waits for whom; 0: never"

CONCURRENT = "runtime.max_concurrent_rollouts"


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    max_lag: Annotated[
        int, "policy versions a group may be behind at its update; 0: synchronous, no surplus groups"
    ] = 1
    max_concurrent_rollouts: Annotated[
        int | None, "prompts generated at once, asynchronously, with max_lag >= 1; null: between the updates"
    ] = None
    over_age: Annotated[
        OverAge, "groups beyond max_lag: wait for the oldest, so that none is; take what is finished and drop or train"
    ] = "wait"
    reward_timeout: Annotated[float, "seconds a reward may take for one completion"] = 10.0
    reward_memory_mb: Annotated[int, "MiB that a worker of reward functions may need; 0: no limit"] = 16384
    reward_workers: Annotated[int, "worker processes for rewards that parse untrusted text"] = 1
    reward_trial: Annotated[
        Literal["refuse", "warn", "off"], "if the rewards score none of two synthetic completions before the run"
    ] = "refuse"
    max_unscored_steps: Annotated[
        int,
        "steps, or generation batches of a step, in a row without one valid score after which the run ends; 0: never",
    ] = 3
    stall_seconds: Annotated[float, STALL] = 600.0
    threads: Annotated[int, "torch threads; 0: all cores, divided by the ranks of a machine"] = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "max_lag", remedy="0 is synchronous training")
        require_stall_seconds(self)
        if self.max_concurrent_rollouts is not None:
            require_at_least(self, 1, "max_concurrent_rollouts", remedy="null generates between the updates")
        require(self.reward_timeout > 0, "reward_timeout", self.reward_timeout, "must be > 0 seconds")
        require_at_least(self, 0, "reward_memory_mb")
        require_at_least(self, 1, "reward_workers")
        require_at_least(self, 0, "max_unscored_steps", remedy="0 never ends the run")
        require_threads(self.threads, "0 uses all cores")

    @property
    def overlaps(self) -> bool:
        """True if prompts are generated during training."""
        return self.max_concurrent_rollouts is not None and self.max_lag > 0

    def rewards(
        self,
        specs: Sequence[Any],
        *,
        workers: int | None = None,
        compute: ComputeThread | None = None,
        pool: type[WorkerPool] | None = None,
    ) -> RewardRunner:
        """The rewards of these specs under the limits of the section; None: its workers. The caller closes it."""
        if workers is None:
            workers = self.reward_workers
        return RewardRunner(
            specs,
            timeout=self.reward_timeout,
            workers=workers,
            memory_mb=self.reward_memory_mb,
            compute=compute,
            pool=pool,
        )


def require_stall_seconds(config: Any) -> None:
    """Raise `FieldError` unless `stall_seconds` is 0, or finite and at least 1."""
    value = config.stall_seconds
    usable = value == 0 or 1 <= value < math.inf
    require(usable, "stall_seconds", value, "must be finite and >= 1", remedy="0 never warns")


def overlap_is_possible(
    runtime: RuntimeConfig, rollouts: str | None, algorithm: AlgorithmConfig, engine: Any
) -> Findings:
    """Refuse overlap in a replay, without policy versions, or with `oversample`, which needs generation batches."""
    if runtime.max_concurrent_rollouts is None:
        return
    refill = algorithm.dynamic_sampling
    if rollouts is not None:
        yield CONCURRENT, "a replay (rollouts) generates nothing; set it to null"
    if runtime.overlaps and "policy_version" not in supplied_by(engine):
        message = "does not report the policy version of a token, so nothing bounds its lag"
        yield "engine.kind", f"{message}; use another engine, or runtime.max_lag=0"
    if runtime.overlaps and refill is not None and refill.oversample is not None:
        message = f"has no effect with {CONCURRENT}: each rejected group is replaced by one prompt; set it to null"
        yield "algorithm.dynamic_sampling.oversample", message


def overlap_settings_have_an_effect(runtime: RuntimeConfig, rollouts: str | None) -> Findings:
    """A setting that only applies to asynchronous training must not be set without it. The parameter `rollouts` limits
    this to runs: `proxima eval` reads the same section, but has no such field."""
    if runtime.overlaps:
        return
    missing = runtime.max_concurrent_rollouts is None
    remedy = f"set {CONCURRENT} too" if missing else "runtime.max_lag=0 trains synchronously: raise that"
    if runtime.over_age != "wait":
        yield "runtime.over_age", f"only applies to asynchronous training; {remedy}, or leave it out"


def overlap_is_of_use(runtime: RuntimeConfig, train: TrainConfig, engine: Any) -> Findings:
    """Warn if engine and trainer can't work concurrently, or if a bound has no effect."""
    if runtime.max_concurrent_rollouts is None:
        return
    if not runtime.overlaps:
        yield "runtime.max_lag", f"{CONCURRENT} has no effect: with 0 the run is synchronous"
        return
    if kind_of(engine) == "local":
        message = "takes turns with the trainer in one thread, so that nothing overlaps; use engine.kind=local_process"
        yield "engine.kind", message
    if runtime.max_lag >= train.steps:
        message = f"bounds nothing: the run has {train.steps} steps, so all prompts may be generated before the first"
        yield "runtime.max_lag", f"{message}; lower it or raise train.steps"


def some_tokens_are_older(algorithm: AlgorithmConfig, runtime: RuntimeConfig) -> Findings:
    """Warn if no token can be at least two versions old: only such tokens differ from plain decoupled PPO."""
    if algorithm.proximal != "next":
        return
    lag = runtime.max_lag
    if lag < 2:
        message = f"with runtime.max_lag={lag} no token is two versions old, so this is proximal=recompute"
        yield "algorithm.proximal", f"{message}; set max_lag to 2"
    elif runtime.max_concurrent_rollouts is None and algorithm.dynamic_sampling is None:
        message = "without runtime.max_concurrent_rollouts each step trains on its own version's tokens"
        remedy = "so this is proximal=recompute; set it to the number of prompts that generate at once"
        yield "algorithm.proximal", f"{message}, {remedy}"


def trackers_are_ready(monitor: Sequence[Any]) -> Findings:
    """The trackers' packages must be installed, and no kind may be named twice."""
    kinds = [kind_of(tracker) for tracker in monitor]
    for index, tracker in enumerate(monitor):
        remedy = tracker.problem()
        if remedy:
            yield f"monitor.{index}.kind", remedy
        elif kinds[index] in kinds[:index]:
            yield f"monitor.{index}.kind", "is named twice; keep one"
