"""A game over several turns: guess a number."""

import re
from collections.abc import Mapping
from typing import Any

from proxima.data import require
from proxima.data.random import mix
from proxima.environment.protocol import Environment, Reply


class Guess(Environment):
    """Find a whole number; the answer to a guess is "higher" or "lower".

    The reward is 1 for a correct first guess and falls by 1 / guesses with each further one; it is 0 if the number is
    not found. A message without a number counts as a guess. For a task of `seeds`: `reset` writes the prompt.

    Args:
        low, high: range of the number, both ends included.
        guesses: the game is lost after this many guesses.
    """

    def __init__(self, low: int = 1, high: int = 10, guesses: int = 6) -> None:
        require(low < high, "high", high, f"must be above low={low}")
        require(guesses >= 1, "guesses", guesses, "must be >= 1")
        self.low, self.high, self.guesses, self.used = low, high, guesses, 0
        self.number, self.left = low, (low, high)

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        self.number = self.low + mix(seed) % (self.high - self.low + 1)
        rules = f"Guess a number from {self.low} to {self.high}. I answer higher or lower."
        return Reply(content=rules, state=self._state())

    def respond(self, text: str) -> Reply:
        """Judge the last number in the message."""
        self.used += 1
        numbers = re.findall(r"(?<!\d)-?\d{1,18}(?!\d)", text)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.number:
            return Reply(reward=1 - (self.used - 1) / self.guesses, done=True)
        if self.used == self.guesses:
            return Reply(done=True)
        if guess is None:
            return Reply(content=f"Write a number from {self.low} to {self.high}.", state=self._state())
        first, last = self.left
        self.left = (max(first, guess + 1), last) if guess < self.number else (first, min(last, guess - 1))
        return Reply(content="higher" if guess < self.number else "lower", state=self._state())

    def _state(self) -> str:
        return f"{self.left[0]}-{self.left[1]}, {self.guesses - self.used} guesses left"
