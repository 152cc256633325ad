"""Calls the scorers of reasoning_gym."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score, prompt_name
from proxima.reward.base import Job, PooledReward, validated
from proxima.reward.math.marked import last_tagged
from proxima.system.user_modules import require_package


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward(PooledReward):
    """The score in [0, 1] that the row's own reasoning_gym task gives the answer; correct from `correct_at` up.

    The answer is the contents of the last `<tag>…</tag>`, else the whole text, without outer whitespace. Only rows of
    the task `reasoning_gym` can be scored: they contain the entry that the scorer reads.

    Args:
        tag: name of the tag around the answer; null: always the whole text.
        strict: count a text without the tag as wrong.
        correct_at: the least score that counts as correct, in (0, 1].
        cpu_seconds: CPU time for one completion, in seconds, > 0.
    Returns: Score of the task's value, `correct` set.
    Raises: ValueError if the row comes from another task.
    Edge cases: if a scorer raises on the answer but not on the reference answer, the answer is wrong: 0. Some scorers
        pass the answer to `eval`, which in the worker reads only literals; scorers can't write files or open
        connections. The scorer of `game_of_life_halting` (0.1.25) accepts any answer.
    """

    tag: str | None = "answer"
    strict: bool = False
    correct_at: float = 1.0
    cpu_seconds: float = 5.0

    kind = "reasoning_gym"
    warm_up = "reasoning_gym"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tag is None or self.tag.isidentifier(), "tag", self.tag, "must be a plain name such as 'answer'")
        require(0 < self.correct_at <= 1, "correct_at", self.correct_at, "must be in (0, 1]")
        require(self.cpu_seconds > 0, "cpu_seconds", self.cpu_seconds, "must be > 0 seconds")

    def check(self) -> None:
        require_package("reasoning_gym", "it needs", "proxima-rl[gym]")

    @property
    def text_patterns(self) -> tuple[str, ...]:
        if self.tag is None or not self.strict:
            return ()
        return (f"<{self.tag}>.*?</{self.tag}>",)

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        source = prompt.metadata.get("reasoning_gym")
        if not isinstance(source, Mapping):
            missing = "its metadata has no entry to score with"
            raise ValueError(f"{prompt_name(prompt.uid)} is not a row of the task 'reasoning_gym': {missing}")
        answer = self._answer(completion.text, completion.own_text(prompt.begun))
        if answer is None:
            return Score(value=0.0, correct=False)
        return Job(grader="reasoning_gym", arguments={"source": source, "answer": answer}, cpu_seconds=self.cpu_seconds)

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        return validated(Score(value=result["value"], correct=result["value"] >= self.correct_at))

    def _answer(self, text: str, own: str) -> str | None:
        """The tagged part of the text, else what the policy itself wrote."""
        inside = own if self.tag is None else last_tagged(text, self.tag)
        if inside is None and not self.strict:
            inside = own
        if inside is None:
            return None
        return inside.strip()
