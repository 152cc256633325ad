"""An environment in a module that imports no torch, so that its workers start at once."""

from collections.abc import Mapping
from typing import Any

from proxima.environment.protocol import Environment, Reply


class Echo(Environment):
    """Answers every message with its length; a turn is worth the share of its even characters. Ends by itself.

    Args:
        turns: after which it ends.
        fail_on: raises on a message whose characters sum to a multiple of this; 0: never.
    """

    def __init__(self, turns: int = 3, fail_on: int = 0) -> None:
        self.turns, self.fail_on = turns, fail_on

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return f" {seed % 7}"

    def respond(self, text: str) -> Reply:
        codes = [ord(char) for char in text]
        if self.fail_on and sum(codes) % self.fail_on == 0:
            raise RuntimeError("no answer")
        self.turns -= 1
        reward = sum(code % 2 == 0 for code in codes) / max(1, len(codes))
        return Reply(str(len(codes)), reward=reward, done=self.turns == 0, state=str(self.turns))
