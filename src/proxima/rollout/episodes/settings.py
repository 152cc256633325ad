"""The settings of episodes."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from proxima.data import as_field_errors, require
from proxima.process.sandbox import SandboxMissing, auto_sandbox, require_known

Forks = Literal["train", "refuse"]
ToolFormat = Literal["auto", "hermes", "llama", "glm", "mistral", "deepseek", "kimi", "minimax", "xml", "code"]
ENVIRONMENTS_LOG = "environments.log"  # what the environments of tasks print


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Limits of an episode, and the processes of its environment. An episode that reaches `turns` or `tokens` ends
    there, and is scored and trained; one whose environment fails or takes too long is restarted."""

    turns: Annotated[int, "messages of the model at most; `sampling.max_tokens` bounds each of them"] = 8
    tokens: Annotated[int | None, "tokens after the prompt at most, those of answers too; null: the context"] = None
    call_seconds: Annotated[float, "that a call of the environment or of a tool may take"] = 30.0
    seconds: Annotated[
        float, "of its own that an episode may take: waits for a place to play and for the model don't count"
    ] = 600.0
    retries: Annotated[int, "how many times an episode whose environment failed is restarted"] = 2
    workers: Annotated[int, "processes in which environments run"] = 2
    starts_per_second: Annotated[
        float | None,
        "programs of agents, containers and environments that start in a second at most; null: four for each core",
    ] = None
    memory_mb: Annotated[int, "MiB that such a process may need; 0: no limit"] = 1024
    sandbox: Annotated[
        str, "where such processes run, for classes and tools of your own: see the documentation of environments"
    ] = "none"
    forks: Annotated[
        Forks, "where the chat template rewrites what the model saw: train each version, or refuse the episode"
    ] = "train"
    tool_format: Annotated[
        ToolFormat, "how the model writes a call; auto: as its chat template does, or else in XML tags"
    ] = "auto"

    images: Annotated[bool, "answers of environments and tools may show images"] = False

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return auto_sandbox() if field == "sandbox" else None

    def __post_init__(self) -> None:
        for name, least in (("turns", 1), ("retries", 0), ("workers", 1), ("memory_mb", 0)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"must be >= {least}")
        with as_field_errors(SandboxMissing):
            require_known(self.sandbox)
        bound = "must be >= 1: an episode has one turn at least"
        remedy = "null: the context is the limit"
        require(self.tokens is None or self.tokens >= 1, "tokens", self.tokens, bound, remedy=remedy)
        for name in ("call_seconds", "seconds"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "must be > 0 and finite")
        rate = self.starts_per_second
        remedy = "null: four a second for each core"
        require(rate is None or 0 < rate < math.inf, "starts_per_second", rate, "must be > 0 and finite", remedy=remedy)
        bound = f"must be >= call_seconds={self.call_seconds:g}, or no call could take as long"
        require(self.seconds >= self.call_seconds, "seconds", self.seconds, bound)
