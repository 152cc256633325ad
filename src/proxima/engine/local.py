"""The engine in this process: continuous batching over a decoder with its own copy of the weights."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data import Completion, FinishReason, Prompt, UserError, require
from proxima.data.random import completion_uniforms
from proxima.engine.decoder import ROWS, Decoder, padded_rows
from proxima.engine.fast_decoder import FastDecoder, supports
from proxima.engine.general_decoder import GeneralDecoder, RecomputeDecoder
from proxima.engine.protocol import Health, Request
from proxima.engine.sampler import Sampled, SamplingRows, sample_tokens
from proxima.model.load import DTYPES, LoadedModel


@dataclass(frozen=True, kw_only=True)
class Local:
    """The engine in this process, on its own copy of the policy's weights.

    Args:
        slots: completions that run at once; more wait. Rounded up to a multiple of 8.
        dtype: of the engine's matrix products and cache, `bfloat16` or `float32`; norms, residual stream and log-probs
            are float32.
        decoder: `fast` (Llama, Qwen2, Qwen3), `general` (any Hugging Face decoder), or `auto`: fast where it can.
        prefill_tokens: prompt tokens run at once.
        top_k_log_probs: how many of the most probable tokens come with each token, for the divergences `topk_tv` and
            `topk_kl`; 0: none.
    """

    slots: int = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    decoder: Literal["auto", "fast", "general"] = "auto"
    prefill_tokens: int = 2048
    top_k_log_probs: int = 0

    @property
    def provides(self) -> frozenset[str]:
        """What a completion of this engine brings for the batch."""
        always = frozenset({"behavior_log_prob", "policy_version"})
        return always | {"top_k", "behavior_top_k_log_prob", "top_k_log_prob"} if self.top_k_log_probs else always

    def __post_init__(self) -> None:
        require(self.slots >= 1, "slots", self.slots, "must be >= 1")
        require(self.dtype in ("bfloat16", "float32"), "dtype", self.dtype, "must be bfloat16 or float32")
        require(self.top_k_log_probs >= 0, "top_k_log_probs", self.top_k_log_probs, "must be >= 0; 0 is none")
        require(self.prefill_tokens >= 1, "prefill_tokens", self.prefill_tokens, "must be >= 1")

    def build(self, loaded: LoadedModel, *, max_length: int | None = None) -> "LocalEngine":
        """The running engine."""
        return LocalEngine(
            loaded,
            slots=self.slots,
            dtype=DTYPES[self.dtype],
            decoder=self.decoder,
            prefill_tokens=self.prefill_tokens,
            top_k_log_probs=self.top_k_log_probs,
            max_length=max_length,
        )


@dataclass(eq=False)
class _Row:
    """A running completion. Its slot is its place in `LocalEngine.running`."""

    request: Request
    sink: Callable[[Completion], None]
    uniform: np.ndarray
    tokens: list[int] = field(default_factory=list)
    sampled_log_prob: list[float] = field(default_factory=list)
    untruncated_log_prob: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    top_k: list[tuple[int, ...]] = field(default_factory=list)
    top_k_log_prob: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.prompt.tokens) + len(self.tokens)


@dataclass(eq=False)
class _Waiting:
    """A prompt whose samples have not all begun; its KV is kept from the first admission to the last."""

    prompt: Prompt
    requests: deque[tuple[Request, Callable[[Completion], None]]]
    hidden: Tensor | None = None
    kv: Tensor | None = None


def make_decoder(model: nn.Module, dtype: torch.dtype, kind: str = "auto") -> Decoder:
    """The decoder that `kind` asks for.

    Raises:
        ValueError: `fast` was asked for and this architecture has no fast path.
    """
    reason = supports(model)
    if kind == "fast" and reason:
        raise UserError(f"engine.decoder='fast': {reason}; use auto or general.")
    if kind in ("auto", "fast") and reason is None:
        return FastDecoder(model, dtype)
    interface = getattr(model, "_supports_attention_backend", False)
    return GeneralDecoder(model, dtype) if interface else RecomputeDecoder(model, dtype)


class LocalEngine:
    """See `Engine` for the protocol. Between two tokens it gives way to the event loop, so scorers and other callers go
    on beside it.

    Tokens of a request depend on (seed, prompt uid, sample) and the weights, never on what else is queued: draws are by
    counter, and row counts are padded so that a row's arithmetic does not depend on how many others there are.

    Args:
        loaded: model and tokenizer; the weights are copied.
        max_length: tokens of prompt and completion together; None is the model's own limit.
        The others: see `Local`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        slots: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        decoder: str = "auto",
        prefill_tokens: int = 2048,
        top_k_log_probs: int = 0,
        max_length: int | None = None,
    ) -> None:
        self.tokenizer: Any = loaded.tokenizer
        self.decoder = make_decoder(loaded.model, dtype, decoder)
        self.device = loaded.model.device
        self.slots = padded_rows(slots)
        self.prefill_tokens = prefill_tokens
        self.top_k_log_probs = top_k_log_probs
        self.max_length = min(max_length or loaded.max_length, loaded.max_length)
        self.stop_tokens = frozenset(loaded.stop_tokens)
        self.cache = self.decoder.new_cache(self.slots)
        self.version = 0
        self.running: list[_Row] = []
        self.waiting: deque[_Waiting] = deque()
        self.generated_tokens = 0
        self._open = asyncio.Event()
        self._open.set()
        self._rows: SamplingRows | None = None  # of `running`; None when it changed
        self._rebuild = False

    # ---- the protocol ------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Stream completions as they end. Several callers may do so at once: they share the slots.

        Raises:
            ValueError: a prompt that leaves no room for one token.
        """
        done: deque[Completion] = deque()
        pending = len(requests)
        sink = done.append  # this caller's mark on its rows
        self._enqueue(requests, sink)
        try:
            while pending:
                await self._open.wait()
                if not done:
                    self._step()
                while done:
                    pending -= 1
                    yield done.popleft()
                await asyncio.sleep(0)
        finally:
            if pending:
                self._forget(sink)

    async def publish(self, weights: nn.Module, version: int) -> None:
        """Copy the weights of a module of the same architecture. Running completions go on under them: their KV is
        computed afresh."""
        self.decoder.load(weights)
        self.version = version
        self._rebuild = bool(self.running)
        for entry in self.waiting:
            entry.hidden = entry.kv = None

    async def pause(self) -> None:
        """Steps are not interrupted by the event loop, so between two of them nothing is being sampled."""
        self._open.clear()

    async def resume(self) -> None:
        self._open.set()

    async def abort(self, prompt_uid: int) -> None:
        for row in [r for r in self.running if r.request.prompt.uid == prompt_uid]:
            self._finish(row, "abort")
        for entry in [w for w in self.waiting if w.prompt.uid == prompt_uid]:
            self.waiting.remove(entry)
            for request, sink in entry.requests:
                sink(self._completion(_Row(request, sink, np.empty(0)), "abort"))

    async def health(self) -> Health:
        waiting = sum(len(entry.requests) for entry in self.waiting)
        return Health(ok=True, version=self.version, running=len(self.running), waiting=waiting)

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    def _enqueue(self, requests: Sequence[Request], sink: Callable[[Completion], None]) -> None:
        groups: dict[int, _Waiting] = {}
        for request in requests:
            prompt = request.prompt
            if len(prompt.tokens) >= self.max_length:
                raise UserError(
                    f"prompt {prompt.uid} has {len(prompt.tokens)} tokens; the limit, one new token included, is "
                    f"{self.max_length}."
                )
            entry = groups.setdefault(prompt.uid, _Waiting(prompt, deque()))
            entry.requests.append((request, sink))
        self.waiting.extend(groups.values())

    def _forget(self, sink: Callable[[Completion], None]) -> None:
        """A caller went away: drop what it asked for."""
        for row in [r for r in self.running if r.sink is sink]:
            self._release(row)
        for entry in list(self.waiting):
            entry.requests = deque(pair for pair in entry.requests if pair[1] is not sink)
            if not entry.requests:
                self.waiting.remove(entry)

    @torch.no_grad()
    def _step(self) -> None:
        """One token for every running row, or the first token of rows that enter."""
        if self._rebuild:
            self._recompute_running()
        # a prefill reads all weights: wait until it is worth it, unless nothing else is to do
        free = self.slots - len(self.running)
        if self.waiting and (not self.running or free >= max(1, self.slots // 8)):
            self._admit(free)
        elif self.running:
            self._decode()

    def _admit(self, free: int) -> None:
        entering: list[tuple[_Waiting, list[_Row]]] = []
        fresh: list[_Waiting] = []
        budget = self.prefill_tokens
        while self.waiting and free > 0:
            entry = self.waiting[0]
            if entry.kv is None:
                if fresh and len(entry.prompt.tokens) > budget:
                    break
                budget -= len(entry.prompt.tokens)
                fresh.append(entry)
            rows = [self._new_row(*entry.requests.popleft()) for _ in range(min(free, len(entry.requests)))]
            free -= len(rows)
            entering.append((entry, rows))
            if entry.requests:
                break
            self.waiting.popleft()
        if fresh:
            hidden, kv = self.decoder.prefill([entry.prompt.tokens for entry in fresh])
            for i, entry in enumerate(fresh):
                entry.hidden, entry.kv = hidden[i], kv[i]
        first = len(self.running)
        for entry, rows in entering:
            assert entry.kv is not None
            slots = torch.arange(len(self.running), len(self.running) + len(rows), device=self.device)
            self.running.extend(rows)
            self._reserve(rows)
            self.cache.put(slots, entry.kv)
        self._rows = None
        hidden = torch.stack([entry.hidden for entry, _ in entering if entry.hidden is not None])
        which = torch.tensor([i for i, (_, rows) in enumerate(entering) for _ in rows], device=self.device)
        rows = self.running[first:]
        self._accept(rows, self._sample(hidden, self._sampling(rows), rows, which))

    def _sample(
        self, hidden: Tensor, settings: SamplingRows, rows: Sequence[_Row], which: Tensor | None = None
    ) -> Sampled:
        """One token for each of `rows`, from `hidden` [n, D], or from those of its rows that `which` names."""
        logits = self.decoder.logits(hidden)
        return sample_tokens(
            logits if which is None else logits[which], settings, self._uniform(rows), self.top_k_log_probs
        )

    def _new_row(self, request: Request, sink: Callable[[Completion], None]) -> _Row:
        uniform = completion_uniforms(request.seed, request.prompt.uid, request.sample, request.sampling.max_tokens)
        return _Row(request, sink, uniform)

    def _reserve(self, rows: Sequence[_Row]) -> None:
        longest = max(len(row.request.prompt.tokens) + row.request.sampling.max_tokens for row in rows)
        self.cache.reserve(min(longest, self.max_length))

    def _decode(self) -> None:
        rows = self.running
        padding = [0] * (padded_rows(len(rows)) - len(rows))
        tokens = torch.tensor([row.tokens[-1] for row in rows] + padding, device=self.device)
        position = torch.tensor([row.length - 1 for row in rows] + padding, device=self.device)
        hidden = self.decoder.step(tokens, position, self.cache)[: len(rows)]
        if self._rows is None:
            self._rows = self._sampling(rows)
        self._accept(list(rows), self._sample(hidden, self._rows, rows))

    def _recompute_running(self) -> None:
        """New weights: every running row's KV again, from its prompt and the tokens it has."""
        at = 0
        while at < len(self.running):
            batch = self.running[at : at + ROWS]
            _, kv = self.decoder.prefill(
                [
                    np.concatenate([row.request.prompt.tokens, row.tokens[:-1]], dtype=np.int32, casting="unsafe")
                    for row in batch
                ]
            )
            for i, held in enumerate(kv):
                self.cache.put(torch.tensor([at + i], device=self.device), held)
            at += len(batch)
        self._rebuild = False

    def _sampling(self, rows: Sequence[_Row]) -> SamplingRows:
        settings = [row.request.sampling for row in rows]
        return SamplingRows(
            temperature=torch.tensor([s.temperature for s in settings], device=self.device),
            top_k=torch.tensor([s.top_k for s in settings], device=self.device),
            top_p=torch.tensor([s.top_p for s in settings], device=self.device),
            min_p=torch.tensor([s.min_p for s in settings], device=self.device),
        )

    def _uniform(self, rows: Sequence[_Row]) -> Tensor:
        return torch.tensor(np.array([row.uniform[len(row.tokens)] for row in rows]), device=self.device)

    def _accept(self, rows: Sequence[_Row], sampled: Sampled) -> None:
        self.generated_tokens += len(rows)
        columns = (sampled.token.tolist(), sampled.sampled_log_prob.tolist(), sampled.untruncated_log_prob.tolist())
        for at, (row, token, behavior, untruncated) in enumerate(zip(rows, *columns, strict=True)):
            row.tokens.append(token)
            row.sampled_log_prob.append(behavior)
            row.untruncated_log_prob.append(untruncated)
            row.version.append(self.version)
            if sampled.top_k is not None and sampled.top_k_log_prob is not None:
                row.top_k.append(tuple(sampled.top_k[at].tolist()))
                row.top_k_log_prob.append(tuple(sampled.top_k_log_prob[at].tolist()))
            reason = self._reason(row, token)
            if reason:
                self._finish(row, reason)

    def _reason(self, row: _Row, token: int) -> FinishReason | None:
        if token in self.stop_tokens or (row.request.sampling.stop and self._stop_at(row) is not None):
            return "stop"
        if len(row.tokens) >= row.request.sampling.max_tokens or row.length >= self.max_length:
            return "length"
        return None

    def _stop_at(self, row: _Row) -> int | None:
        """Where the first stop string begins in the text, or None. The whole text is decoded: a stop string may span
        tokens."""
        text = self.tokenizer.decode(row.tokens, skip_special_tokens=True)
        found = [at for stop in row.request.sampling.stop if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        self._release(row)
        row.sink(self._completion(row, reason))

    def _release(self, row: _Row) -> None:
        slot, last = self.running.index(row), len(self.running) - 1
        if slot != last:
            self.cache.move(last, slot, self.running[last].length)
            self.running[slot] = self.running[last]
        self.running.pop()
        self._rows = None

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        text = self.tokenizer.decode(row.tokens, skip_special_tokens=True)
        if row.request.sampling.stop and (at := self._stop_at(row)) is not None:
            text = text[:at]
        top = self.top_k_log_probs
        return Completion(
            prompt_uid=row.request.prompt.uid,
            sample=row.request.sample,
            tokens=np.array(row.tokens, np.int32),
            text=text,
            sampled_log_prob=np.array(row.sampled_log_prob, np.float32),
            untruncated_log_prob=np.array(row.untruncated_log_prob, np.float32),
            policy_version=np.array(row.version, np.int32),
            finish_reason=reason,
            temperature=row.request.sampling.temperature,
            top_k=np.array(row.top_k, np.int32).reshape(-1, top) if top else None,
            top_k_log_prob=np.array(row.top_k_log_prob, np.float32).reshape(-1, top) if top else None,
        )


async def collect(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    """All completions in the order of the requests."""
    place = {(r.prompt.uid, r.sample): i for i, r in enumerate(requests)}
    found: dict[int, Completion] = {}
    async for completion in engine.generate(requests):
        found[place[completion.prompt_uid, completion.sample]] = completion
    return [found[i] for i in sorted(found)]
