"""Base of the rewards that run in worker processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.reward.base import NOT_APPLICABLE, WeightedReward, Where, attempted, missing_answer, unscored, validated
from proxima.reward.workers.graders import JOBS


@dataclass(frozen=True, kw_only=True)
class Job:
    """One grader call in a worker process.

    Args:
        grader: key of `graders.JOBS`.
        arguments: keyword arguments, JSON values.
        cpu_seconds: CPU time after which the kernel kills the worker; none: only the wall-clock limit applies.
        seconds: wall-clock limit; none: the pool's.
    """

    grader: str
    arguments: Mapping[str, Any]
    cpu_seconds: float | None = None
    seconds: float | None = None

    def run(self) -> dict[str, Any]:
        """Call the grader in this process, without limits."""
        return JOBS[self.grader](**self.arguments)


@dataclass(frozen=True, kw_only=True)
class PooledReward(WeightedReward):
    """Base of the rewards that run in worker processes; a direct call of `score` runs in this process, unlimited."""

    where: ClassVar[Where] = "text"
    warm_up: ClassVar[str | None] = None  # run once before workers are forked; see `ForkServer`

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        """The job that scores this completion in a worker, or the score itself if no worker is needed."""
        raise NotImplementedError

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        """The score in a grader's result: `value`, `correct` where it is known, and other keys as parts."""
        parts = {key: part for key, part in result.items() if key not in ("value", "correct")}
        return validated(Score(value=result["value"], correct=result.get("correct"), parts=parts))

    def batch_job(self, groups: Sequence[Group]) -> Job:
        """The job that scores the whole batch in a worker, for rewards with `whole_batch`, or a single group, for
        rewards that get all completions of a prompt in one call."""
        raise NotImplementedError

    def parse_batch_result(self, groups: Sequence[Group], result: Mapping[str, Any]) -> list[list[Score]]:
        """The scores in a grader's result: for each completion what `parse_result` takes, its `error`, or None where
        the reward does not apply."""
        pairs = zip(groups, result["scores"], strict=True)
        return [[self._parse(group.prompt, returned) for returned in scores] for group, scores in pairs]

    def _parse(self, prompt: Prompt, returned: Mapping[str, Any] | None) -> Score:
        if returned is None:
            return NOT_APPLICABLE
        if "error" in returned:
            return Score.failed(str(returned["error"]))
        return attempted(partial(self.parse_result, prompt, returned))

    def setup_job(self) -> Job | None:
        """A job that each new worker runs before its first chunk."""
        return None

    def answer_job(self, answer: Any) -> Job | str | None:
        """The result of `unreadable_one`, or the job whose result contains it as `why`."""
        return missing_answer(answer)

    def unreadable_one(self, answer: Any) -> str | None:
        job = self.answer_job(answer)
        return job.run()["why"] if isinstance(job, Job) else job

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if self.completions_per_call == 1:
            return super().score(prompt, completions)
        return self.score_batch([unscored(prompt, completions)])[0]

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        job = self.job(prompt, completion)
        return job if isinstance(job, Score) else self.parse_result(prompt, job.run())

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        return self.parse_batch_result(groups, self.batch_job(groups).run())
