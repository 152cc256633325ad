"""Engines with the weights of a model at some moment.

Each trained model has at most one engine, into which the weights of the sampler that is asked are loaded: a copy of the
model, with the adapter merged. The base has one for all clients, who take turns. Completions of one engine are batched;
on a CPU their tokens do not depend on one another, so neither on other clients. The engine that was not used for
longest makes room for another.
"""

import asyncio
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proxima.data import Prompt, UserError
from proxima.engine.decoder import Decoder
from proxima.engine.local import Local, LocalEngine
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model import LoadedModel
from proxima_tinker.datum import Array
from proxima_tinker.wire import NO_LOG_PROB, PromptAnswer, SampledAnswer
from proxima_tinker.workers import ComputeLane, Workers

ROWS = 256  # of logits in memory at a time
PATIENCE = 10.0  # seconds that a request waits for an engine before those that came later wait for it
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


class _Places:
    """Places in an engine for completions, given in turn to the clients that wait for some."""

    def __init__(self, count: int) -> None:
        self.free = count
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def taken(self, client: str, count: int) -> AsyncIterator[None]:
        """So many places, within the block."""
        if self._waiting or self.free < count:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._give_back(count)
                raise
        else:
            self.free -= count
        try:
            yield
        finally:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        self.free += count
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            wanted, turn = queue[0]
            if not turn.cancelled():
                if wanted > self.free:
                    break
                self.free -= wanted
                turn.set_result(None)
            queue.popleft()
            self._waiting.move_to_end(client)
            if not queue:
                del self._waiting[client]


class _LoadedEngine:
    """The engine of one model: it has `weights` when `ready` is done, and `users` until which others must not be
    loaded."""

    ready: asyncio.Task[None]
    engine: LocalEngine

    def __init__(self, lane: ComputeLane, slots: int) -> None:
        self.lane, self.places, self.weights = lane, _Places(slots + slots // 8), ""
        self.users = 0
        self.tasks: set[asyncio.Task[Any]] = set()


class Samplers:
    """The engines.

    Args:
        spec: their settings.
        workers: compute for them.
        most: engines in memory; each is a copy of the model.
    """

    def __init__(self, spec: Local, workers: Workers, most: int) -> None:
        self.spec, self.workers, self.most = spec, workers, most
        self._engines: OrderedDict[str, _LoadedEngine] = OrderedDict()  # by model, the latest used last
        self._line: dict[object, tuple[str, str, float]] = {}  # requests that wait: model, weights, since when
        self._changed = asyncio.Event()

    async def sample(
        self, model: str, weights: str, client: str, load: Callable[[], LoadedModel], order: SampleOrder
    ) -> tuple[list[SampledAnswer], PromptAnswer]:
        """Completions of a prompt.

        Args:
            model: whose engine it is.
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
            try:
                for first in range(0, order.count, self.spec.slots):
                    part = asked[first : first + self.spec.slots]
                    async with held.places.taken(client, len(part)):
                        if order.scores_prompt and not first:
                            found = await held.lane.run(_scored_prompt, held.engine.scheduler.decoder, order)
                        out += await self._completed(held, order, part)
            except UserError:
                raise
            except Exception:
                self._retire(model, held)
                raise
        return out, found

    async def _completed(
        self, held: _LoadedEngine, order: SampleOrder, requests: Sequence[Request]
    ) -> list[SampledAnswer]:
        completions = [completion async for completion in held.engine.generate(requests)]
        out = []
        for done in sorted(completions, key=lambda completion: completion.sample):
            top_k = None
            if order.top_k_sample:
                whole, first = np.concatenate([order.prompt, done.tokens]), len(order.prompt)
                decoder = held.engine.scheduler.decoder
                top_k = (await held.lane.run(_scored, decoder, whole, first, order.top_k_sample, None))[1]
            stopped = done.finish_reason == "stop"
            answer = SampledAnswer(tokens=done.tokens, log_probs=done.sampled_log_prob, stopped=stopped, top_k=top_k)
            out.append(answer)
        return out

    @asynccontextmanager
    async def _using(self, model: str, weights: str, load: Callable[[], LoadedModel]) -> AsyncIterator[_LoadedEngine]:
        """The engine of a model, with these weights until the end of the block."""
        place = object()
        self._line[place] = model, weights, time.monotonic()
        try:
            while (held := self._entered(model, weights, load)) is None:
                await self._changed.wait()
        finally:
            del self._line[place]
        self._wake()
        task = asyncio.current_task()
        assert task is not None
        held.tasks.add(task)
        try:
            await asyncio.shield(held.ready)  # goes on if this request is cancelled: others wait for it too
            yield held
        finally:
            held.tasks.discard(task)
            self._left(held)

    def _entered(self, model: str, weights: str, load: Callable[[], LoadedModel]) -> _LoadedEngine | None:
        """The engine, with one more user; None while it has users of other weights, or there is no room for it.

        Who has waited long goes first: else those who come all the time would keep it out."""
        first, first_weights, since = next(iter(self._line.values()))
        keeps_out = first == model or first not in self._engines
        if keeps_out and (first, first_weights) != (model, weights) and time.monotonic() - since > PATIENCE:
            return None
        held = self._engines.get(model)
        if held is None:
            self._make_room()
            if len(self._engines) >= self.most:
                return None
            held = self._engines[model] = _LoadedEngine(self.workers.lane(), self.spec.slots)
        if held.weights != weights:
            if held.users:
                return None
            held.weights, held.users = weights, 1  # the loading is a user, too
            held.ready = asyncio.ensure_future(self._load(held, load))
            held.ready.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to those who wait
        held.users += 1
        self._engines.move_to_end(model)
        return held

    async def _load(self, held: _LoadedEngine, load: Callable[[], LoadedModel]) -> None:
        try:
            loaded = await held.lane.run(load)
            if hasattr(held, "engine"):
                version = held.engine.scheduler.version + 1
                await held.engine.publish(WeightUpdate(version=version, module=loaded.model))
            else:
                held.engine = await held.lane.run(LocalEngine, loaded, self.spec)  # it computes in place until here
                held.engine.compute = held.lane
        except BaseException:
            held.weights = ""  # they may be there in part
            raise
        finally:
            self._left(held)

    def _left(self, held: _LoadedEngine) -> None:
        held.users -= 1
        if not held.users:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _retire(self, model: str, held: _LoadedEngine) -> None:
        """An engine has failed: end its other requests, which might wait forever, and let the next build another."""
        if self._engines.get(model) is held:
            del self._engines[model]
        for task in held.tasks - {asyncio.current_task()}:
            task.cancel("the engine failed; sample again")

    def _make_room(self) -> None:
        for model, held in list(self._engines.items()):
            if len(self._engines) < self.most:
                break
            if not held.users:
                del self._engines[model]

    def drop(self, model: str) -> None:
        """Free the engine of a model whose client has left."""
        held = self._engines.get(model)
        if held is not None and not held.users:
            del self._engines[model]


def _scored_prompt(decoder: Decoder, order: SampleOrder) -> PromptAnswer:
    length = len(order.prompt)
    first = 1 if order.last is None else max(1, length - order.last)
    log_probs, top_k, targets = _scored(decoder, order.prompt, first, order.top_k_prompt, order.targets)
    whole = np.full(length, np.nan, np.float32)
    whole[first:] = log_probs
    if top_k is not None:
        ids = np.zeros((length, order.top_k_prompt), np.int32)
        values = np.full(ids.shape, NO_LOG_PROB, np.float32)
        ids[first:], values[first:] = top_k
        top_k = ids, values
    return PromptAnswer(log_probs=whole if order.prompt_log_probs else None, top_k=top_k, targets=targets)


@torch.no_grad()
def _scored(
    decoder: Decoder, tokens: Array, first: int, k: int, targets: Array | None
) -> tuple[Array, tuple[Array, Array] | None, Array | None]:
    """Of the tokens from `first` on: their log-probs [n]; the k most likely ids and log-probs [n, k]; and log-probs of
    `targets` [P - 1, K], of all positions, 0 where an id is -1."""
    states = decoder.hidden([tokens])[0]
    begin = 0 if targets is not None else first - 1
    own, likely, others = [], [], []
    for at in range(begin, len(tokens) - 1, ROWS):
        end = min(at + ROWS, len(tokens) - 1)
        log_prob = decoder.logits(states[at:end]).float().log_softmax(1).cpu()
        chosen = torch.from_numpy(tokens[at + 1 : end + 1].astype(np.int64))[:, None]
        own.append(log_prob.gather(1, chosen)[:, 0])
        if k:
            likely.append(log_prob.topk(k))
        if targets is not None:
            ids = torch.from_numpy(targets[at:end].astype(np.int64))
            others.append(log_prob.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0))
    skip = first - 1 - begin
    empty = torch.zeros(0)
    top_k = None
    if k:
        ids = torch.cat([part.indices for part in likely]) if likely else empty.reshape(0, k).long()
        values = torch.cat([part.values for part in likely]) if likely else empty.reshape(0, k)
        top_k = ids[skip:].to(torch.int32).numpy(), values[skip:].numpy()
    log_probs = torch.cat([*own, empty])[skip:].numpy()
    return log_probs, top_k, torch.cat(others).numpy() if others else None


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
