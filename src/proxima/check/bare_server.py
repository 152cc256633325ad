"""A server as an engine, with nothing in between: no retries, no other replica, no new weights. What it gets wrong is
seen."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from proxima.check.laws import Violation, require_that
from proxima.data import Completion
from proxima.data.columns import Floats
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import Chunk, Dialect, ServerFacts, TokenRequest
from proxima.engine.protocol import Capabilities, EngineSetup, EngineSpec, Request, ScoreRequest

AT_ONCE = 32  # requests


@dataclass(frozen=True)
class BareServer(EngineSpec):
    """A server that answers at an address, of a kind that is known and with facts that were found.

    Args:
        seconds: deadline of a call, and between two tokens.
    """

    address: Address
    dialect: Dialect
    facts: ServerFacts
    seconds: float = 60.0

    def build(self, setup: EngineSetup) -> "BareServerEngine":  # type: ignore[override]  # it has some of the calls alone
        """The engine; it connects when it is asked."""
        return BareServerEngine(self, setup)

    def connect(self) -> ServerClient:
        """A connection for one event loop; the caller closes it."""
        return ServerClient(self.address, seconds=self.seconds)


class BareServerEngine:
    """See `Engine`. New weights, pauses and aborts are tried by laws of their own: here they are none of its calls."""

    def __init__(self, spec: BareServer, setup: EngineSetup) -> None:
        self.spec, self.setup, self._ids = spec, setup, count()
        facts = spec.facts
        self.capabilities = Capabilities(
            weight_updates=frozenset(),
            pause_modes=frozenset(),
            score=facts.scores,
            deterministic=facts.seeds and facts.batch_invariant,
            log_probs=facts.log_probs or "raw",
        )

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Some at once, in any order."""
        client, free = self.spec.connect(), asyncio.Semaphore(AT_ONCE)
        tasks = [asyncio.create_task(self._one(client, free, request)) for request in requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        """At temperature 1."""
        client = self.spec.connect()
        score, facts = self.spec.dialect.score, self.spec.facts
        try:
            return [await score(client, facts, one.prompt_tokens, one.tokens) for one in requests]
        finally:
            await client.close()

    async def _one(self, client: ServerClient, free: asyncio.Semaphore, request: Request) -> Completion:
        """A completion. The log-probs before truncation take a scoring call where the server reports those after it."""
        asked = self._token_request(request)
        async with free:
            chunks = await all_chunks(self.spec, client, asked)
        sampling = request.sampling
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        told = np.concatenate([chunk.log_prob for chunk in chunks])
        there = self.capabilities.log_probs_for(sampling) if self.spec.facts.log_probs else frozenset()
        untruncated = told
        if self.spec.facts.log_probs == "processed" and sampling.truncates and "untruncated" in there:
            untruncated = await self.spec.dialect.score(client, self.spec.facts, request.prompt.tokens, tokens)
        text = str(self.setup.tokenizer.decode(tokens, skip_special_tokens=True))
        ends = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
        absent = np.full(len(tokens), np.nan, np.float32)
        return Completion(
            prompt_uid=request.prompt.uid,
            sample=request.sample,
            turn=request.turn,
            tokens=tokens,
            text=text[: min(ends)] if ends else text,
            sampled_log_prob=told if "sampled" in there else absent,
            untruncated_log_prob=untruncated if "untruncated" in there else absent,
            policy_version=np.zeros(len(tokens), np.int32),
            finish_reason=chunks[-1].finish_reason or "abort",
            temperature=sampling.temperature,
        )

    def _token_request(self, request: Request) -> TokenRequest:
        prompt, sampling, limit = request.prompt.tokens, request.sampling, self.spec.facts.max_length
        if limit is not None:
            sampling = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, limit - len(prompt))))
        named = f"{request.seed}/{request.prompt.uid}/{request.sample}/{request.turn}".encode()
        seed = int.from_bytes(hashlib.sha256(named).digest()[:4], "big") >> 1
        return TokenRequest(
            id=f"proxima-check-{id(self)}-{next(self._ids)}",
            tokens=prompt.tolist(),
            sampling=sampling,
            seed=seed if self.spec.facts.seeds else None,
            stop_tokens=ending_tokens(self.setup.tokenizer),
        )


def ending_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion of the model's."""
    found = tokenizer.eos_token_id
    return () if found is None else (int(found),)


async def all_chunks(spec: BareServer, client: ServerClient, asked: TokenRequest) -> list[Chunk]:
    """All chunks of a completion.

    Raises:
        Violation: it hung between two tokens, is of another prompt, or has another number of log-probs than tokens.
    """
    stream, chunks = spec.dialect.stream(client, spec.facts, asked), []
    try:
        while True:
            try:
                chunk = await asyncio.wait_for(anext(stream), spec.seconds)
            except StopAsyncIteration:
                break
            require_that(len(chunk.tokens) == len(chunk.log_prob), "there are not as many log-probs as tokens")
            if chunk.prompt_tokens is not None:
                same = chunk.prompt_tokens.tolist() == list(asked.tokens)
                require_that(same, "the completion is of another prompt than was asked")
            chunks.append(chunk)
    except TimeoutError:
        raise Violation(f"no token for {spec.seconds:g} s") from None
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    require_that(bool(chunks) and chunks[-1].finish_reason is not None, "the stream ended without an ending")
    return chunks


class NoTokenizer:
    """Stands for a tokenizer that is not known: texts are empty, and no token ends a completion."""

    eos_token_id = None

    def decode(self, tokens: Any, **_: Any) -> str:
        """An empty text."""
        return ""
