"""Environments of the library verifiers, which play against the run's endpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import require
from proxima.environment.agent_kinds import AgentKind
from proxima.environment.agents import SCRIPT, Agents, ProcessAgents
from proxima.system.machine import SERVER_REMEDY, missing_for_server
from proxima_worlds.foreign_environment import ForeignEnvironment


@dataclass(frozen=True, kw_only=True)
class Verifiers(AgentKind):
    """An installed environment of the library verifiers, with its own prompts, tools and reward functions.

    Args:
        name: of the environment, as its package is called.
        args: arguments of its `load_environment`; for a taskset of verifiers 0.4, of the environment's config.
        python: an interpreter that has verifiers and the environment; empty: this one.
        workers: number of processes; each plays many episodes at once. 0: one for each 16 episodes at once, at most as
            many as cores.
    Raises: FieldError: the environment can't be loaded.
    Edge cases: if the policy plays several agents of the environment, each is a role, see `AgentSpec.roles`.
    """

    name: str = ""
    args: Mapping[str, Any] | None = None
    python: str = ""
    workers: int = 0

    kind: ClassVar[str] = "verifiers"

    def __post_init__(self) -> None:
        require(bool(self.name), "name", self.name, "must be the name of an installed environment")
        require(self.workers >= 0, "workers", self.workers, "must be >= 0", remedy="0: processes by cores")
        missing = missing_for_server()
        require(not missing, "kind", self.kind, f"is served by {missing}, not installed here", remedy=SERVER_REMEDY)

    @property
    def foreign(self) -> ForeignEnvironment:
        """The environment, in its interpreter."""
        return ForeignEnvironment.of({"kind": self.kind, **vars(self)})

    @property
    def roles(self) -> tuple[str, ...]:  # type: ignore[override]  # a field in other kinds
        """The agents of an environment in which the policy plays several; otherwise none. FieldError: it can't be
        loaded."""
        seats = tuple(self.foreign.facts().get("seats", ()))
        return seats if len(seats) > 1 else ()

    def check(self) -> None:
        self.foreign.facts()

    def rows(self, split: str, skip: int, size: int | None) -> tuple[Mapping[str, Any], ...]:
        """Its own rows, see `ForeignEnvironment.rows`."""
        return self.foreign.rows(split, skip, size)

    def inputs(self) -> Mapping[str, str]:
        """See `ForeignEnvironment.inputs`."""
        return self.foreign.inputs()

    def build(self) -> Agents:
        """Build its agents, whose processes start with the first episode."""
        self.check()
        command = self.foreign.command("play", episodes=str(SCRIPT))
        return ProcessAgents(command, self.workers, f"the environment {self.name!r}")
