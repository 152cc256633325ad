"""The settings that all engines over HTTP have."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.engine.http.client import Address
from proxima.engine.protocol import EngineSpec, Interrupt
from proxima.engine.serve.serve_options import Serve

if TYPE_CHECKING:
    from proxima.engine.http.dialect import Dialect


@dataclass(frozen=True, kw_only=True)
class ServerSettings(EngineSpec):
    """An engine that is one or more servers with the same model, spoken to over HTTP.

    Args:
        url: where the servers are, `http://HOST:PORT` each; more than one are replicas.
        token_env: environment variable with a bearer token; null: no `Authorization`. The token itself is never written
            anywhere.
        allow_remote: the servers may be on other machines: prompts, completions and weights go there.
        interrupt: completions that run when new weights come: `recompute` their KV under the new weights, `keep` it, or
            `finish` them under the weights before. `recompute` sends a completion again, with the tokens it has, where
            the server can't do it by itself.
        idle_seconds: without a token after which a completion counts as hung and is asked for again.
        call_seconds: that any other call may take.
        weight_seconds: that loading new weights may take.
        away_seconds: that the run waits for a server to come back when none is left, or while all are too busy.
        health_seconds: between two health checks of a server.
        retries: how often a completion that failed is asked for again, at another replica if there is one.
        max_running: completions that run at once at a replica; 0: as many as it takes without a queue of its own.
        chunk_tokens: tokens in a message of a server; more make fewer messages, and later ones.
        seeded: send a seed with each completion, of the run's own draws, so that one that is asked for again draws the
            same. Some servers are slower with it.
        untruncated: log-probs at the temperature alone under top-k, top-p or min-p, which servers do not report:
            `score` each completion for them, which they can at temperature 1, or `absent`.
        sampling_mask: with top-k, top-p or min-p, ask for the tokens that could be sampled with each token, for an
            update over the same set of tokens.
        routed_experts: of a mixture of experts, those that each token was sent to come with it, for
            `algorithm.routing_replay: rollout`.
        weights: how new weights get to the servers; `auto` takes the best way that a server has.
        weight_folder: folder that new weights are written to for the servers to read; null: one in memory.
        probe_tokens: tokens whose log-probs prove after every weight sync that a server has the new weights.
        probe_bound: nats that these may differ from the trainer's on average; null: that of the server's dtype.
        prefix_salt: keep the prefix caches of different weights apart by a salt with each request, where the server
            takes one.
        quantization: of the weights at the servers, `fp8` and the like, as the server calls it; null: none.
        serve: proxima starts the servers itself, and ends them with the run; null: they run already, at `url`.
    """

    url: str | tuple[str, ...] = "http://127.0.0.1:8000"
    token_env: str | None = None
    allow_remote: bool = False
    interrupt: Interrupt = "recompute"
    idle_seconds: float = 120.0
    call_seconds: float = 60.0
    weight_seconds: float = 600.0
    away_seconds: float = 600.0
    health_seconds: float = 5.0
    retries: int = 3
    max_running: int = 0
    chunk_tokens: int = 1
    seeded: bool = True
    untruncated: Literal["score", "absent"] = "score"
    sampling_mask: bool = False
    routed_experts: bool = False
    weights: str = "auto"
    weight_folder: str | None = None
    probe_tokens: int = 256
    probe_bound: float | None = None
    prefix_salt: bool = True
    quantization: str | None = None
    serve: Serve | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        named = bool(self.urls) and all(self.urls)
        require(named, "url", self.url, "must name a server", remedy="give its address, http://HOST:PORT")
        require(len(set(self.urls)) == len(self.urls), "url", self.url, "must name each server once")
        used = self.serve is None or self.url == type(self).__dataclass_fields__["url"].default
        remedy = "leave one of the two out; serve.port sets the port"
        require(used, "url", self.url, "is not used where `serve` starts the servers", remedy=remedy)
        self.addresses  # noqa: B018  checks each
        for name in ("idle_seconds", "call_seconds", "weight_seconds", "away_seconds", "health_seconds"):
            seconds = getattr(self, name)
            require(0 < seconds < math.inf, name, seconds, "must be > 0 seconds and finite")
        require(self.retries >= 0, "retries", self.retries, "must be >= 0; 0 gives up at once")
        require(self.max_running >= 0, "max_running", self.max_running, "must be >= 0; 0 adapts to the server")
        require(self.chunk_tokens >= 1, "chunk_tokens", self.chunk_tokens, "must be >= 1")
        require(self.probe_tokens >= 1, "probe_tokens", self.probe_tokens, "must be >= 1")
        bound = self.probe_bound
        require(bound is None or 0 < bound < math.inf, "probe_bound", bound, "must be > 0 nats and finite")

    @property
    def provides(self) -> frozenset[str]:
        switched = {"sampling_mask": self.sampling_mask, "routed_experts": self.routed_experts}
        return super().provides | {name for name, on in switched.items() if on}

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all replicas, without a slash at the end."""
        return tuple(url.rstrip("/") for url in ((self.url,) if isinstance(self.url, str) else self.url))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The replicas."""
        return tuple(Address(url, self.token_env, self.allow_remote) for url in self.urls)

    def dialect(self) -> "Dialect":
        """The dialect of the servers."""
        raise NotImplementedError
