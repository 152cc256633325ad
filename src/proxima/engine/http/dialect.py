"""The differences between servers: their calls and their capabilities."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Columns, ExpertIds, Floats, Ints, SamplingMask
from proxima.data.flow import FinishReason
from proxima.engine.http.answer_values import RouteShape, id_list
from proxima.engine.http.client import ANSWER, EVENT, SET, TOKEN, ServerClient, StreamSize, as_expected
from proxima.engine.protocol import PauseMode, Sampling

ENDINGS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}  # by the servers' names
LARGEST_SET = 1 << 18  # most tokens that could be sampled without a top-k: the size of the largest vocabularies
LogProbMode = Literal["processed", "untruncated", "raw"]
# begins a server's label of its weights while an update changes them, or has been broken off
INCOMPLETE = "incomplete "
ADAPTER = "proxima"  # the name of the run's adapter at a server
BROKEN_UPDATE = "incomplete: their last update was interrupted; train with the server, or start it again"
UPDATE_POLLS = 10  # one a second, before an update counts as broken off


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """A server's capabilities, as queried from it. Nothing is inferred from a version number. Abilities of all
    supported versions are not queried: they score given tokens, repeat the prompt that a completion continues, and can
    be paused with the modes `abort` and `keep` if they take weights.

    Args:
        server: name and version, for messages: `vllm 0.32.0`.
        model: the server's name for the model that it serves.
        max_length: tokens of prompt and completion together; None: not reported.
        dtype: of its weights, `bfloat16` and the like; None: not reported.
        quantization: of its weights, `fp8` and the like; None: not quantized.
        log_probs: the distribution that the log-prob of a sampled token refers to: `processed`, the one actually
            sampled from; `untruncated`, softmax(logits / temperature), regardless of top-k, top-p and min-p; or `raw`,
            softmax(logits). None: there are no log-probs.
        takes_weights: it loads new weights from a folder, can be paused for that, which ends its completions or holds
            them, and reports the version of its weights.
        version_spans: each completion says which weights sampled which of its tokens.
        keeps_kv: completions that it holds while new weights arrive can keep their KV; otherwise it recomputes the KV.
        seeds: a request can have a seed.
        sampling_mask: with each token it returns the tokens that could have been sampled.
        largest_mask: the largest top-k with which it returns them, set by its option `mask_option`; None: any.
        sampled_with_masks: with a mask it also returns the log-prob under the distribution sampled from.
        routed_experts: it returns the experts of each token.
        latest_routes: if it recomputes a completion's KV under new weights, it reports the new weights' experts for the
            earlier tokens too.
        batch_invariant: a completion with a seed does not depend on the other running requests.
        transfers: the ways to send it weights, of the table `TRANSPORTS`.
        adapter_rank: the largest rank of an adapter that it loads; 0: it loads none.
        adapter: its name for the adapter that it was given; requests then name it. None: they are for the model.
        workers: processes that hold its weights, each of which receives them.
        joint_groups: it may be in a process group with other servers: its calls end by a deadline if one of them hangs.
        device: of its weights, `cpu` or `cuda`; None: not reported.
        sleeps: it can release its devices and take them back; see `Dialect.sleep`.
        sizes: of its model, as far as it tells them, by their names in a config; see `model_sizes`.
        more: further facts, shown by `proxima engine probe`, one line each.
    """

    server: str
    model: str
    max_length: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    log_probs: LogProbMode | None = None
    takes_weights: bool = False
    version_spans: bool = False
    keeps_kv: bool = False
    seeds: bool = False
    sampling_mask: bool = False
    largest_mask: int | None = None
    mask_option: str = ""
    sampled_with_masks: bool = False
    routed_experts: bool = False
    latest_routes: bool = False
    batch_invariant: bool = False
    sleeps: bool = False
    transfers: tuple[str, ...] = ("folder",)
    adapter_rank: int = 0
    adapter: str | None = None
    workers: int = 1
    joint_groups: bool = True
    device: str | None = None
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)


class WrittenTokens(NamedTuple):
    """Tokens for a server that reads images with its own processor.

    written: with what a template writes for each image. images: these, as addresses that hold them. read: what the
    server makes of both.
    """

    written: list[int]
    images: tuple[str, ...]
    read: Ints

    @classmethod
    def of(cls, tokens: Ints, tokenizer: Any) -> "WrittenTokens":
        if (tokens >= 0).all():
            return cls(tokens.tolist(), (), tokens)
        written, images = tokenizer.images.folded(tokens.tolist())
        return cls(written, tuple(map(tokenizer.images.address, images)), tokens_as_read(tokens, tokenizer))


def tokens_as_read(tokens: Ints, tokenizer: Any) -> Ints:
    """The tokens with the model's own token of an image."""
    if (tokens >= 0).all():
        return tokens
    return np.where(tokens < 0, tokenizer.images.config.image_token_id, tokens).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """A request for one completion, or for the rest of one.

    Args:
        id: unique among all requests of the run.
        tokens: the tokens that the server continues: the prompt and, if a completion is resumed, its tokens so far.
        sampling: its `max_tokens` counts the tokens still missing; every field is sent, because servers have their own
            defaults.
        seed: of the draws; None: the server's own.
        cache_salt: whose prefixes may be read, if the server separates them; None: all.
        stop_tokens: ids that end the completion; they are part of it, and no other ids end it.
        chunk_tokens: tokens per message; a larger number means fewer messages.
        sampling_mask: return, with each token, the tokens that could have been sampled.
        routes: return the experts of each token, in this shape; None: don't.
        grammar: see `Request.grammar`; only a server whose kind has `Dialect.grammars` is sent one.
        images: those that the prompt shows, as addresses that hold them; `tokens` then have what a template writes for
            each, and the server reads `read` tokens.
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
    grammar: str | None = None
    images: tuple[str, ...] = ()
    read: int = 0

    def stream_size(self, *, repeats: bool = False) -> StreamSize:
        """Limits of the answer: generous, so that only something that is not a completion exceeds them.

        Args:
            repeats: each message may contain the whole answer so far.
        """
        tokens = self.sampling.max_tokens
        prompt = self.read or len(self.tokens)
        line = ANSWER // 16 + SET * prompt + tokens * TOKEN
        if self.sampling_mask:
            line += tokens * SET * (self.sampling.top_k or LARGEST_SET)
        if self.routes is not None:
            line += self.routes.bytes_per_token * (prompt + tokens)
        if repeats:
            return StreamSize(line=line, total=line * (tokens + 1))
        return StreamSize(line=line, total=line + (tokens + 16) * EVENT)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk(Columns):
    """Some tokens of a completion, in order.

    Args:
        tokens: [T] int32.
        log_prob: [T] float32, nats, in the mode of `ServerFacts.log_probs`.
        sampled_log_prob: [T] float32, nats, under the distribution sampled from, where the server reports it beside
            `log_prob`.
        finish_reason: set on the last chunk.
        version_spans: on the last chunk, if the server reports them: (version, start, end) over all tokens of the
            request.
        prompt_tokens: the prompt as echoed by the server, if it does so; compared with the request.
        sampling_mask: the tokens that could have been sampled at each position, if the server reports them; T sets.
        routes: on the last chunk, if the server reports them: [N, M, K] as in `RouteShape`, the experts of all input
            tokens, starting with the first of the prompt.
    """

    tokens: Ints
    log_prob: Floats
    sampled_log_prob: Floats | None = None
    finish_reason: FinishReason | None = None
    version_spans: tuple[tuple[str, int, int], ...] | None = None
    prompt_tokens: Ints | None = None
    sampling_mask: SamplingMask | None = None
    routes: ExpertIds | None = None


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """A server in a process group; rank 0 is the trainer, which broadcasts from there.

    Args:
        name: of the group, which no other group has had.
        host, port: of the trainer's TCPStore, as the server reaches it.
        rank: of the server's first worker.
        size: number of members, the trainer included.
        backend: `gloo` or `nccl`.
        seconds: deadline of each collective.
        form_seconds: deadline to form the group.
        reused: the server is in the group already.
    """

    name: str
    host: str
    port: int
    rank: int
    size: int
    backend: str
    seconds: float
    form_seconds: float
    reused: bool


@dataclass(frozen=True, kw_only=True)
class NewWeights:
    """New weights for a server.

    Args:
        version: their version.
        label: the server's name for this version, which distinguishes it from the versions of other runs.
        seconds: deadline of each call of the update.
        size: bytes of the weights.
    """

    version: int
    label: str
    seconds: float = 600.0
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightsInFolder(NewWeights):
    """New weights in files.

    Args:
        folder: a complete Hugging Face folder with them: config, tokenizer, safetensors. The server must see the path.
    """

    folder: Path


@dataclass(frozen=True, kw_only=True)
class ServerHealth:
    """A server's response to a health check.

    Args:
        waiting: requests that wait for a slot; 0 if not reported.
        weight_version: the server's label of its weights; None: not reported.
        model: the server's name for the model that it serves; None: not reported.
    """

    waiting: int = 0
    weight_version: str | None = None
    model: str | None = None


def further_facts(log_probs: str | None, *, incomplete: bool) -> dict[str, str]:
    """`ServerFacts.more`.

    Args:
        log_probs: why their distribution is not known; None or empty: it is.
        incomplete: the server was found in the middle of an update of its weights.
    """
    facts = dict[str, str]()
    if log_probs:
        facts["log-probs"] = log_probs
    if incomplete:
        facts["weights"] = BROKEN_UPDATE
    return facts


def is_incomplete(label: object) -> bool:
    """True for the label of a server that has received only a part of its last weights."""
    return isinstance(label, str) and label.startswith(INCOMPLETE)


def check_scorable(url: str, facts: ServerFacts, count: int, option: str) -> None:
    """Raise UserError if `count` tokens fill the server's maximum length: it needs room for one more token."""
    if facts.max_length is not None and count >= facts.max_length:
        message = f"{url}: {count} tokens can't be scored at a maximum length of {facts.max_length}"
        raise UserError(message, remedy=f"start the server with {option} or more")


class Dialect(Protocol):
    """The calls of one kind of server. Keeps no state of a server: one object serves many.

    Every method raises `ServerError` of `client.py` for a call that failed, and `UserError` if a retry would not help.
    """

    kind: ClassVar[str]
    length_option: ClassVar[str] = "a maximum length of"  # the server's option for it
    spare_tokens: ClassVar[int] = 0  # tokens of this length that no prompt may reach into
    checks_transfers: ClassVar[bool] = False  # see `check_transfer`
    file_names: ClassVar[bool] = False  # it takes weights under the names of the model's files
    grammars: ClassVar[bool] = False  # its requests may have a grammar
    gaps: ClassVar[bool] = True  # its workers take buckets with gaps between tensors
    offers: ClassVar[tuple[str, ...]] = ("folder",)  # the `transfers` of a server that proxima starts
    sleep_options: ClassVar[tuple[str, ...]] = ()  # the server's options to release its devices, see `sleep`

    async def probe(self, client: ServerClient) -> ServerFacts:
        """Find out what the server can do; wakes a sleeping server, and generates a token or two as a test."""
        ...

    def stream(self, client: ServerClient, facts: ServerFacts, request: TokenRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the completion in chunks as they arrive. Closing the stream ends the request at the server. It has no
        timeout: the caller measures the time between tokens."""
        ...

    async def score(self, client: ServerClient, facts: ServerFacts, tokens: WrittenTokens, first: int) -> Floats:
        """[T - first] float32, nats: log-probs of the tokens from place `first` on under softmax(logits), without
        meaning for those of images."""
        ...

    async def tokenize(self, client: ServerClient, facts: ServerFacts, text: str) -> list[int]:
        """The token ids of a text, no special tokens added."""
        answer = await client.post("/tokenize", {"model": facts.model, "prompt": text, "add_special_tokens": False})
        with as_expected(client, "/tokenize", answer):
            return id_list(answer["tokens"], "tokens")

    async def pause(self, client: ServerClient, facts: ServerFacts, mode: PauseMode) -> None:
        """Stop sampling; returns when no token is being sampled. See `Engine.pause` for the modes."""
        ...

    async def resume(self, client: ServerClient, facts: ServerFacts) -> None:
        """Resume sampling."""
        ...

    async def load_folder(self, client: ServerClient, facts: ServerFacts, weights: WeightsInFolder) -> None:
        """Load new weights from a folder into a paused server and tell it their version. Not transactional: if this
        fails, a server that keeps a part of them has a label that `is_incomplete`. See also `weights/probe.py`."""
        ...

    async def load_updates(
        self, client: ServerClient, facts: ServerFacts, weights: NewWeights, updates: AsyncIterator[Mapping[str, Any]]
    ) -> None:
        """Like `load_folder`, but the bytes come as a transport sends them.

        Args:
            updates: what each call of the server's weight API is given. The next one is asked for when the server has
                loaded the one before it.
        """
        raise RuntimeError(f"{self.kind} loads folders only")

    async def check_transfer(self, client: ServerClient, question: str, content: object, seconds: float) -> None:
        """Let the workers check that weights can be sent in a certain way. Only called if `checks_transfers` is set.

        Args:
            question: of `QUESTIONS` in `proxima_vllm_worker`.
            content: what is asked about, as JSON.
            seconds: deadline.

        Raises:
            ServerError: they can't; the message says why.
        """
        raise RuntimeError(f"{self.kind} can't be asked")

    async def load_adapter(
        self, client: ServerClient, facts: ServerFacts, weights: WeightsInFolder, link: Path
    ) -> None:
        """Load new adapters alone into a paused server and tell it their version. A server with `adapters` among its
        `ServerFacts.transfers` is asked to, and answers requests that name `ADAPTER`.

        Args:
            weights: in a folder as peft writes it.
            link: a path that leads to this folder, and to later ones when they are loaded.
        """
        raise RuntimeError(f"{self.kind} loads no adapters")

    def store_prefixes(self, name: str, backend: str) -> tuple[str, ...]:
        """The prefixes, the outermost first, of the keys in the trainer's store by which workers form a group.

        Args:
            name: of the group.
            backend: `gloo` or `nccl`.
        """
        return (name,)

    async def reset_prefix_cache(self, client: ServerClient, facts: ServerFacts, *, running: bool) -> None:
        """Discard the KV of earlier weights: that of finished requests, and with `running` also that of paused
        requests, whose KV is then recomputed."""
        ...

    async def forget_images(self, client: ServerClient, facts: ServerFacts) -> None:
        """Discard cached outputs of a vision tower with earlier weights."""
        raise UserError(f"{facts.server} accepts no images")

    async def health(self, client: ServerClient, facts: ServerFacts) -> ServerHealth:
        """A health check: cheap, and answered even while the server is busy or paused."""
        ...

    async def sleep(self, client: ServerClient, facts: ServerFacts) -> None:
        """Make a paused server without completions release the memory of its devices. Only a server with
        `ServerFacts.sleeps` is asked to."""
        raise RuntimeError(f"{self.kind} does not sleep")

    async def wake(self, client: ServerClient, facts: ServerFacts) -> None:
        """Make it take back the memory of its weights, with the weights that it had. It stays paused, and can receive
        new ones; `wake_cache` follows."""
        raise RuntimeError(f"{self.kind} does not sleep")

    async def wake_cache(self, client: ServerClient, facts: ServerFacts) -> None:
        """Make it take back the memory of its KV cache, which incoming weights may have needed. It stays paused."""
        raise RuntimeError(f"{self.kind} does not sleep")
