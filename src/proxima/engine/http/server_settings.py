"""The settings shared by all engines over HTTP."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from proxima.data import FieldError, require
from proxima.data.field_checks import check_choices
from proxima.data.kinds import class_of
from proxima.engine.http.client import Address
from proxima.engine.http.dialect import Dialect
from proxima.engine.http.server_file import file_of, read_addresses
from proxima.engine.http.weights import TRANSPORTS
from proxima.engine.protocol import EngineSpec, Interrupt
from proxima.engine.serve.launch import Serve
from proxima.system.linux import has_nvidia_gpu
from proxima.system.web_requests import is_loopback


@dataclass(frozen=True, kw_only=True)
class ServerSettings(EngineSpec):
    """An engine that consists of one or more servers with the same model, called over HTTP.

    Args:
        url: addresses of the servers, `http://HOST:PORT` each; several servers are replicas. Or a file with one address
            per line, which is read again during the run: adding a line adds a server, removing one removes it.
        token_env: environment variable with a bearer token; null: no `Authorization`. The token itself is never written
            anywhere.
        allow_remote: the servers may be on other machines: prompts, completions and weights are sent there.
        interrupt: how to treat completions that are running when new weights arrive: `recompute` their KV under the new
            weights, `keep` it, or `finish` them under the old weights. If the server can't recompute by itself,
            `recompute` sends a completion again with its tokens so far.
        idle_seconds: time without a token after which a completion counts as hung and is retried.
        call_seconds: deadline of any other call.
        weight_seconds: deadline of each call that loads new weights; over a group, one call loads all of them, and a
            server that hangs costs five sixths of it.
        away_seconds: time that the run waits for a server to return if none is left, or while all are too busy.
        health_seconds: time between two health checks of a server, and two reads of the file that `url` names.
        retries: how often a failed completion is retried, at another replica if there is one.
        max_running: concurrent completions per replica; 0: as many as the server runs without queueing.
        chunk_tokens: tokens per message of a server; a larger number means fewer and later messages.
        seeded: send a seed from the run's own draws with each completion, so that a retry draws the same tokens. Some
            servers are slower with it.
        untruncated: log-probs at the temperature without truncation under top-k, top-p or min-p, not reported by
            servers. `score` each completion to get them, which works at temperature 1, or `absent`.
        sampling_mask: with top-k, top-p or min-p, request with each token the tokens that could have been sampled, for
            an update over the same set of tokens.
        routed_experts: for an MoE model, request with each token the experts to which it was routed, for
            `algorithm.routing_replay: rollout`.
        transfer: how new weights get to the servers. `group`: broadcast over gloo or NCCL, unencrypted, for a trusted
            network. `ipc`: through memory of a GPU or of this machine, which trainer and server share. `folder`: files
            that each server reads. `auto`: `ipc` where servers take turns with the ranks on their GPUs, `group` for
            other GPUs, and on CPUs for other machines, if all servers can join one; else `folder`. Or a transport of
            your own, `package.module:Class`; see `proxima.engine.http.weights.transport`.
        adapters_only: with `model.lora`, send only the adapters; the servers keep the base that they were started with,
            and compute with both. For vLLM.
        weight_folder: folder to which new weights are written for the servers to read; null: one in memory.
        probe_tokens: number of tokens whose log-probs verify after every weight sync that a server has the new weights.
        probe_bound: nats by which these may differ from the trainer's on average; null: the default bound for the
            server's dtype.
        quantization: of the servers' weights, `fp8` and the like, by the server's name for it; null: none.
        serve: proxima starts the servers itself, and stops them with the run; null: they are already running, at `url`.
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
    transfer: str = "auto"
    adapters_only: bool = False
    weight_folder: str | None = None
    probe_tokens: int = 256
    probe_bound: float | None = None
    quantization: str | None = None
    serve: Serve | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        _check_transfer(self.transfer)
        if self.url_file is None:
            named = bool(self.urls) and all(self.urls)
            require(named, "url", self.url, "must name a server", remedy="give its address, http://HOST:PORT")
            require(len(set(self.urls)) == len(self.urls), "url", self.url, "must name each server once")
        used = self.serve is None or self.url == type(self).__dataclass_fields__["url"].default
        remedy = "leave one of the two out; serve.port sets the port"
        require(used, "url", self.url, "is not used where `serve` starts the servers", remedy=remedy)
        if self.url_file is None:
            self.addresses  # noqa: B018  checks each
        else:  # it is read when the run starts, perhaps on another machine
            Address("http://127.0.0.1", self.token_env)
        unused = "is not used with adapters_only, which goes through a folder"
        free = not self.adapters_only or self.transfer in ("auto", "folder")
        require(free, "transfer", self.transfer, unused, remedy="leave it out")
        for name in ("idle_seconds", "call_seconds", "weight_seconds", "away_seconds", "health_seconds"):
            seconds = getattr(self, name)
            require(0 < seconds < math.inf, name, seconds, "must be > 0 seconds and finite")
        require(self.retries >= 0, "retries", self.retries, "must be >= 0; 0 gives up at once")
        require(self.max_running >= 0, "max_running", self.max_running, "must be >= 0; 0 adapts to the server")
        require(self.chunk_tokens >= 1, "chunk_tokens", self.chunk_tokens, "must be >= 1")
        require(self.probe_tokens >= 1, "probe_tokens", self.probe_tokens, "must be >= 1")
        bound = self.probe_bound
        require(bound is None or 0 < bound < math.inf, "probe_bound", bound, "must be > 0 nats and finite")

    def launch_options(self, adapter_rank: int) -> dict[str, Any]:
        """The options of `start_servers` that depend on these settings.

        Args:
            adapter_rank: of the run's adapters; 0: none.
        """
        options = {name: getattr(self, name) for name in ("quantization", "sampling_mask", "routed_experts")}
        return options | {"adapter_rank": adapter_rank if self.adapters_only else 0}

    @property
    def url_file(self) -> Path | None:
        """The file with the addresses, by which servers join and leave; None: `url` has the addresses themselves."""
        return file_of(self.url)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas, without a trailing slash.

        Raises:
            FieldError: `url` names a file, which can't be read or has a line that is not an address.
        """
        if self.url_file is not None:
            return tuple(address.url for address in self.addresses)
        return tuple(url.rstrip("/") for url in ((self.url,) if isinstance(self.url, str) else self.url))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses of the replicas, validated.

        Raises:
            FieldError: as for `urls`.
        """
        if self.url_file is not None:
            return read_addresses(str(self.url), self.token_env, self.allow_remote)
        return tuple(Address(url, self.token_env, self.allow_remote) for url in self.urls)

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`; servers elsewhere are asked when the run starts."""
        if field != "transfer":
            return None
        if self.weight_folder is not None:
            return "folder", "engine.weight_folder is set"
        if self.on_this_machine and not has_nvidia_gpu():
            return "folder", "the servers are on this machine, which has no GPU"
        return None

    @property
    def grammars(self) -> bool:
        """See `EngineSpec.grammars`."""
        return self.dialect().grammars

    @property
    def on_this_machine(self) -> bool:
        """True if all servers are on this machine, those that may join during the run included."""
        if self.url_file is not None:
            return not self.allow_remote
        return all(is_loopback(urlsplit(url).hostname or "") for url in self.urls)

    def dialect(self) -> Dialect:
        """The dialect of the servers."""
        raise NotImplementedError


def _check_transfer(kind: str) -> None:
    """Raise FieldError for what names no `WeightTransport`."""
    known = ["auto", *TRANSPORTS]
    known.remove("adapters")  # they have a field of their own
    if kind in known:
        return
    bound = f"must be {', '.join(known)} or package.module:Class"
    require(":" in kind, "transfer", kind, bound)
    try:
        class_of(kind)
    except (ImportError, AttributeError) as error:
        reason = f"can't be imported: {error}"
        raise FieldError("transfer", kind, reason, remedy="name a class that Python finds") from error
