"""Resources servers of NeMo Gym, whose tools the policy calls."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, ClassVar

from proxima.data import require
from proxima.data.flow import Message
from proxima.environment.agents import SCRIPT
from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.job_processes import GRACE_SECONDS, JobProcess, JobProcesses
from proxima.environment.protocol import Environment, RewardWithParts
from proxima_worlds.foreign_environment import ForeignEnvironment

KIND = "nemo_gym"
NO_LIMIT = 1 << 30  # of the episodes that may be open at once: one waits for nothing here


class NemoGym(Environment):
    """A resources server of NeMo Gym, with its own prompts, tools and verification. Its tools are those of the row; the
    episode ends with the first message that calls none, or at a limit, and is verified as it is then.

    Args:
        name: of the resources server, as its folder is called.
        args: fields of the server's config.
        python: an interpreter that has nemo-gym and the server's requirements; empty: this one.
        workers: number of processes; each has many episodes at once. 0: one for each 16 episodes at once, at most as
            many as cores.
    Raises: FieldError: the server can't be loaded.
    Edge cases: an answer that the server itself marks as not to be measured (`mask_sample`) is a failed episode.
    """

    concurrent: ClassVar[bool] = True
    starts_program: ClassVar[bool] = False
    tools_by_row: ClassVar[bool] = True
    places: ClassVar[int] = NO_LIMIT
    shared: dict[str, JobProcesses]
    clock: EpisodeClock

    _numbers = count()

    def __init__(
        self, name: str = "", args: Mapping[str, Any] | None = None, python: str = "", workers: int = 0
    ) -> None:
        require(isinstance(name, str) and bool(name), "name", name, "must be the name of a resources server")
        require(args is None or isinstance(args, Mapping), "args", args, "must be a mapping of the config's fields")
        require("max_steps" not in (args or {}), "args.max_steps", (args or {}).get("max_steps"),
                "is the loop's own limit", remedy="set episode.turns")  # fmt: skip
        require(isinstance(python, str), "python", python, "must be a path")
        whole = isinstance(workers, int) and not isinstance(workers, bool)
        require(whole and workers >= 0, "workers", workers, "must be a whole number >= 0", remedy="0: by cores")
        self.foreign = ForeignEnvironment.of({"kind": KIND, "name": name, "args": args, "python": python})
        self._workers = workers
        self._tools: list[dict[str, Any]] = []
        self._process: JobProcess | None = None
        self._open = ExitStack()
        self._number = next(self._numbers)

    # ---- what a run asks ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise FieldError if it can't be loaded."""
        self.foreign.facts()

    def rows(self, split: str, skip: int, size: int | None) -> tuple[Mapping[str, Any], ...]:
        """Its own rows, see `ForeignEnvironment.rows`."""
        return self.foreign.rows(split, skip, size)

    def inputs(self) -> Mapping[str, str]:
        """See `ForeignEnvironment.inputs`."""
        return self.foreign.inputs()

    # ---- an episode --------------------------------------------------------------------------------------------------

    async def reset(self, row: Mapping[str, Any]) -> None:  # type: ignore[override]  # a run awaits it, with what it names
        """Open a session of the server for the row."""
        foreign = self.foreign
        processes = self.shared.get(KIND)
        if processes is None:
            command = foreign.command("play", episodes=str(SCRIPT))
            name = f"the environment {foreign.name!r}"
            processes = self.shared[KIND] = JobProcesses(command, self._workers, name, GRACE_SECONDS)
        self._process = processes.process()
        self._open.enter_context(self._process.held())
        self._tools = (await self._asked("open", row=dict(row)))["tools"]

    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the row's tools."""
        return self._tools

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the server's tool answers, an error too."""
        answer = await self._asked("call", name=name, arguments=dict(arguments))
        return str(answer["text"])

    async def get_reward(self, messages: Sequence[Message]) -> RewardWithParts:
        """Have the server verify what was said."""
        verified = await self._asked("verify", messages=list(messages))
        return RewardWithParts(value=verified["reward"], parts=verified["parts"])

    async def _asked(self, do: str, **given: Any) -> dict[str, Any]:
        assert self._process is not None
        answer = await self._process.ask({"do": do, "episode": self._number, **given}, self.clock)
        if "value" not in answer:
            raise EnvironmentFailure(f"the environment {self.foreign.name!r} failed: {answer.get('error')}")
        value: dict[str, Any] = answer["value"]
        return value

    def close(self) -> None:
        """End the session."""
        if self._process is not None:
            self._process.tell({"do": "drop", "episode": self._number})
        self._open.close()
