"""What the rewards of this room share: weight, name, where they run, and the way from one completion to a score."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from proxima.data import Completion, Group, Prompt, Score, UserError, require
from proxima.reward.workers.graders import number_of

Where = Literal["inline", "thread", "text", "function"]


@dataclass(frozen=True, kw_only=True)
class WeightedReward:
    """Base of the rewards: a weight and a name, and `score` made from `score_one`.

    A subclass writes `score_one` and says `where` it runs; one that runs in a worker process writes `job` and `read`
    instead and inherits `PooledReward`; one that compares completions sets `whole_group` and writes `score`, or
    `whole_batch` and writes `score_batch`. One that needs something outside this process says so in `check`, one that
    sets `compares` tells in `unreadable` which answers it can't use.

    Args:
        weight: factor of this reward's value in the sum; finite, may be negative. 0 only logs the value, and then a
            failure of this reward does not make the completion invalid.
        name: key of this reward among the parts of a score; none: the kind.
    """

    weight: float = 1.0
    name: str | None = None

    kind: ClassVar[str] = ""
    where: ClassVar[Where] = "thread"
    # True: `score` gets all completions of the prompt in one call and a failure costs the whole group (a reward that
    # compares them).
    whole_group: ClassVar[bool] = False
    # True: it compares with the row's answer, and `unreadable` is asked of the answers before the run.
    compares: ClassVar[bool] = False
    # True: it is asked once a batch of generation, by `score_batch`, when all its groups are there; `score` is never
    # called.
    whole_batch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(math.isfinite(self.weight), "weight", self.weight, "must be finite")
        require(self.name is None or bool(self.name.strip()), "name", self.name, "must not be empty")

    @property
    def label(self) -> str:
        """The name under which the parts, the metrics and the errors speak of this reward."""
        return self.name or self.kind or type(self).__name__.lower()

    @property
    def concurrency(self) -> int:
        """How many calls of `score` may run at once, each in a thread; 0: what the runner gives,
        `runtime.reward_workers`."""
        return 0

    @property
    def per_call(self) -> int:
        """How many completions of a prompt one call of `score` gets, and a failure of that call costs; 0: all of
        them."""
        return 0 if self.whole_group else 1

    @property
    def deadline(self) -> float:
        """Seconds after which a call is given up; 0: what the runner says, `runtime.reward_timeout`."""
        return 0.0

    def check(self) -> None:
        """Say early, before any weights are loaded, that what the reward needs isn't there.

        Raises:
            ValueError: one line on what is missing and what to do.
        """

    def unreadable(self, answer: Any) -> str | None:
        """Why this reward could score nothing in a row of this answer, or None where it could. By default any answer
        will do but none."""
        return missing_answer(answer)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score for each completion, in the same order; raises what `score_one` raises."""
        return [self.score_one(prompt, completion) for completion in completions]

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        """The score of one completion, before the weight."""
        raise NotImplementedError(f"{type(self).__name__} must define score_one or score")

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        """A list for each group, in the same order, with a score for each of its completions; for rewards of the whole
        batch.

        The groups carry the scores of the rewards that look at one group. A failure costs this reward the whole batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score_batch")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a grader in a worker process.

    Args:
        grader: key of `graders.GRADERS`.
        arguments: keyword arguments, JSON values.
        cpu_seconds: CPU time after which the kernel ends the worker; none: the wall clock of the runner alone.
        seconds: time on the clock; none: the pool's.
    """

    grader: str
    arguments: Mapping[str, Any]
    cpu_seconds: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PooledReward(WeightedReward):
    """Base of the rewards that run in worker processes; `score` called directly runs in this process, with no limits.

    Args:
        weight: factor of this reward's value in the sum.
        name: key of this reward among the parts of a score; none: the kind.
    """

    where: ClassVar[Where] = "text"

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        """What a worker has to do for this completion, or its score when no worker is needed."""
        raise NotImplementedError

    def read(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        """A score from what the grader returned: `value`, and where it knows, `correct`; other keys are parts."""
        extra = {key: number_of(part, key) for key, part in result.items() if key not in ("value", "correct")}
        return validated(
            Score(value=number_of(result.get("value"), "value"), correct=result.get("correct"), parts=extra)
        )

    def batch_job(self, groups: Sequence[Group]) -> Job:
        """What a worker has to do for the whole batch; for rewards with `whole_batch`."""
        raise NotImplementedError

    def read_batch(self, groups: Sequence[Group], result: Mapping[str, Any]) -> list[list[Score]]:
        """The scores of the whole batch from what the grader returned."""
        raise NotImplementedError

    def reading(self, answer: Any) -> Job | str | None:
        """What `unreadable` says, or where that takes a worker, the job that finds out: its result has it as `why`."""
        return missing_answer(answer)

    def unreadable(self, answer: Any) -> str | None:
        from proxima.reward.workers.graders import GRADERS

        found = self.reading(answer)
        if not isinstance(found, Job):
            return found
        why: str | None = GRADERS[found.grader](**found.arguments)["why"]
        return why

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        from proxima.reward.workers.graders import GRADERS

        job = self.batch_job(groups)
        return self.read_batch(groups, GRADERS[job.grader](**job.arguments))

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        from proxima.reward.workers.graders import GRADERS

        job = self.job(prompt, completion)
        return job if isinstance(job, Score) else self.read(prompt, GRADERS[job.grader](**job.arguments))


def label_of(reward: object) -> str:
    """The name under which a reward's value stands among the parts of a score; of one out of tree its `name`, or its
    class."""
    label = getattr(reward, "label", None) or getattr(reward, "name", None)
    return str(label or type(reward).__name__.lower())


def validated(score: object) -> Score:
    """The score in Python's own numbers, after a look at what a careless scorer may have put into it (`correct=1`, a
    numpy float).

    A part that is not finite is as wrong as such a value: it would make the mean of the step's parts unknown. Where a
    part has no value, leave it out.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(score, Score):
        raise ValueError(f"returned {score!r:.80}, expected a Score")
    if not score.valid:
        raise ValueError(score.error or "returned an invalid score without an error")
    value = number_of(score.value, "value")
    if not math.isfinite(value):
        raise ValueError(f"returned {value}, expected a finite number")
    if score.correct not in (None, True, False):
        raise ValueError(f"returned correct={score.correct!r:.80}, expected true, false or nothing")
    parts = {str(key): number_of(part, str(key)) for key, part in score.parts.items()}
    for key, part in parts.items():
        if not math.isfinite(part):
            raise ValueError(f"returned {key}={part}, expected a finite number; a part without a value is left out")
    return replace(score, value=value, correct=None if score.correct is None else bool(score.correct), parts=parts)


def binary_score(right: bool) -> Score:
    """1 and correct, or 0 and not correct."""
    return Score(value=float(right), correct=right)


def require_package(module: str, kind: str, extra: str) -> None:
    """Say early that a reward's package is missing.

    Raises:
        ValueError: the package can't be found; names the extra that brings it.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"reward '{kind}' needs the package {module.replace('_', '-')}: pip install 'proxima-rl[{extra}]'"
        )


def missing_answer(answer: Any) -> str | None:
    """What is wrong with no answer at all."""
    return "there is none; map the task's answer column" if answer is None else None


def required_answer(prompt: Prompt, kind: str) -> Any:
    """The answer that a reward compares with.

    Raises:
        ValueError: the row has none.
    """
    if prompt.answer is None:
        raise ValueError(
            f"'{kind}' compares with an answer, and prompt {prompt.uid} has none; map the task's answer column"
        )
    return prompt.answer
