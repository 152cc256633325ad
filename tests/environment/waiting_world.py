"""A kind that waits for others, in the run's own process."""

import asyncio
from typing import ClassVar

from proxima.environment.protocol import Environment, Reply

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    },
}


class Waiting(Environment):
    """Counts; each call waits until as many others as there are places are in a call, too."""

    concurrent: ClassVar[bool] = True
    open: ClassVar[list["Waiting"]] = []
    most: ClassVar[int] = 0
    waiting: ClassVar[asyncio.Barrier | None] = None

    def __init__(self, workers: int = 3) -> None:
        self.places, self.total = workers, 0

    async def reset(self, start: int) -> str:
        self.open.append(self)
        Waiting.most = max(Waiting.most, len(self.open))
        if start < 0:
            raise OSError("no room")
        self.total = start
        return " Now."

    def tools(self):
        return [ADD]

    async def call_tool(self, name, arguments):
        if self.waiting is not None:
            await self.waiting.wait()
        if arguments["count"] == 0:
            raise ValueError("count must not be 0")
        self.total += arguments["count"]
        return Reply(str(self.total), reward=0.5, done=self.total > 9)

    async def get_reward(self) -> float:
        return float(self.total)

    def close(self) -> None:
        self.open.remove(self)
