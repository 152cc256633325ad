"""Base classes of rewards that run in this process or in workers, and the checks of every score."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from proxima.data import UserError, require
from proxima.data.flow import Completion, Group, Prompt, Score, prompt_name
from proxima.reward.workers.graders import JOBS
from proxima.reward.workers.user_function import to_float

if TYPE_CHECKING:  # only rewards that run code load it
    from proxima.process.sandbox import Sandbox

T = TypeVar("T")
Where = Literal["inline", "thread", "compute", "text", "function"]
NOT_APPLICABLE = Score.failed("it does not apply to this row")  # compared by identity; adds nothing to the sum


@dataclass(frozen=True, kw_only=True)
class WeightedReward:
    """Base of all rewards: everything that `RewardRunner` reads from one, with defaults, and `score` in terms of
    `score_one`.

    A subclass defines `score_one`. A reward that compares the completions of a prompt sets `whole_group` and defines
    `score`. One that compares all groups sets `whole_batch` and defines `score_batch`, which is called once per
    generated batch in place of `score`. Rewards that run in a worker process inherit from `PooledReward`.

    `score` may raise, hang or be slow: the runner isolates each call, abandons it after the timeout and records the
    failure as `Score.failed`. Values are in reward units, before the weight.

    A list as the answer means several right answers: the row is scored with each, and the best score counts. A reward
    gets the list itself if it sets `reads_lists` or does not set `needs_answer`.

    Args:
        weight: factor of this reward's value in the sum; finite, may be negative. 0 only logs the value, and a failure
            of this reward then does not make the completion invalid.
        name: key of this reward among the parts of a score; null: the kind.

    A class also sets `where`: `inline` for bounded linear time, `thread` for trusted Python that may wait, `compute`
    for tensor work, otherwise the kind of worker. It sets `needs_answer` if it compares with the row's answer;
    `unreadable_one` then checks each answer before the run. `measured_parts` names parts that no two calls have alike,
    such as seconds; `is_judged` says that a language model reads the text. `example_fields` are values for the fields
    without a default; the tests of all rewards construct it with these.
    """

    weight: float = 1.0
    name: str | None = None

    kind: ClassVar[str] = ""
    where: ClassVar[Where] = "thread"
    whole_group: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    needs_answer: ClassVar[bool] = False
    reads_lists: ClassVar[bool] = False
    measured_parts: ClassVar[tuple[str, ...]] = ()
    is_judged: ClassVar[bool] = False
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
        """Completions of a prompt in one `score` call, which are all invalid if it fails; 0: all completions."""
        return 0 if self.whole_group else 1

    @property
    def concurrency(self) -> int:
        """Simultaneous calls, each in a thread; 0: `runtime.reward_workers`."""
        return 0

    @property
    def call_timeout(self) -> float:
        """Seconds until a call is abandoned; 0: `runtime.reward_timeout`."""
        return 0.0

    @property
    def pool(self) -> str:
        """The name of the workers that run it; rewards with the same name share them."""
        return self.where

    @property
    def text_patterns(self) -> tuple[str, ...]:
        """Regular expressions (`.` matches newlines) that a text must match to be worth more than any other; the run
        warns at its start if no answer can."""
        return ()

    def check(self) -> None:
        """Check before the run; raise UserError if something outside this process that the reward needs is missing."""

    def notes(self) -> list[str]:
        """Lines for the user at the start of a run, after `check`."""
        return []

    def sends(self) -> str:
        """What it sends to which server, in one line for `explain`; empty: nothing leaves this machine's processes."""
        return ""

    def keep_in(self, folder: Path) -> None:
        """Called before the first `score` of a run: the folder may keep what could not be computed again."""

    def load(self) -> None:
        """Load the weights of a model before the first `score`; called if `where` is `compute`."""

    def unreadable(self, answer: object) -> str | None:
        """The reason why this reward can't score a row with this answer; None if it can. A list is unreadable if any
        element is, because a completion that equals that element would count as wrong."""
        try:
            return first_reason([self.unreadable_one(each) for each in self.right_answers(answer)])
        except ValueError as error:
            return str(error)

    def unreadable_one(self, answer: object) -> str | None:
        """The reason why this reward can't compare with this single answer; None if it can."""
        return missing_answer(answer) if self.needs_answer else None

    def right_answers(self, answer: object) -> list[Any]:
        """The answers with which a row is scored, one at a time; ValueError, with the reason, if there is none."""
        if self.needs_answer and not self.reads_lists:
            return right_answers(answer)
        return [answer]

    def rows(self, prompt: Prompt) -> list[Prompt]:
        """Copies of the prompt, one with each of its right answers; ValueError like `right_answers`."""
        try:
            answers = self.right_answers(prompt.answer)
        except ValueError as error:
            raise ValueError(f"answer {prompt.answer!r:.80} of {prompt_name(prompt.uid)} is {error}") from None
        unchanged = len(answers) == 1 and answers[0] is prompt.answer
        if unchanged:
            return [prompt]
        return [replace(prompt, answer=answer) for answer in answers]

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
        """For each group, one score per completion. The groups have the scores of the rewards without `whole_batch`."""
        raise NotImplementedError(f"{type(self).__name__} must define score_batch")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One grader call in a worker process.

    Args:
        grader: key of `graders.JOBS`.
        arguments: keyword arguments, JSON values.
        cpu_seconds: CPU time after which the kernel kills the worker; None: only the wall-clock limit applies.
        seconds: wall-clock limit; None: the pool's.
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
    """Base of the rewards that run in worker processes; a direct call of `score` runs in this process, without
    limits."""

    where: ClassVar[Where] = "text"
    warm_up: ClassVar[str | None] = None  # run once before workers are forked; see `ForkServer`

    @property
    def code_servers(self) -> Mapping[str, int]:
        """The kinds of sandboxes that other distributions bring in which its workers run code, and the MiB of memory
        that it may need there."""
        return {}

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        """The job that scores this completion in a worker, or the score itself if no worker is needed."""
        raise NotImplementedError

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        """The score in a grader's result: `value`, `correct` if it is known, and other keys as parts."""
        parts = {key: part for key, part in result.items() if key not in ("value", "correct")}
        return validated(Score(value=result["value"], correct=result.get("correct"), parts=parts))

    def batch_job(self, groups: Sequence[Group]) -> Job:
        """The job that scores the whole batch in a worker, for rewards with `whole_batch`, or a single group, for
        rewards that get all completions of a prompt in one call."""
        raise NotImplementedError

    def parse_batch_result(self, groups: Sequence[Group], result: Mapping[str, Any]) -> list[list[Score]]:
        """The scores in a grader's result, which has for each completion the input of `parse_result`, its `error`, or
        None if the reward does not apply."""
        pairs = zip(groups, result["scores"], strict=True)
        return [[self._parse(group.prompt, returned) for returned in scores] for group, scores in pairs]

    def _parse(self, prompt: Prompt, returned: Mapping[str, Any] | None) -> Score:
        if returned is None:
            return NOT_APPLICABLE
        if "error" in returned:
            return Score.failed(str(returned["error"]))
        return attempted(partial(self.parse_result, prompt, returned))

    @property
    def workers_sandbox(self) -> "Sandbox | None":
        """The sandbox of the workers, which the rewards of a `pool` share; None: no sandbox."""
        return None

    def setup_job(self) -> Job | None:
        """A job that each new worker runs before its first chunk."""
        return None

    def answer_job(self, answer: object) -> Job | str | None:
        """The result of `unreadable_one`, or the job whose result contains it as `why`."""
        return missing_answer(answer)

    def unreadable_one(self, answer: object) -> str | None:
        job = self.answer_job(answer)
        if isinstance(job, Job):
            why: str | None = job.run()["why"]
            return why
        return job

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if self.completions_per_call == 1:
            return super().score(prompt, completions)
        return self.score_batch([unscored(prompt, completions)])[0]

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        job = self.job(prompt, completion)
        if isinstance(job, Score):
            return job
        return self.parse_result(prompt, job.run())

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        return self.parse_batch_result(groups, self.batch_job(groups).run())


def as_reward(spec: Any) -> WeightedReward:
    """Return the spec; UserError if it is not a reward."""
    if not isinstance(spec, WeightedReward):
        raise UserError(f"reward {type(spec).__name__} is not a subclass of proxima.reward.base.WeightedReward")
    return spec


def unscored(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    """A group that no reward has scored yet; its scores are 0."""
    return Group(prompt=prompt, completions=tuple(completions), scores=(Score(value=0.0),) * len(completions))


def attempted(call: Callable[[], T]) -> T | Score:
    """The result of the call, or a failed score that quotes its exception."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a scorer that calls sys.exit() fails, the run does not
        return Score.failed(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def validated(score: object) -> Score:
    """The score with Python's own numbers and bools, even if a scorer returned `correct=1` or a numpy float. ValueError
    if it is not a valid score or a number in it is not finite; a part without a value must be omitted."""
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
    players = {str(key): validated(own) for key, own in score.players.items()}
    if score.correct is None:
        correct = None
    else:
        correct = bool(score.correct)
    return replace(score, value=value, correct=correct, parts=parts, players=players)


def as_float(value: object, key: str) -> float:
    """Convert a number that a scorer returned; ValueError naming its `key` if it is not a number."""
    if isinstance(value, float):
        return float(value)

    return to_float(value, key)


def binary_score(correct: bool) -> Score:
    """A score of 1 if correct, else 0, with `correct` set."""
    return Score(value=float(correct), correct=correct)


def missing_answer(answer: object) -> str | None:
    """The reason why a row without an answer can't be scored; None if it has an answer. NaN and infinities, by which
    Python's JSON and tables mark missing numbers, are not answers."""
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"the row's answer is {answer}, which no completion can equal; give it a number or a text"
    if answer is None:
        return "the row has no answer; map the task's answer column"
    return None


def required_answer(prompt: Prompt, kind: str) -> Any:
    """The row's answer; ValueError if the row has no answer."""
    if prompt.answer is None:
        raise ValueError(f"'{kind}' compares with an answer; {prompt_name(prompt.uid)} has none: map the answer column")
    missing = missing_answer(prompt.answer)
    if missing is not None:
        raise ValueError(f"'{kind}' compares with an answer: {missing}")
    return prompt.answer


AS_LIST = (
    "read it as JSON (task.json_columns=[COLUMN], --json-column of reward score), or write a list of this one text if "
    "it is the answer itself"
)
_LIST_AS_TEXT = re.compile(r"""\s*\[\s*(["']).*\1\s*,?\s*\]\s*""", re.DOTALL)


def right_answers(answer: object) -> list[Any]:
    """The right answers in a row's answer: the elements of a list, otherwise the answer itself.

    A text is one answer, because `[0, 5]` is an interval. A text with a list of texts, as in a CSV file, is refused,
    because either the list or one of its elements may be meant.

    Raises: ValueError, with the reason, for an object, such a text, an empty list, or a list, object or null in a list.
    """
    if isinstance(answer, Mapping):
        keys = ", ".join(map(str, answer)) or "none"
        raise ValueError(f"an object, not an answer; map one of its keys, as task.answer=COLUMN.KEY (keys: {keys})")
    if isinstance(answer, str) and _LIST_AS_TEXT.fullmatch(answer):
        raise ValueError(f"a list in a text; {AS_LIST}")
    if not isinstance(answer, list | tuple):
        return [answer]
    if not answer:
        raise ValueError("an empty list: nothing would be right")
    for number, element in enumerate(answer):
        if element is None or isinstance(element, Mapping | list | tuple):
            if element is None:
                kind = "null"
            elif isinstance(element, Mapping):
                kind = "an object"
            else:
                kind = "a list"
            raise ValueError(f"a list of right answers whose element {number} is {kind}")
    return list(answer)


def first_reason(reasons: Sequence[str | None]) -> str | None:
    """The first of the reasons why answers can't be read, with its number if there are several answers; None if there
    is no reason."""
    numbered = [(number, why) for number, why in enumerate(reasons) if why is not None]
    if not numbered:
        return None
    number, why = numbered[0]
    if len(reasons) == 1:
        return why
    return f"element {number}: {why}"


def best_score(scores: Sequence[Score]) -> Score:
    """The score of a completion from its scores with each right answer: the greatest value among the correct ones. If
    none is correct: the first failed score, because that comparison might have been correct, or else the greatest
    value."""
    correct = [score for score in scores if score.valid and score.correct]
    failed = [score for score in scores if not score.valid]
    return max(correct or failed[:1] or scores, key=lambda score: score.value)
