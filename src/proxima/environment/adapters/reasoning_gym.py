"""Puzzles of reasoning_gym, with several attempts at each."""

import re
from collections.abc import Mapping
from typing import Any

from proxima.data import FieldError, require
from proxima.data.errors import suggestion
from proxima.environment.protocol import Environment, Reply
from proxima.system.user_modules import require_package

FORM = "Put the answer between <answer> and </answer>."


class ReasoningGym(Environment):
    """A puzzle; an answer is scored by the puzzle's own verifier. For a task of `seeds`: `reset` writes the prompt.

    The answer is the text in the last `<answer>…</answer>`, else the whole message. The reward is the verifier's score
    of the last answer, in [0, 1]. An answer that the verifier can't parse is wrong.

    Args:
        task: its name in reasoning_gym, such as `chain_sum`.
        config: the task's own settings.
        attempts: number of answers allowed; each wrong one except the last is answered by "That is not right."
    """

    def __init__(self, task: str, config: Mapping[str, Any] | None = None, attempts: int = 1) -> None:
        require_package("reasoning_gym", "it needs", "proxima-rl[gym]")
        from reasoning_gym.factory import DATASETS

        require(task in DATASETS, "task", task, "is not in reasoning_gym", remedy=suggestion(task, DATASETS))
        require(attempts >= 1, "attempts", attempts, "must be >= 1")
        self.task, self.config, self.left = task, dict(config or {}), attempts
        self.puzzle: Any = self._made(0)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.puzzle = self._made(seed)
        return f"{self.puzzle[0]['question']}\n{FORM}"

    def respond(self, text: str) -> Reply:
        """Score an answer."""
        tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = (tagged[-1] if tagged else text).strip()
        try:
            score = float(self.puzzle.score_answer(answer, self.puzzle[0]))
        except Exception:  # verifiers raise on answers that they can't parse
            score = 0.0
        self.left -= 1
        if score >= 1 or not self.left:
            return Reply(reward=score, done=True)
        return Reply("That is not right. Try again.")

    def _made(self, seed: int) -> Any:
        from reasoning_gym import create_dataset

        try:
            return create_dataset(self.task, **{**self.config, "seed": seed % 2**31, "size": 1})
        except Exception as error:  # settings are checked by assertions
            raise FieldError("config", self.config, f"is refused by {self.task!r}: {error}") from None
