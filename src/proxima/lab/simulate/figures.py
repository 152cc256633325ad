"""What is said of a run's speed, from its records: the same of a real and of a simulated one."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxima.data import UserError
from proxima.runtime.observer import Record


@dataclass(frozen=True, kw_only=True)
class SpeedFigures:
    """Means over the steps of a run. A lag is of policy versions between the oldest token of a group and its update."""

    tokens_per_second: float  # of the completions that steps took, used or dropped
    steps_per_hour: float  # evaluations and checkpoints between the steps included
    idle_trainer: float  # share of the steps in which the trainer waits for groups
    idle_engine: float  # share of the steps in which nothing is generated
    mean_lag: float
    max_lag: float
    evicted: int  # groups dropped because they were too far behind


def figures_of(records: Sequence[Record]) -> SpeedFigures:
    """Of the records of metrics.jsonl.

    Raises:
        UserError: there is no finished step.
    """
    steps = [record for record in records if record["kind"] == "train"]
    if not steps:
        raise UserError("no finished step, so no speed")
    seconds = steps[-1]["time"] - steps[0]["time"] + steps[0]["time/step"]
    in_steps = sum(record["time/step"] for record in steps)

    def share(key: str, *stages: str) -> float:
        """The mean of a share, weighted by the length of the steps. A synchronous run has its stages instead."""
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
