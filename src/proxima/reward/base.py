"""Base classes of the rewards, and the checks that every score passes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from proxima.data import UserError, require
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.reward.right_answers import best_score, first_reason, right_answers
from proxima.reward.workers.graders import to_float

T = TypeVar("T")
Where = Literal["inline", "thread", "compute", "text", "function"]
NOT_APPLICABLE = Score.failed("it does not apply to this row")  # compared by identity; adds nothing to the sum


@dataclass(frozen=True, kw_only=True)
class WeightedReward:
    """Base of the rewards, and everything that `RewardRunner` reads from one: defaults, and `score` in terms of
    `score_one`.

    A subclass defines `score_one`; a reward that compares the completions of a prompt sets `whole_group` and defines
    `score`; one that compares all groups sets `whole_batch` and defines `score_batch`, which is called once per
    generated batch, while `score` never is. Rewards that run in a worker process inherit from `pooled.PooledReward`.

    `score` may raise, hang or be slow: the runner isolates each call, abandons it after the timeout and records the
    failure as `Score.failed`. Values are in reward units, before the weight.

    An answer that is a list holds several right answers: the row is scored with each, and the best score counts. A
    reward gets the list itself if it sets `reads_lists`, or compares with no answer.

    Args:
        weight: factor of this reward's value in the sum; finite, may be negative. 0 only logs the value, and a failure
            of this reward then does not make the completion invalid.
        name: key of this reward among the parts of a score; null: the kind.

    A class also sets `where`: `inline` for bounded linear time, `thread` for trusted Python that may wait, `compute`
    for tensor work, else the kind of worker. It sets `needs_answer` if it compares with the row's answer:
    `unreadable_one` then checks each answer before the run. `example_fields` are values for the fields that have no
    default; the tests of all rewards construct it with these.
    """

    weight: float = 1.0
    name: str | None = None

    kind: ClassVar[str] = ""
    where: ClassVar[Where] = "thread"
    whole_group: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    needs_answer: ClassVar[bool] = False
    reads_lists: ClassVar[bool] = False
    example_fields: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __post_init__(self) -> None:
        require(math.isfinite(self.weight), "weight", self.weight, "must be finite")
        require(self.name is None or bool(self.name.strip()), "name", self.name, "must not be empty")

    @property
    def label(self) -> str:
        """Name of this reward in score parts, metrics and error messages."""
        return self.name or self.kind or type(self).__name__.lower()

    @property
    def completions_per_call(self) -> int:
        """Completions of a prompt in one `score` call, which are all invalid if it fails; 0: all of the prompt's."""
        return 0 if self.whole_group else 1

    @property
    def concurrency(self) -> int:
        """Simultaneous calls, each in a thread; 0: `runtime.reward_workers`."""
        return 0

    @property
    def call_timeout(self) -> float:
        """Seconds until a call is abandoned; 0: `runtime.reward_timeout`."""
        return 0.0

    def check(self) -> None:
        """Raise UserError, before the run, if something that the reward needs outside this process is missing."""

    def unreadable(self, answer: Any) -> str | None:
        """The reason why this reward can't score a row with this answer; None if it can. A list is unreadable if one
        of its elements is: a completion that is right by that one would count as wrong."""
        try:
            return first_reason([self.unreadable_one(each) for each in self.right_answers(answer)])
        except ValueError as error:
            return str(error)

    def unreadable_one(self, answer: Any) -> str | None:
        """The reason why this reward can't compare with this single answer; None if it can."""
        return missing_answer(answer) if self.needs_answer else None

    def right_answers(self, answer: Any) -> list[Any]:
        """The answers with which a row is scored, one at a time; ValueError, with the reason, if it has none."""
        return right_answers(answer) if self.needs_answer and not self.reads_lists else [answer]

    def rows(self, prompt: Prompt) -> list[Prompt]:
        """The prompt once with each of its right answers; ValueError like `right_answers`."""
        try:
            answers = self.right_answers(prompt.answer)
        except ValueError as error:
            raise ValueError(f"answer {prompt.answer!r:.80} of prompt {prompt.uid} is {error}") from None
        one = len(answers) == 1 and answers[0] is prompt.answer
        return [prompt] if one else [replace(prompt, answer=answer) for answer in answers]

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score per completion, in the same order."""
        rows = self.rows(prompt)
        if len(rows) == 1:
            return [self.score_one(rows[0], completion) for completion in completions]

        def scored(row: Prompt, completion: Completion) -> Score:
            return validated(self.score_one(row, completion))

        return [best_score([attempted(partial(scored, row, made)) for row in rows]) for made in completions]

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        """The score of one completion, before the weight."""
        raise NotImplementedError(f"{type(self).__name__} must define score_one or score")

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        """For each group, one score per completion. The groups carry the scores of rewards without `whole_batch`."""
        raise NotImplementedError(f"{type(self).__name__} must define score_batch")


def as_reward(spec: Any) -> WeightedReward:
    """The spec itself; UserError if it is not a reward."""
    if not isinstance(spec, WeightedReward):
        raise UserError(f"reward {type(spec).__name__} is not a subclass of proxima.reward.base.WeightedReward")
    return spec


def unscored(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    """A group that no reward has scored yet; its scores are 0."""
    return Group(prompt=prompt, completions=tuple(completions), scores=(Score(value=0.0),) * len(completions))


def attempted(call: Callable[[], T]) -> T | Score:
    """The result of the call, or a failed score with the exception."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a scorer that calls sys.exit() fails, the run does not
        return Score.failed(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def validated(score: object) -> Score:
    """The score with its numbers as Python's own, even if a careless scorer returned `correct=1` or a numpy float.
    ValueError if it is not a valid score or a number in it is not finite; a part without a value must be omitted."""
    if not isinstance(score, Score):
        raise ValueError(f"returned {score!r:.80}, expected a Score")
    if not score.valid:
        raise ValueError(score.error or "returned an invalid score without an error")
    value = as_float(score.value, "value")
    if not math.isfinite(value):
        raise ValueError(f"returned {value}, expected a finite number")
    if score.correct not in (None, True, False):
        raise ValueError(f"returned correct={score.correct!r:.80}, expected true, false or nothing")
    parts = {str(key): as_float(part, str(key)) for key, part in score.parts.items()}
    for key, part in parts.items():
        if not math.isfinite(part):
            raise ValueError(f"returned {key}={part}, expected a finite number; a part without a value is left out")
    return replace(score, value=value, correct=None if score.correct is None else bool(score.correct), parts=parts)


def as_float(value: object, key: str) -> float:
    """A number that a scorer returned; ValueError naming its `key` if it is none."""
    if isinstance(value, float):
        return float(value)

    return to_float(value, key)


def binary_score(correct: bool) -> Score:
    """A score of 1 if correct, else 0, with `correct` set."""
    return Score(value=float(correct), correct=correct)


def missing_answer(answer: Any) -> str | None:
    """The reason why a row without an answer can't be scored; None if it has an answer. NaN and infinities, which
    Python's JSON and tables have for missing numbers, are no answers."""
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"the row's answer is {answer}, which no completion can equal; give it a number or a text"
    return "the row has no answer; map the task's answer column" if answer is None else None


def required_answer(prompt: Prompt, kind: str) -> Any:
    """The row's answer; ValueError if the row has no answer."""
    if prompt.answer is None:
        raise ValueError(f"'{kind}' compares with an answer; prompt {prompt.uid} has none: map the answer column")
    if (missing := missing_answer(prompt.answer)) is not None:
        raise ValueError(f"'{kind}' compares with an answer: {missing}")
    return prompt.answer
