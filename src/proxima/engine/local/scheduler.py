"""Continuous batching: selects the completions that run, and decodes one token at a time for all of them."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxima.data import NotFiniteError
from proxima.data.flow import Completion, FinishReason, Prompt
from proxima.data.random import completion_uniforms
from proxima.engine.local.decoder import ROWS, Decoder, padded_rows
from proxima.engine.local.kv_cache import Beginning, PrefixCache
from proxima.engine.local.sampler import Sampled, SamplingRows, sample_tokens
from proxima.engine.local.token_table import Lines, TokenTable
from proxima.engine.protocol import GrammarRefusedError, InFlight, Request, check_prompt
from proxima.model.chat.written_text import sampled_text, stop_string, written_text
from proxima.model.pretrained import LoadedModel

Sink = Callable[[Completion], None]
WINDOW = 64  # most steps whose tokens are buffered before they are written to the table


@dataclass(eq=False)
class RunningRequest:
    """A running completion. Its cache slot is its index in `Scheduler.running`; `line` is its line of the table."""

    request: Request
    sink: Sink
    line: int
    beginnings: Sequence[Beginning]  # of its cache row
    prompt_routes: Tensor | None  # [P, M, K], see `Decoder.routes`


@dataclass(eq=False)
class WaitingPrompt:
    """A prompt with requests that are not running yet; its KV is kept from the first admission to the last, and so are
    its routes."""

    prompt: Prompt
    requests: deque[tuple[Request, Sink]]
    hidden: Tensor | None = None
    kv: Tensor | None = None
    beginnings: Sequence[Beginning] = ()
    routes: Tensor | None = None
    shared: tuple[
        int, ...
    ] = ()  # its shared prefix, and the shared lengths of its requests, if the decoder takes a past


@dataclass(frozen=True, kw_only=True)
class RunningBatch:
    """The next steps of some running requests: WINDOW of them, or fewer until one of the requests may end.

    All inputs of the steps are read from the table beforehand, and the sampled tokens are written at the end.

    Args:
        requests, lines, settings: the n requests, their lines of the table, their sampling settings.
        last: [padded n] int64, the last token of each request; 0 in the padding. The decoder's input.
        longest: tokens of the longest request, including the first draw's input.
        position, uniform: for each step, the positions of `last` [padded n], 0 in the padding, and the draws [n].
        sampled: the samples of the steps so far.
    """

    requests: Sequence[RunningRequest]
    lines: Lines
    settings: SamplingRows
    last: Tensor
    longest: int
    position: Sequence[Tensor]
    uniform: Sequence[Tensor]
    sampled: list[Sampled] = field(default_factory=list)

    @classmethod
    def of(cls, requests: Sequence[RunningRequest], table: TokenTable, device: torch.device) -> "RunningBatch":
        sampling = [running.request.sampling for running in requests]
        lines = np.array([running.line for running in requests], np.int64)
        steps = 1 if any(settings.stop for settings in sampling) else WINDOW
        last, position, uniform = table.ahead(lines, steps)
        padding = (0, padded_rows(len(lines)) - len(lines))
        return cls(
            requests=list(requests),
            lines=lines,
            settings=SamplingRows.of(sampling, device),
            last=F.pad(torch.from_numpy(last), padding).to(device),
            longest=int(position[0].max()) + 1,
            position=F.pad(torch.from_numpy(position), padding).to(device).unbind(),
            uniform=torch.from_numpy(uniform).to(device).unbind(),
        )


class Scheduler:
    """Runs requests on a decoder, independently of any event loop.

    Args:
        decoder: of the model.
        loaded: its tokenizer and its stop tokens.
        slots: number of concurrent completions, a multiple of ROWS.
        max_length: tokens of prompt and completion together.
        prefill_tokens: prompt tokens per prefill.
        top_k: most probable tokens reported with each token.
        sampling_mask: report the tokens that could have been sampled, where sampling is truncated.
    """

    def __init__(
        self,
        decoder: Decoder,
        loaded: LoadedModel,
        *,
        slots: int,
        max_length: int,
        prefill_tokens: int,
        top_k: int = 0,
        sampling_mask: bool = False,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = loaded.tokenizer
        self.slots = slots
        self.max_length = max_length
        self.stop_tokens = frozenset(loaded.stop_tokens)
        self.prefill_tokens = prefill_tokens
        self.top_k = top_k
        self.sampling_mask = sampling_mask
        self.cache = decoder.new_cache(slots)
        self.table = TokenTable(slots)
        self.running: list[RunningRequest] = []
        self.waiting: deque[WaitingPrompt] = deque()
        self.starts_waiting = True  # False: waiting requests stay waiting
        self.version = 0
        self.generated_tokens = 0  # of all callers
        self.completions_ended = 0  # likewise
        self.prefixes = PrefixCache()
        self._batch: RunningBatch | None = None  # the steps not yet in the table
        self._rebuild = False

    def enqueue(self, requests: Sequence[Request], sink: Sink) -> None:
        """Add requests; `sink` receives each completion, and identifies the caller.

        Raises:
            UserError: a prompt is empty, or leaves no room for one token; no request is added.
        """
        groups: dict[tuple[int, bytes, tuple[int, ...]], WaitingPrompt] = {}
        for request in requests:
            prompt = request.prompt
            check_prompt(prompt, self.max_length)
            if request.grammar is not None:
                raise GrammarRefusedError("the local engine has no grammars", remedy="use vllm or sglang")
            shared = self._shared_lengths(request)
            key = prompt.uid, prompt.tokens.tobytes(), shared
            if key not in groups:
                groups[key] = WaitingPrompt(prompt, deque(), shared=shared)
            groups[key].requests.append((request, sink))
        self.waiting.extend(groups.values())

    def _shared_lengths(self, request: Request) -> tuple[int, ...]:
        """The lengths, ascending, of the beginnings of a prompt whose KV other requests may share. An agent may ask
        twice after the same messages: each length counts once."""
        if not self.decoder.takes_past:
            return ()
        most = len(request.prompt.tokens)
        lengths = {request.prompt.shared_prefix, *request.shared}
        return tuple(sorted(length for length in lengths if 0 < length <= most))

    def discard(self, sink: Sink) -> None:
        """Drop the requests of a caller that has left."""
        self._write()
        self._release([running for running in self.running if running.sink is sink])
        for entry in list(self.waiting):
            entry.requests = deque(pair for pair in entry.requests if pair[1] is not sink)
            if not entry.requests:
                self.waiting.remove(entry)

    def abort(self, uid: int | None = None, samples: Collection[int] | None = None) -> None:
        """End the completions of a prompt, or all of them, with finish_reason `abort`; `samples`: only those of these
        samples."""

        def asked(request: Request) -> bool:
            if uid is not None and request.prompt.uid != uid:
                return False
            return samples is None or request.sample in samples

        self._write()
        self._finish([(running, "abort") for running in self.running if asked(running.request)])
        for entry in list(self.waiting):
            ended = [(request, sink) for request, sink in entry.requests if asked(request)]
            entry.requests = deque((request, sink) for request, sink in entry.requests if not asked(request))
            if not entry.requests:
                self.waiting.remove(entry)
            for request, sink in ended:
                self._deliver(sink, self._completion(request, self.table.empty(), "abort"))

    def in_flight(self) -> list[InFlight]:
        """The running completions, with the tokens of the steps that run.

        Raises:
            NotFiniteError: as by `step`.
        """
        self._write()
        columns = [(running.request, self.table.read(running.line)) for running in self.running]
        return [request.in_flight(own["tokens"], own["policy_version"]) for request, own in columns]

    def load(self, weights: nn.Module, version: int, keep: bool = False) -> None:
        """Copy new weights. The KV of running completions is recomputed before their next token, unless `keep`; that of
        waiting prompts always is, because their first token is sampled from a hidden state."""
        self._write()
        self.decoder.load(weights)
        self.version = version
        self._rebuild = bool(self.running) and not keep
        self.prefixes.clear()
        for entry in self.waiting:
            entry.hidden = None
            entry.kv = None

    @torch.no_grad()
    def step(self, most: int = 1) -> None:
        """Decode one token for every running completion, or start waiting ones and sample their first token; repeat
        `most` times, or until a completion ends."""
        ended = self.completions_ended
        if self._rebuild:
            self._recompute_running()
        for _ in range(most):
            free = self.slots - len(self.running)
            if self.waiting and self.starts_waiting and worth_a_prefill(free, self.slots):
                self._start_waiting(free)
            elif self.running:
                self._decode()
            if self.completions_ended > ended:
                return

    def _start_waiting(self, free: int) -> None:
        self._write()
        entering: list[tuple[WaitingPrompt, list[tuple[Request, Sink]]]] = []
        fresh: list[WaitingPrompt] = []
        budget = self.prefill_tokens
        room = max(budget, self.slots * self.cache.capacity // 8)  # positions not yet in the cache
        while self.waiting and free > 0:
            entry = self.waiting[0]
            if entry.kv is None:
                tokens = self.prefixes.missing(entry.prompt, entry.shared)
                if fresh and (tokens > budget or len(entry.prompt.tokens) > room):
                    break
                budget -= tokens
                room -= len(entry.prompt.tokens)
                fresh.append(entry)
            started = [entry.requests.popleft() for _ in range(min(free, len(entry.requests)))]
            free -= len(started)
            entering.append((entry, started))
            if entry.requests:
                break
            self.waiting.popleft()
        if fresh:
            prompts = [(entry.prompt, entry.shared) for entry in fresh]
            states, kv = self.prefixes.prefill(self.decoder.prefill, prompts)
            for i, entry in enumerate(fresh):
                entry.hidden = states[i]
                entry.kv = kv[i]
                entry.beginnings = self.prefixes.beginnings(entry.prompt, entry.shared)
            self._keep_routes(fresh)
        device = self.cache.device
        first = len(self.running)
        for entry, started in entering:
            assert entry.kv is not None
            slots = torch.arange(len(self.running), len(self.running) + len(started), device=device)
            self.running.extend(self._open(request, sink, entry) for request, sink in started)
            longest = max(request.sampling.max_tokens for request, _ in started) + len(entry.prompt.tokens)
            self.cache.reserve(min(longest, self.max_length))
            self.cache.put(slots, entry.kv, self.decoder.shift(entry.prompt.tokens))
        self._lead()
        self.prefixes.trim(self.slots * self.cache.capacity)  # as many as the cache of the running completions has
        hidden = torch.stack([entry.hidden for entry, _ in entering if entry.hidden is not None])
        prompt_of = list[int]()  # of each request that starts, its place among the prompts
        for place, (_, started) in enumerate(entering):
            prompt_of.extend([place] * len(started))
        which = torch.tensor(prompt_of, device=device)
        self._batch = RunningBatch.of(self.running[first:], self.table, device)
        last_routes = [entry.routes[-1] for entry, _ in entering if entry.routes is not None]
        routes = torch.stack(last_routes)[which] if last_routes else None
        self._sample(self.decoder.logits(hidden)[which], self._batch, routes)
        self._write()

    def _lead(self) -> None:
        """Update the cache's `leaders` after the running completions or their slots have changed: the first row with a
        beginning leads the others that share it."""
        places: dict[bytes, int] = {}
        leaders = [(0, 0)] * self.slots
        for slot, running in enumerate(self.running):
            firsts = [(places.setdefault(name, slot), length) for name, length in running.beginnings]
            led = [(leader, length) for leader, length in firsts if leader < slot]
            leaders[slot] = led[0] if led else (slot, 0)
        self.cache.leaders = torch.tensor(leaders).T.contiguous()

    def _decode(self) -> None:
        batch = self._batch or RunningBatch.of(self.running, self.table, self.cache.device)
        self._batch = batch
        step = len(batch.sampled)
        hidden = self.decoder.step(batch.last, batch.position[step], self.cache, batch.longest + step)
        count = len(batch.lines)
        routes = None if self.decoder.routes is None else self.decoder.routes[:count]
        self._sample(self.decoder.logits(hidden[:count]), batch, routes)

    def _keep_routes(self, prompts: Sequence[WaitingPrompt]) -> None:
        """Store the routes of prompts that were just run, in this order."""
        if self.decoder.routes is None:
            return
        lengths = [len(entry.prompt.tokens) for entry in prompts]
        routes = self.decoder.routes[: sum(lengths)].split(lengths)
        for entry, route in zip(prompts, routes, strict=True):
            entry.routes = route

    def _recompute_running(self) -> None:
        """Recompute the KV of every running completion under new weights, from its prompt and its tokens so far."""
        for at in range(0, len(self.running), ROWS):
            sequences = [
                np.concatenate([running.request.prompt.tokens, self.table.tokens(running.line)[:-1]])
                for running in self.running[at : at + ROWS]
            ]
            _, caches = self.decoder.prefill(sequences)
            for i, kv in enumerate(caches):
                slot = torch.tensor([at + i], device=self.cache.device)
                self.cache.put(slot, kv, self.decoder.shift(sequences[i]))
                self.running[at + i].beginnings = ()
        self._lead()
        self._rebuild = False

    def _sample(self, logits: Tensor, batch: RunningBatch, routes: Tensor | None) -> None:
        """Draw one token for each request of the batch, and finish those that end with it; `routes` [n, M, K] are those
        of the positions that it is sampled from."""
        uniform = batch.uniform[len(batch.sampled)]
        sampled = sample_tokens(logits, batch.settings, uniform, self.top_k, masks=self.sampling_mask)
        if routes is not None:
            sampled.columns["routed_experts"] = routes
        batch.sampled.append(sampled)
        batch.last[: len(batch.lines)] = sampled.columns["tokens"]
        tokens: list[int] = sampled.columns["tokens"].tolist()
        self.generated_tokens += len(tokens)
        if len(batch.sampled) == len(batch.uniform) or any(map(self._stops, batch.requests, tokens)):
            self._write()
            self._finish(self._ended(batch.requests, tokens))

    def _stops(self, running: RunningRequest, token: int) -> bool:
        return token in self._stop_tokens_of(running.request)

    def _stop_tokens_of(self, request: Request) -> frozenset[int]:
        if request.stop_tokens is None:
            return self.stop_tokens
        return request.stop_tokens

    def _ended(
        self, requests: Sequence[RunningRequest], tokens: Sequence[int]
    ) -> list[tuple[RunningRequest, FinishReason]]:
        """The requests that end with their last token, which is already in the table."""
        finished: list[tuple[RunningRequest, FinishReason]] = []
        for running, token in zip(requests, tokens, strict=True):
            if self._stops(running, token) or self._has_stop_string(running):
                finished.append((running, "stop"))
            elif self.table.length[running.line] >= self.table.limit[running.line]:
                finished.append((running, "length"))
        return finished

    def _has_stop_string(self, running: RunningRequest) -> bool:
        stop = running.request.sampling.stop
        if not stop:
            return False
        begun = bool(running.request.prompt.begun)
        text = sampled_text(self.tokenizer, self.table.tokens(running.line), after_text=begun)
        return stop_string(text, stop) is not None

    def _write(self) -> None:
        """End the batch and write its samples to the table. Called before the running completions or the weights
        change."""
        batch = self._batch
        self._batch = None
        if batch is None or not batch.sampled:
            return
        steps = [step.columns for step in batch.sampled]
        columns = {name: torch.stack([step[name] for step in steps]).cpu().numpy() for name in steps[0]}
        for name in ("untruncated_log_prob", "sampled_log_prob"):
            if not np.isfinite(columns[name]).all():
                raise NotFiniteError("the model's probabilities are NaN where a token is drawn")
        self.table.append(batch.lines, self.version, columns, [step.sets for step in batch.sampled])

    def _open(self, request: Request, sink: Sink, entry: WaitingPrompt) -> RunningRequest:
        prompt = request.prompt
        most = request.sampling.max_tokens
        uniform = completion_uniforms(request.seed, prompt.uid, request.sample, most, turn=request.turn)
        limit = min(most, self.max_length - len(prompt.tokens))
        line = self.table.open(len(prompt.tokens), limit, uniform)
        return RunningRequest(request, sink, line, entry.beginnings, entry.routes)

    def _finish(self, finished: Sequence[tuple[RunningRequest, FinishReason]]) -> None:
        """Deliver running completions, in the order of their slots, and free the slots."""
        for running, reason in finished:
            columns = self.table.read(running.line)
            routes = running.prompt_routes
            if routes is not None:
                columns["prompt_routed_experts"] = routes.cpu().numpy()
            self._deliver(running.sink, self._completion(running.request, columns, reason))
        self._release([running for running, _ in finished])

    def _deliver(self, sink: Sink, completion: Completion) -> None:
        sink(completion)
        self.completions_ended += 1

    def _release(self, ended: Sequence[RunningRequest]) -> None:
        """Free lines and slots. The last running completion moves into each hole; holes are filled from the end, so
        that no completion that also ends is moved."""
        for running in reversed(ended):
            self.table.close(running.line)
            slot = self.running.index(running)
            last = self.running[-1]
            if last is not running:
                length = int(self.table.prompt_length[last.line] + self.table.length[last.line])
                self.cache.move(len(self.running) - 1, slot, length)
                self.running[slot] = last
            self.running.pop()
        self._lead()

    def _completion(self, request: Request, columns: dict[str, Any], reason: FinishReason) -> Completion:
        sampling = request.sampling
        prompt = request.prompt
        ends = self._stop_tokens_of(request)
        written = written_text(self.tokenizer, columns["tokens"], begun=prompt.begun, ends=ends, stop=sampling.stop)
        if not sampling.truncates:
            columns["untruncated_log_prob"] = columns["sampled_log_prob"]
        if not sampling.truncates or sampling.temperature == 0:
            columns.pop("sampling_mask", None)
        return Completion(
            prompt_uid=prompt.uid,
            sample=request.sample,
            turn=request.turn,
            text=written.text,
            stopped_by=written.stopped_by,
            finish_reason=reason,
            temperature=sampling.temperature,
            **columns,
        )


def worth_a_prefill(free: int, slots: int) -> bool:
    """Return True if waiting requests should enter the free slots now. A prefill reads all weights, so they wait until
    it is worthwhile, unless nothing else is running."""
    return free == slots or free >= max(1, slots // 8)
