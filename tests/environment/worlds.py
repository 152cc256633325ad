"""Environments that behave, for the tests of the workers."""

import asyncio
import random
import re
from typing import Literal

import numpy as np

from proxima.environment import Environment, Reply


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

    def find(self, pattern: str) -> bool:
        """Whether there is one.

        Args:
            pattern: of a dice
        """
        return re.search(pattern, "dice") is not None
