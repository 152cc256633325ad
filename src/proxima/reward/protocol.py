"""What a reward is."""

from collections.abc import Sequence
from typing import Protocol

from proxima.data import Completion, Prompt, Score


class Reward(Protocol):
    """Scores completions of a prompt; a frozen dataclass whose fields are its config.

    `score` may raise, hang or be slow: the runner (`reward.runner`) isolates each completion, gives up after the
    time-out and turns a failure into `Score.failed`. The value is in reward units, before the weight. `correct` is set
    by rewards that know whether an answer is right.
    """

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """One score for each completion, in the same order."""
        ...
