"""The model itself plays tasks in Harbor's format, by a tool `bash` in the task's container."""

import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from proxima.data import require
from proxima.environment.protocol import Environment, Reply
from proxima_worlds.containers import Containers
from proxima_worlds.harbor_agents import TIMED_OUT, TaskContainer, task_of

CALL_SECONDS = 120.0  # of a command that the model runs
LONGEST_COMMAND = 100_000  # bytes; Linux limits an argument to 128 KiB
SHOWN = 4000  # characters of its output that the model sees
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the computer and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "the command"}},
            "required": ["command"],
        },
    },
}


class HarborShell(Environment):
    """A tool `bash` in the container of the row's task, whose tests give the reward once the model calls no tool, or a
    limit of the episode or of the task is reached.

    Args:
        workers: number of containers that run at once.
    """

    concurrent: ClassVar[bool] = True
    shared: dict[str, Containers]

    def __init__(self, workers: int = 16) -> None:
        require(workers >= 1, "workers", workers, "must be >= 1")
        self.places = workers
        self.container: TaskContainer | None = None
        self.left = math.inf  # seconds that its commands may still take

    async def reset(self, row: Mapping[str, Any]) -> None:  # type: ignore[override]  # a run awaits it, with what it names
        task, containers = task_of(row, self.shared)
        self.container = TaskContainer(containers, task, containers.place(task.container))
        await self.container.start()
        self.left = task.agent_seconds or math.inf

    def tools(self) -> list[dict[str, Any]]:
        """The schema of `bash`."""
        return [BASH]

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str | Reply:
        """Run a command; the episode ends once the task's own limit has passed."""
        assert self.container is not None
        given = arguments["command"]
        if self.left <= 0:
            return Reply(done=True)
        if "\0" in given or len(given.encode(errors="replace")) > LONGEST_COMMAND:
            raise ValueError(f"command must be a text of at most {LONGEST_COMMAND:,} bytes without NUL")
        seconds = max(1.0, min(CALL_SECONDS, self.left))
        task = self.container.task
        began = time.monotonic()
        code, said = await self.container.run(
            ["sh", "-c", given], seconds, user=task.agent_user, variables=task.variables, joined=True
        )
        self.left -= time.monotonic() - began
        if len(said) > SHOWN:
            said = f"{said[: SHOWN // 2]}\n...\n{said[-SHOWN // 2 :]}"
        if code == TIMED_OUT:
            ending = f"timed out after {seconds:.0f} s"
        else:
            ending = f"exit code {code}"
        if code:
            return f"{said.strip()}\n({ending})"
        return said.strip() or "(no output)"

    async def get_reward(self) -> float:
        """Run the task's tests."""
        assert self.container is not None
        return await self.container.reward()

    def close(self) -> None:
        """End the container."""
        if self.container is not None:
            self.container.close()
