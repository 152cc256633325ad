"""What an engine is: prompt in, completions out, with log-probs and versions."""

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxima.data import Completion, Prompt, require


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The distribution is softmax(logits / temperature), then top-k, then top-p, then min-p,
    renormalised.

    Args:
        temperature: > 0, or 0 for greedy (evaluation only).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass is at least this; in (0, 1].
        min_p: keep tokens with at least this share of the largest probability; in [0, 1).
        max_tokens: most new tokens of a completion; >= 1.
        stop: strings that end a completion; the text excludes them, the tokens do not.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature < math.inf, "temperature", self.temperature, "must be >= 0 and finite; 0 is greedy"
        )
        require(self.top_k >= 0, "top_k", self.top_k, "must be >= 0; 0 keeps all tokens")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]; 1 keeps all tokens")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "must be in [0, 1); 0 keeps all tokens")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be >= 1")
        require(all(self.stop), "stop", self.stop, "must hold no empty string")

    @property
    def truncates(self) -> bool:
        """True when some tokens can't be sampled at all, so that the sampled distribution is not the policy's own."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion wanted. Requests of the same prompt share its KV.

    `seed` and (prompt.uid, sample) decide every random draw, by counter: a completion depends on nothing else in the
    queue.
    """

    prompt: Prompt
    sample: int
    sampling: Sampling
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Health:
    """What an engine says of itself."""

    ok: bool
    version: int
    running: int = 0
    waiting: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Every engine, in this process or behind HTTP. One task at a time calls `generate`; the other methods may be
    called meanwhile."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Stream the completions, each as soon as it ends, in any order; one for each request unless aborted before it
        began."""
        ...

    async def publish(self, weights: Any, version: int) -> None:
        """Take new weights. Tokens sampled from now on carry `version`; a running completion goes on under the new
        weights."""
        ...

    async def pause(self) -> None:
        """Return when no token is being sampled; nothing is lost."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def abort(self, prompt_uid: int) -> None:
        """End all completions of a prompt with finish_reason `abort`."""
        ...

    async def health(self) -> Health:
        """Answer at once."""
        ...
