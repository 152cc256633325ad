"""Engines with the weights of a model at some moment.

Each trained model has at most one engine, into which the weights of the sampler that is asked are loaded: a copy of the
model, with the adapter merged. The base has one for all clients. Completions of one engine are batched; on a CPU their
tokens do not depend on one another, so neither on other clients. The engine that was not used for longest makes room
for another.
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
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model import LoadedModel
from proxima_tinker.datum import Array
from proxima_tinker.wire import PromptAnswer, SampledAnswer
from proxima_tinker.workers import Lane, Workers

ROWS = 256  # of logits in memory at a time
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
    """The engine of one model, and which weights it has."""

    def __init__(self, engine: LocalEngine, lane: Lane, weights: str) -> None:
        self.engine, self.lane, self.weights = engine, lane, weights
        self.users = 0
        self.changed = asyncio.Condition()


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
        self._building = asyncio.Lock()

    async def sample(
        self, model: str, weights: str, load: Callable[[], LoadedModel], order: SampleOrder
    ) -> tuple[list[SampledAnswer], PromptAnswer]:
        """Completions of a prompt.

        Args:
            model: whose engine it is.
            weights: names the weights; `load` reads them.

        Raises:
            UserError: the prompt does not fit.
        """
        async with self._using(model, weights, load) as (engine, lane):
            # a completion is determined by seed, uid and sample; without a seed, by the name of the request
            digest = zlib.crc32(order.name.encode())
            seed = digest if order.seed is None else order.seed % 2**SEED_BITS
            prompt = Prompt(uid=digest if order.seed is None else 0, messages=(), tokens=order.prompt)
            asked = [
                Request(prompt=prompt, sample=i, sampling=order.sampling, seed=seed, stop_tokens=order.stop_tokens)
                for i in range(order.count)
            ]
            completions = [completion async for completion in engine.generate(asked)]
            completions.sort(key=lambda completion: completion.sample)
            found = PromptAnswer()
            if order.scores_prompt:
                found = await lane.run(_scored_prompt, engine.scheduler.decoder, order)
            out = []
            for done in completions:
                top_k = None
                if order.top_k_sample:
                    whole = np.concatenate([order.prompt, done.tokens])
                    first = len(order.prompt)
                    scored = await lane.run(_scored, engine.scheduler.decoder, whole, first, order.top_k_sample, None)
                    top_k = scored[1]
                out.append(
                    SampledAnswer(
                        tokens=done.tokens,
                        log_probs=done.sampled_log_prob,
                        stopped=done.finish_reason == "stop",
                        top_k=top_k,
                    )
                )
            return out, found

    @asynccontextmanager
    async def _using(
        self, model: str, weights: str, load: Callable[[], LoadedModel]
    ) -> AsyncIterator[tuple[LocalEngine, Lane]]:
        """The engine of a model, with these weights until the end of the block."""
        held = await self._engine(model, weights, load)
        async with held.changed:
            while held.weights != weights and held.users:
                await held.changed.wait()
            if held.weights != weights:
                module = await held.lane.run(load)
                version = held.engine.scheduler.version + 1
                await held.engine.publish(WeightUpdate(version=version, module=module.model))
                held.weights = weights
            held.users += 1
        try:
            yield held.engine, held.lane
        finally:
            async with held.changed:
                held.users -= 1
                held.changed.notify_all()

    async def _engine(self, model: str, weights: str, load: Callable[[], LoadedModel]) -> _LoadedEngine:
        async with self._building:
            held = self._engines.get(model)
            if held is None:
                self._make_room()
                lane = self.workers.lane()
                loaded = await lane.run(load)
                engine = await asyncio.to_thread(LocalEngine, loaded, self.spec, compute=lane)
                held = self._engines[model] = _LoadedEngine(engine, lane, weights)
            self._engines.move_to_end(model)
            return held

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
        values = np.full(ids.shape, -99999.0, np.float32)
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
    if all(isinstance(value, str) for value in values):
        return tuple(values), None
    if all(isinstance(value, int) for value in values):
        return (), stop_tokens | frozenset(values)
    raise UserError("sampling_params.stop mixes texts and token ids")
