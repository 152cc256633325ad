"""Engines with the weights of a model at some moment.

An engine is a copy of the model with the weights of one sampler, adapter merged; it is built when that sampler is first
asked. Completions of one engine are batched; on a CPU their tokens do not depend on one another, so neither on other
clients. An idle engine makes room for newer weights of its model, and the one that was not used for longest for others.
"""

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proxima.data import Prompt, UserError
from proxima.engine.decoder import Decoder
from proxima.engine.local import Local, LocalEngine
from proxima.engine.protocol import Request, Sampling
from proxima.model import LoadedModel
from proxima_tinker.datum import Array
from proxima_tinker.wire import NO_LOG_PROB, PromptAnswer, SampledAnswer
from proxima_tinker.workers import ComputeLane, Workers

ROWS = 256  # of logits in memory at a time
MOST_STOPS, LONGEST_STOP = 128, 1000  # all are looked for after every token
SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """A request for completions of a prompt [P] int32.

    Args:
        name: of the request, from which its draws follow if `seed` is None.
        stop_tokens: ids that end a completion; None: those of the model.
        prompt_log_probs, top_k_prompt, top_k_sample: what is returned besides the completions.
        last: only that many tokens of the prompt are scored; None: all.
        targets: [P - 1, K] ids whose log-probs are returned; -1 asks for none.
    """

    name: str
    prompt: Array
    count: int
    sampling: Sampling
    seed: int | None = None
    stop_tokens: frozenset[int] | None = None
    prompt_log_probs: bool = False
    top_k_prompt: int = 0
    top_k_sample: int = 0
    last: int | None = None
    targets: Array | None = None

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_log_probs or self.top_k_prompt > 0 or self.targets is not None


class _LoadedEngine:
    """An engine, once `ready` is done, and the requests that use it."""

    def __init__(self, model: str, lane: ComputeLane, load: Callable[[], LoadedModel], spec: Local) -> None:
        self.model, self.lane, self.slots = model, lane, spec.slots
        self.tasks: set[asyncio.Task[Any]] = set()
        self._clients: dict[str, tuple[asyncio.Lock, asyncio.Semaphore]] = {}

        def build() -> LocalEngine:
            engine = LocalEngine(load(), spec)  # it computes in place until here
            engine.compute = lane
            return engine

        self.ready = asyncio.ensure_future(lane.run(build))
        self.ready.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to those who wait

    @asynccontextmanager
    async def places(self, client: str, count: int) -> AsyncIterator[None]:
        """So many places for completions, within the block. A client takes about as many as the engine has slots, and
        another client's next completion waits for no more than these."""
        most, taken = self.slots + self.slots // 8, 0
        turn, free = self._clients.setdefault(client, (asyncio.Lock(), asyncio.Semaphore(most)))
        try:
            async with turn:
                while taken < count:
                    await free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                free.release()


class Samplers:
    """The engines.

    Args:
        spec: their settings.
        workers: compute for them.
        most: engines in memory; each is a copy of the model.
    """

    def __init__(self, spec: Local, workers: Workers, most: int) -> None:
        self.spec, self.workers, self.most = spec, workers, most
        self._engines: OrderedDict[str, _LoadedEngine] = OrderedDict()  # by weights, the latest used last
        self._door, self._left = asyncio.Lock(), asyncio.Event()

    async def sample(
        self, model: str, weights: str, client: str, load: Callable[[], LoadedModel], order: SampleOrder
    ) -> tuple[list[SampledAnswer], PromptAnswer]:
        """Completions of a prompt.

        Args:
            model: whose weights these are.
            weights: names the weights; `load` reads them.
            client: who takes turns with others.

        Raises:
            UserError: the prompt does not fit, or the weights are gone.
        """
        # a completion is determined by seed, uid and sample; without a seed, by the name of the request
        digest = zlib.crc32(order.name.encode())
        seed = digest if order.seed is None else order.seed % 2**SEED_BITS
        prompt = Prompt(uid=digest if order.seed is None else 0, messages=(), tokens=order.prompt)
        asked = [
            Request(prompt=prompt, sample=i, sampling=order.sampling, seed=seed, stop_tokens=order.stop_tokens)
            for i in range(order.count)
        ]
        out, found = list[SampledAnswer](), PromptAnswer()
        async with self._using(model, weights, load) as held:
            engine = held.ready.result()
            for first in range(0, order.count, self.spec.slots):
                part = asked[first : first + self.spec.slots]
                async with held.places(client, len(part)):
                    if order.scores_prompt and not first:
                        found = await held.lane.run(_scored_prompt, engine.scheduler.decoder, order)
                    out += await self._completed(held, engine, order, part)
        return out, found

    async def _completed(
        self, held: _LoadedEngine, engine: LocalEngine, order: SampleOrder, requests: Sequence[Request]
    ) -> list[SampledAnswer]:
        completions, out = [completion async for completion in engine.generate(requests)], []
        for done in sorted(completions, key=lambda completion: completion.sample):
            top_k = None
            if order.top_k_sample:
                whole, first = np.concatenate([order.prompt, done.tokens]), len(order.prompt)
                scored = await held.lane.run(_scored, engine.scheduler.decoder, whole, first, order.top_k_sample)
                top_k = scored[1:3]
            stopped = done.finish_reason == "stop"
            out.append(SampledAnswer(tokens=done.tokens, log_probs=done.sampled_log_prob, stopped=stopped, top_k=top_k))
        return out

    @asynccontextmanager
    async def _using(self, model: str, weights: str, load: Callable[[], LoadedModel]) -> AsyncIterator[_LoadedEngine]:
        """The engine with these weights, in memory until the end of the block."""
        async with self._door:  # in the order of arrival: else those whose engine is there would keep others out
            while (held := self._entered(model, weights, load)) is None:
                self._left.clear()
                await self._left.wait()
        task = asyncio.current_task()
        assert task is not None
        held.tasks.add(task)
        try:
            await asyncio.shield(held.ready)  # goes on if this request is cancelled: others wait for it too
            yield held
        except Exception as error:
            if not isinstance(error, UserError) or held.ready.exception() is not None:
                self._retire(weights, held)
            raise
        finally:
            held.tasks.discard(task)
            self._left.set()

    def _entered(self, model: str, weights: str, load: Callable[[], LoadedModel]) -> _LoadedEngine | None:
        """The engine with these weights; None while there is no room for it."""
        if weights not in self._engines:
            idle = [name for name, other in self._engines.items() if not other.tasks]
            own = [name for name in idle if self._engines[name].model == model]
            for name in sorted(idle, key=lambda name: name not in own):
                # of its model one more may stay, for programs that sample from two in turn
                if name in own[:-1] or len(self._engines) >= self.most:
                    del self._engines[name]
            if len(self._engines) >= self.most:
                return None
            self._engines[weights] = _LoadedEngine(model, self.workers.lane(), load, self.spec)
        self._engines.move_to_end(weights)
        return self._engines[weights]

    def _retire(self, weights: str, held: _LoadedEngine) -> None:
        """An engine has failed: end its other requests, which might wait forever, and let the next build another."""
        if self._engines.get(weights) is held:
            del self._engines[weights]
        if held.ready.exception() is None:
            for task in held.tasks - {asyncio.current_task()}:
                task.cancel("the engine failed; sample again")

    def drop(self, model: str) -> None:
        """Free the engines of a model whose client has left."""
        for name, held in list(self._engines.items()):
            if held.model == model and not held.tasks:
                del self._engines[name]


def _scored_prompt(decoder: Decoder, order: SampleOrder) -> PromptAnswer:
    unknown = 1 if order.last is None else max(1, len(order.prompt) - order.last)
    first = unknown if order.targets is None else 1
    own, ids, values, others = _scored(decoder, order.prompt, first, order.top_k_prompt, order.targets)
    own, ids, values = (np.pad(x, [(first, 0)] + [(0, 0)] * (x.ndim - 1)) for x in (own, ids, values))
    own[:unknown], ids[:unknown], values[:unknown] = np.nan, 0, NO_LOG_PROB
    return PromptAnswer(
        log_probs=own if order.prompt_log_probs else None,
        top_k=(ids, values) if order.top_k_prompt else None,
        targets=None if order.targets is None else others,
    )


@torch.no_grad()
def _scored(
    decoder: Decoder, tokens: Array, first: int, k: int, targets: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Of the n tokens from `first` on: their log-probs; the k most likely ids and log-probs [n, k]; and log-probs of
    `targets` [n, K], 0 where an id is -1."""
    states, count = decoder.hidden([tokens])[0][first - 1 :], len(tokens) - first
    wanted = np.zeros((count, 0), np.int64) if targets is None else targets.astype(np.int64)
    own, others = np.zeros(count, np.float32), np.zeros(wanted.shape, np.float32)
    ids, values = np.zeros((count, k), np.int32), np.zeros((count, k), np.float32)
    for at in range(0, count, ROWS):
        rows = slice(at, min(at + ROWS, count))
        log_prob = decoder.logits(states[rows]).float().log_softmax(1).cpu()
        own[rows] = log_prob.gather(1, torch.from_numpy(tokens[first:][rows].astype(np.int64))[:, None])[:, 0]
        chosen = torch.from_numpy(wanted[rows])
        others[rows] = log_prob.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0)
        values[rows], ids[rows] = log_prob.topk(k)
    return own, ids, values, others


def stop_settings(stop: Any, stop_tokens: frozenset[int]) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """Strings and ids that end a completion, from the SDK's `stop`: None: the model's own ids; []: nothing; texts, or
    ids, in addition to the model's own.

    Raises:
        UserError: texts and ids are mixed.
    """
    if stop is None:
        return (), None
    values: Sequence[Any] = [stop] if isinstance(stop, str) else list(stop)
    if not values:
        return (), frozenset()
    if len(values) > MOST_STOPS or any(isinstance(value, str) and len(value) > LONGEST_STOP for value in values):
        reason = f"may hold at most {MOST_STOPS} texts or ids, of at most {LONGEST_STOP} characters"
        raise UserError(f"sampling_params.stop {reason}")
    if all(isinstance(value, str) for value in values):
        return tuple(values), None
    if all(isinstance(value, int) for value in values):
        return (), stop_tokens | frozenset(values)
    raise UserError("sampling_params.stop mixes texts and token ids")
