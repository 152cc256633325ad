"""The differences between servers: the requests of each kind, and its capabilities."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from proxima.data import UserError
from proxima.data.columns import Columns, ExpertIds, Floats, Ints
from proxima.data.flow import FinishReason
from proxima.data.sampling_mask import SamplingMask
from proxima.engine.http.route_rows import RouteShape
from proxima.engine.protocol import Interrupt, PauseMode, Sampling

if TYPE_CHECKING:
    from proxima.engine.http.client import ServerClient

ENDINGS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}  # as servers call them
LARGEST_SET = 1 << 18  # tokens that could be sampled where no top-k bounds them: those of the largest vocabularies
LogProbMode = Literal["processed", "untruncated", "raw"]


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The capabilities of a server, found by requests. Nothing is inferred from a version number.

    Args:
        server: name and version, for messages: `vllm 0.32.0`.
        model: what it serves, as it calls it.
        max_length: tokens of prompt and completion together; None: it does not tell.
        dtype: of its weights, `bfloat16` and the like; None: it does not tell.
        quantization: of its weights, `fp8` and the like; None: there is none.
        log_probs: what the log-prob of a sampled token is of: `processed`, the distribution really sampled;
            `untruncated`, softmax(logits / temperature), whatever top-k, top-p and min-p leave out; or `raw`,
            softmax(logits). None: there are no log-probs.
        token_ids: completions come as token ids.
        scores: it gives log-probs of given tokens, of softmax(logits).
        weight_updates: how it takes new weights, best first; the names are the dialect's own.
        weight_version: it keeps the version of its weights, and says it.
        version_spans: each completion says which weights sampled which of its tokens.
        prompt_echo: each completion says what it continues, with its first tokens: one that does not counts as none.
        pause_modes: the modes that `Dialect.pause` accepts.
        interrupts: what it can make of running completions when new weights come, without their being sent again.
        prefix_cache: it reuses the KV of equal prefixes; None: it does not tell.
        cache_salt: a request can say whose prefixes it may read.
        seeds: a request can have a seed.
        sampling_mask: it gives the tokens that could be sampled, with each token.
        routed_experts: it gives the experts of each token.
        latest_routes: where it computes a completion's KV again under new weights, the experts are then those of the
            new weights for the tokens before too.
        batch_invariant: a completion does not depend on what else is running.
        route: the call that completions come from, where a kind of server has several.
        sleeps: it can leave its devices to others and take them again, see `SleepingDialect`.
        control: it has the calls that pause it and load weights, where these have to be switched on.
        more: what else is worth a line of `proxima engine check`.
    """

    server: str
    model: str
    max_length: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    log_probs: LogProbMode | None = None
    token_ids: bool = False
    scores: bool = False
    weight_updates: tuple[str, ...] = ()
    weight_version: bool = False
    version_spans: bool = False
    prompt_echo: bool = False
    pause_modes: frozenset[PauseMode] = frozenset()
    interrupts: frozenset[Interrupt] = frozenset()
    prefix_cache: bool | None = None
    cache_salt: bool = False
    seeds: bool = False
    sampling_mask: bool = False
    routed_experts: bool = False
    latest_routes: bool = False
    batch_invariant: bool = False
    sleeps: bool = False
    route: str = ""
    control: bool = False
    more: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """One completion, or the rest of one.

    Args:
        id: unique among all requests of the run; `abort` takes it.
        tokens: what the server continues: the prompt and, where a completion is resumed, what it has so far.
        sampling: with `max_tokens` of what is still missing; every field is sent, for servers have defaults of their
            own.
        seed: of the draws; None: the server's own.
        cache_salt: whose prefixes may be read; None: all.
        stop_tokens: ids that end the completion; they are part of it, and no other ids end it.
        chunk_tokens: tokens in a message; more make fewer messages.
        sampling_mask: give the tokens that could be sampled, with each token.
        routes: give the experts of each token, which are of this shape; None: don't.
    """

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    seed: int | None = None
    cache_salt: str | None = None
    stop_tokens: tuple[int, ...] = ()
    chunk_tokens: int = 1
    sampling_mask: bool = False
    routes: RouteShape | None = None

    @property
    def row_bytes(self) -> int:
        """The maximum number of bytes of routed experts per token."""
        return 0 if self.routes is None else self.routes.bytes_per_token

    @property
    def set_size(self) -> int:
        """The maximum number of ids per token in a sampling mask."""
        return (self.sampling.top_k or LARGEST_SET) if self.sampling_mask else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk(Columns):
    """Some tokens of a completion, in order.

    Args:
        tokens: [T] int32.
        log_prob: [T] float32, nats, in the mode of `ServerFacts.log_probs`.
        finish_reason: set on the last chunk.
        version_spans: on the last chunk, where the server tells: (version, start, end) over all tokens of the request.
        prompt_tokens: what the server says that it was asked, where it says so: compared with the request.
        sampling_mask: the tokens that could be sampled at each of these, where the server tells; T sets.
        routes: on the last chunk, where the server tells: [N, M, K] as of `RouteShape`, the experts of all tokens that
            were fed, from the first of the prompt on.
    """

    other_length: ClassVar[tuple[str, ...]] = ("prompt_tokens",)

    tokens: Ints
    log_prob: Floats
    finish_reason: FinishReason | None = None
    version_spans: tuple[tuple[str, int, int], ...] | None = None
    prompt_tokens: Ints | None = None
    sampling_mask: SamplingMask | None = None
    routes: ExpertIds | None = None


@dataclass(frozen=True, kw_only=True)
class WeightHandover:
    """New weights for a server.

    Args:
        version: theirs.
        label: what the server is to call it, so that it differs from the versions of other runs.
        folder: a Hugging Face folder with them, complete: config, tokenizer, safetensors. The server must see the path.
        how: one of `ServerFacts.weight_updates`.
        seconds: deadline of it all.
    """

    version: int
    label: str
    folder: Path
    how: str
    seconds: float = 600.0


@dataclass(frozen=True, kw_only=True)
class ServerHealth:
    """The answer of a server to a health check.

    Args:
        running, waiting: requests; None: it does not tell.
        weight_version: of its weights, as it calls it; None: it does not tell.
        model: what it serves, as it calls it; None: it does not tell.
        instance: changes when the server is started again; None: it does not tell.
    """

    running: int | None = None
    waiting: int | None = None
    weight_version: str | None = None
    model: str | None = None
    instance: str | None = None


def check_scorable(url: str, facts: ServerFacts, count: int, option: str) -> None:
    """Raise UserError if the tokens fill the server's whole context: it needs room for one more."""
    if facts.max_length is not None and count >= facts.max_length:
        message = f"{url}: {count} tokens can't be scored at a maximum length of {facts.max_length}"
        raise UserError(message, remedy=f"start the server with {option} or more")


class Dialect(Protocol):
    """The requests that one kind of server takes. Holds no state of a server: one object serves many.

    Every method raises `ServerError` of `client.py` for a call that failed, and `UserError` for what another call
    would not mend.
    """

    kind: ClassVar[str]

    async def probe(self, client: "ServerClient") -> ServerFacts:
        """Ask what the server can do; wakes one that sleeps, and generates a token or two to see."""
        ...

    def stream(self, client: "ServerClient", facts: ServerFacts, request: TokenRequest) -> AsyncIterator[Chunk]:
        """The completion, in chunks as they come. Closing it ends the request at the server. It may take forever: the
        caller measures the time between tokens."""
        ...

    async def score(self, client: "ServerClient", facts: ServerFacts, prompt: Ints, tokens: Ints) -> Floats:
        """[T] float32, nats: log-probs of `tokens` after `prompt` under softmax(logits)."""
        ...

    async def tokenize(self, client: "ServerClient", facts: ServerFacts, text: str) -> list[int] | None:
        """The ids of a text, no special tokens added; None: the server has no such call."""
        ...

    async def pause(self, client: "ServerClient", facts: ServerFacts, mode: PauseMode) -> None:
        """Stop sampling; returns when no token is being sampled. See `Engine.pause` for the modes."""
        ...

    async def resume(self, client: "ServerClient", facts: ServerFacts) -> None:
        """Resume sampling."""
        ...

    async def abort(self, client: "ServerClient", facts: ServerFacts, ids: Sequence[str]) -> None:
        """End requests by their `TokenRequest.id`; unknown ones are no error."""
        ...

    async def load_weights(self, client: "ServerClient", facts: ServerFacts, weights: WeightHandover) -> None:
        """Load new weights into a paused server and tell it their version. Not transactional: see `weight_probe`."""
        ...

    async def reset_prefix_cache(self, client: "ServerClient", facts: ServerFacts, *, running: bool) -> None:
        """Make sure that no KV of earlier weights is read any more: that of finished requests, and with `running` also
        that of paused requests, whose KV is computed again."""
        ...

    async def health(self, client: "ServerClient", facts: ServerFacts) -> ServerHealth:
        """A health check: cheap, and answered even while the server is busy or paused."""
        ...


class SleepingDialect(Dialect, Protocol):
    """Dialect of server kinds that may support `ServerFacts.sleeps`."""

    async def sleep(self, client: "ServerClient", facts: ServerFacts) -> None:
        """Let a paused server, which holds no completion, give up the memory of its devices."""
        ...

    async def wake(self, client: "ServerClient", facts: ServerFacts) -> None:
        """Let it reallocate the memory, with the weights that it had. It stays paused."""
        ...
