"""Environments that behave, for the tests of the workers."""

import asyncio
import random
import re
from typing import Literal

import numpy as np

from proxima.data.episode import ToolCall
from proxima.environment.protocol import Environment, Reply


def called(hosts, row, *calls):
    """The opening, the answers and the reward of an episode with these calls of tools."""

    async def run():
        instance = await hosts.open(row, seed=0)
        answers = await instance.call([ToolCall(name=name, arguments=arguments) for name, arguments in calls])
        return instance.opening, answers, await instance.end()

    return asyncio.run(run())


class Counter:
    def __init__(self) -> None:
        self.reward = None
        self.done = False

    def reset(self, start: int, **columns) -> None:
        self.reward = start

    def add(self, count: int) -> int:
        """Go on.

        Args:
            count: how far
        """
        if count < 0:
            raise ValueError("only forwards")
        if count == 404:
            raise ConnectionError("no server")
        if count > 100:
            raise KeyError(count)
        self.reward += count
        return self.reward

    async def fetch(self) -> str:
        """Tell the loop."""
        await asyncio.sleep(0)
        return str(id(asyncio.get_running_loop()))

    def finish(self) -> Reply:
        """End it."""
        self.done = True
        return Reply(content="over", reward=2.0)

    def find(self, pattern: str) -> bool:
        """Whether there is one.

        Args:
            pattern: of a counter
        """
        return re.search(pattern, "counter") is not None

    def choose(self, way: Literal["left", "right"] = "left") -> str:
        """Turn.

        Args:
            way: to go
        """
        return way


class Columns:
    def reset(self, b, a=0, seed=0):
        return Reply(content=f"a={a} b={b} seed={seed}", state="begun")

    def respond(self, text):
        return ""


class Row(Environment):
    def reset(self, row, seed):
        return f"{', '.join(row)} seed={seed}"

    def respond(self, text):
        return ""


class NoReset:
    def respond(self, text):
        return "yes"


class Dice:
    """Draws as a class does that knows no seed."""

    def reset(self, **columns):
        return f" {random.random()} {np.random.rand()}"

    def roll(self, sides: int) -> str:
        """Roll.

        Args:
            sides: of the dice
        """
        return f"{random.randint(1, sides)} {np.random.randint(1, 1 + sides)}"


class Adder:
    # The contract of TRL 1.16's environment_factory: no arguments, reset(**columns), tools, perhaps get_reward.
    def __init__(self):
        self.total = 0
        self.done = False

    def reset(self, target: int = 3, **kwargs) -> str | None:
        self.total, self.target = 0, target
        return f" The total is 0, the target {target}."

    def _hidden(self):
        pass

    @property
    def costly(self):
        raise RuntimeError("computed")

    async def add(self, amount: int, times: int = 1) -> str:
        """
        Add to the total.

        Args:
            amount: What to add.
            times: How often.

        Returns:
            The total so far.
        """
        self.total += amount * times
        if self.total > self.target:
            raise ValueError("Game over.")
        return f"{self.total}"

    def peek(self) -> dict:
        """Look at the total."""
        return {"total": self.total}

    async def get_reward(self) -> float:
        return 1.0 if self.total == self.target else 0.0
