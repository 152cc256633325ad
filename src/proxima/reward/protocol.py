"""The interface between a reward and the runner that calls it."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from proxima.data import Completion, Group, Prompt, Score

Where = Literal["inline", "thread", "compute", "text", "function"]


@runtime_checkable
class Reward(Protocol):
    """Everything that `RewardRunner` reads from a reward; `WeightedReward` has a default for all of it.

    `score` may raise, hang or be slow: the runner isolates each call, abandons it after the timeout and records the
    failure as `Score.failed`. Values are in reward units, before the weight.
    """

    @property
    def weight(self) -> float:
        """Factor of the value in the weighted sum; 0 only logs the value, and failures then have no effect."""

    @property
    def label(self) -> str:
        """Name of this reward in score parts, metrics and error messages."""

    @property
    def where(self) -> Where:
        """`inline` for bounded linear time, `thread` for trusted Python that may wait, `compute` for tensor work, else
        the kind of worker."""

    @property
    def whole_batch(self) -> bool:
        """True if `score_batch` is called once per generated batch, and `score` never."""

    @property
    def needs_answer(self) -> bool:
        """True if the reward compares with the row's answer; `unreadable` then checks each answer before the run."""

    @property
    def completions_per_call(self) -> int:
        """Completions of a prompt in one `score` call, which are all invalid if it fails; 0: all of the prompt's."""

    @property
    def concurrency(self) -> int:
        """Simultaneous calls, each in a thread; 0: `runtime.reward_workers`."""

    @property
    def call_timeout(self) -> float:
        """Seconds until a call is abandoned; 0: `runtime.reward_timeout`."""

    def check(self) -> None:
        """Raise UserError, before the run, if something that the reward needs outside this process is missing."""

    def unreadable(self, answer: Any) -> str | None:
        """The reason why this reward can't score a row with this answer; None if it can."""

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score per completion, in the same order."""
        ...

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        """For each group, one score per completion. The groups carry the scores of rewards without `whole_batch`."""
        ...
