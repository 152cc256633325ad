"""The `runtime` section: the loop and its machine, and the checks of asynchronous runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.config.slots import require_at_least
from proxima.data import require, require_threads
from proxima.reward.runner import RewardRunner
from proxima.rollout.admission import OverAge

STALL = "seconds without a token or a finished stage before a warning says what waits for whom; 0: never"


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
    threads: Annotated[int, "torch threads; 0: all cores"] = 0

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

    def rewards(self, specs: Sequence[Any], **how: Any) -> RewardRunner:
        """The rewards of these specs under the limits of the section; `how` are further arguments of the runner, or
        others. The caller closes it."""
        limits = {"workers": self.reward_workers, "memory_mb": self.reward_memory_mb, **how}
        return RewardRunner(specs, timeout=self.reward_timeout, **limits)


def require_stall_seconds(config: Any) -> None:
    """Raise `FieldError` unless `stall_seconds` is 0, or finite and at least 1."""
    value = config.stall_seconds
    usable = value == 0 or 1 <= value < math.inf
    require(usable, "stall_seconds", value, "must be finite and >= 1", remedy="0 never warns")
