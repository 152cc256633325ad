"""Engines with the weights of a model at some moment.

An engine is a copy of the model with the weights of one sampler, adapter merged; it is built when that sampler is first
asked. Completions of one engine are batched; on a CPU their tokens do not depend on one another, so neither on other
clients. An idle engine makes room for newer weights of its model, and the one that was not used for longest for others.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as protocol

from proxima.data import UserError, require
from proxima.data.flow import Completion
from proxima.engine.local.decoder import Decoder
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request
from proxima.model.pretrained import LoadedModel
from proxima_tinker.datum import Array
from proxima_tinker.wire import NO_LOG_PROB, write_top_k
from proxima_tinker.workers import ComputeLane, Workers

ROWS = 256  # of logits in memory at a time
MOST_STOPS = 128  # all are looked for after every token
LONGEST_STOP = 1000


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """What a client asked for, without its large fields, and as requests to the engine, with one prompt of P tokens.
    `targets`: [P - 1, K] ids whose log-probs are returned; -1 asks for none."""

    asked: types.SampleRequest
    requests: Sequence[Request]
    targets: Array | None = None

    @property
    def prompt(self) -> Array:
        """[P] int32."""
        return self.requests[0].prompt.tokens


class _LoadedEngine:
    """An engine, once `ready` is done, and the requests that use it."""

    def __init__(self, model: str, lane: ComputeLane, load: Callable[[], LoadedModel], spec: Local) -> None:
        self.model = model
        self.lane = lane
        self.slots = spec.slots
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
        most = self.slots + self.slots // 8
        turn, free = self._clients.setdefault(client, (asyncio.Lock(), asyncio.Semaphore(most)))
        async with AsyncExitStack() as taken:
            async with turn:
                for _ in range(count):
                    await taken.enter_async_context(free)
            yield


class Samplers:
    """The engines.

    Args:
        spec: their settings.
        workers: compute for them.
        most: engines in memory; each is a copy of the model.
    """

    def __init__(self, spec: Local, workers: Workers, most: int) -> None:
        self.spec = spec
        self.workers = workers
        self.most = most
        self._engines: OrderedDict[str, _LoadedEngine] = OrderedDict()  # by weights, the latest used last
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    async def sample(
        self, model: str, weights: str, client: str, load: Callable[[], LoadedModel], order: SampleOrder
    ) -> bytes:
        """The encoded answer to a request for completions.

        Args:
            model: whose weights these are.
            weights: names the weights; `load` reads them.
            client: who takes turns with others.

        Raises:
            UserError: the prompt does not fit, or the weights are gone.
        """
        answer = protocol.SampleResponse()
        asked = order.asked
        scores_prompt = asked.prompt_logprobs or asked.topk_prompt_logprobs or order.targets is not None
        async with self._using(model, weights, load) as held:
            engine = held.ready.result()
            for first in range(0, len(order.requests), self.spec.slots):
                part = order.requests[first : first + self.spec.slots]
                async with held.places(client, len(part)):
                    if scores_prompt and not first:
                        await held.lane.run(_score_prompt, answer, engine.scheduler.decoder, order)
                    for completion in await collect(engine, part):  # others have their turns between them
                        add = partial(_add, answer, engine.scheduler.decoder, order, completion)
                        if asked.topk_sample_logprobs:
                            await held.lane.run(add)
                        else:
                            add()
        content: bytes = answer.SerializeToString()
        return content

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
            self._engines[weights] = _LoadedEngine(model, ComputeLane(self.workers), load, self.spec)
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


def _add(answer: Any, decoder: Decoder, order: SampleOrder, completion: Completion) -> None:
    reason = protocol.STOP_REASON_LENGTH
    if completion.finish_reason == "stop":
        reason = protocol.STOP_REASON_STOP
    sequence = answer.sequences.add(
        stop_reason=reason,
        tokens=completion.tokens.astype("<i4").tobytes(),
        logprobs=completion.sampled_log_prob.astype("<f4").tobytes(),
    )
    k = order.asked.topk_sample_logprobs
    if k:
        whole = np.concatenate([order.prompt, completion.tokens])
        _, ids, values, _ = _scored(decoder, whole, len(order.prompt), k)
        write_top_k(sequence.topk_sampled_logprobs, ids, values)


def _score_prompt(answer: Any, decoder: Decoder, order: SampleOrder) -> None:
    """Fill in what is asked for of the prompt's tokens: NaN, or `NO_LOG_PROB`, where it is unknown."""
    asked = order.asked
    length = len(order.prompt)
    unknown = 1
    if asked.prompt_logprobs_last_n is not None:
        unknown = max(1, length - asked.prompt_logprobs_last_n)
    first = unknown if order.targets is None else 1
    own, ids, values, others = _scored(decoder, order.prompt, first, asked.topk_prompt_logprobs, order.targets)
    own = np.pad(own, (first, 0))
    ids = np.pad(ids, [(first, 0), (0, 0)])
    values = np.pad(values, [(first, 0), (0, 0)])
    own[:unknown] = np.nan
    ids[:unknown] = 0
    values[:unknown] = NO_LOG_PROB
    if asked.prompt_logprobs:
        answer.prompt_logprobs = own.astype("<f4").tobytes()
    if asked.topk_prompt_logprobs:
        write_top_k(answer.topk_prompt_logprobs, ids, values)
    if order.targets is not None:
        answer.target_prompt_logprobs.dense = others.astype("<f4").tobytes()
        answer.target_prompt_logprobs.dtype = protocol.DTYPE_FLOAT32
        answer.target_prompt_logprobs.shape.extend(others.shape)


@torch.no_grad()
def _scored(
    decoder: Decoder, tokens: Array, first: int, k: int, targets: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Of the n tokens from `first` on: their log-probs; the k most likely ids and log-probs [n, k]; and log-probs of
    `targets` [n, K], 0 where an id is -1."""
    states = decoder.hidden([tokens])[0][first - 1 :]
    count = len(tokens) - first
    own = tokens[first:, None].astype(np.int64)
    if targets is not None:
        own = np.hstack([own, targets])
    wanted = torch.from_numpy(own)
    found = np.zeros(wanted.shape, np.float32)
    ids = np.zeros((count, k), np.int32)
    values = np.zeros((count, k), np.float32)
    for at in range(0, count, ROWS):
        rows = slice(at, min(at + ROWS, count))
        log_prob = decoder.logits(states[rows]).float().log_softmax(1).cpu()
        found[rows] = log_prob.gather(1, wanted[rows].clamp(min=0)).masked_fill(wanted[rows] < 0, 0.0)
        values[rows], ids[rows] = log_prob.topk(k)
    return found[:, 0], ids, values, found[:, 1:]


def stop_settings(stop: Any, stop_tokens: frozenset[int]) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """Strings and ids that end a completion, from the SDK's `stop`: None: the model's own ids; []: nothing; texts, or
    ids, in addition to the model's own.

    Raises:
        UserError: there are too many, or a text is too long.
    """
    if stop is None:
        return (), None
    values: Sequence[Any]
    if isinstance(stop, str):
        values = [stop]
    else:
        values = list(stop)
    if not values:
        return (), frozenset()
    fits = len(values) <= MOST_STOPS and all(len(value) <= LONGEST_STOP for value in values if isinstance(value, str))
    bound = f"may hold at most {MOST_STOPS} texts or ids, of at most {LONGEST_STOP} characters"
    require(fits, "sampling_params.stop", stop, bound)
    if isinstance(values[0], str):
        return tuple(values), None
    return (), stop_tokens | frozenset(values)
