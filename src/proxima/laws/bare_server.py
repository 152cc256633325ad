"""A server as an engine, with nothing in between: no retries, replicas or new weights, so that its errors show."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from proxima.data import Completion
from proxima.data.columns import Floats
from proxima.data.random import server_seed
from proxima.engine.completion_text import decoded, stop_at
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import Chunk, Dialect, ServerFacts, TokenRequest
from proxima.engine.protocol import Capabilities, EngineSetup, EngineSpec, Request, ScoreRequest
from proxima.laws.law import Violation, require_that
from proxima.model.pretrained import stop_tokens_of

AT_ONCE = 32  # requests


@dataclass(frozen=True)
class BareServer(EngineSpec):
    """A running server at an address, with its known dialect and the facts that were probed.

    Args:
        seconds: the timeout of a call, and between two tokens.
    """

    address: Address
    dialect: Dialect
    facts: ServerFacts
    seconds: float = 60.0

    def build(self, setup: EngineSetup) -> "BareServerEngine":  # type: ignore[override]  # it has some of the calls alone
        """The engine; it connects on each request."""
        return BareServerEngine(self, setup)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ServerClient]:
        """A connection for one event loop."""
        client = ServerClient(self.address, seconds=self.seconds)
        try:
            yield client
        finally:
            await client.close()


class BareServerEngine:
    """See `Engine`. It has no calls for new weights and pauses, which have their own laws, and none for aborts."""

    def __init__(self, spec: BareServer, setup: EngineSetup) -> None:
        self.spec, self.setup, self._ids = spec, setup, count()
        facts = spec.facts
        self.capabilities = Capabilities(
            weight_updates=frozenset(),
            pause_modes=frozenset(),
            score=True,
            deterministic=facts.batch_invariant,
            log_probs=facts.log_probs or "raw",
        )

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Complete up to `AT_ONCE` requests at a time, and yield all completions at the end."""
        free = asyncio.Semaphore(AT_ONCE)
        async with self.spec.connect() as client:
            for completion in await asyncio.gather(*(self._completion(client, free, each) for each in requests)):
                yield completion

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Floats]:
        """Score at temperature 1."""
        score, facts = self.spec.dialect.score, self.spec.facts
        async with self.spec.connect() as client:
            return [await score(client, facts, request.prompt_tokens, request.tokens) for request in requests]

    async def _completion(self, client: ServerClient, free: asyncio.Semaphore, request: Request) -> Completion:
        """A completion. If the server reports log-probs after truncation, those before it take a scoring call."""
        asked = self._token_request(request)
        async with free:
            answer = await whole_answer(self.spec, client, asked)
        sampling, tokens, untruncated = request.sampling, answer.tokens, answer.log_prob
        there = self.capabilities.log_probs_for(sampling) if self.spec.facts.log_probs else frozenset()
        if self.spec.facts.log_probs == "processed" and sampling.truncates and "untruncated" in there:
            untruncated = await self.spec.dialect.score(client, self.spec.facts, request.prompt.tokens, tokens)
        text = decoded(self.setup.tokenizer, tokens)
        absent = np.full(len(tokens), np.nan, np.float32)
        return Completion(
            prompt_uid=request.prompt.uid,
            sample=request.sample,
            turn=request.turn,
            tokens=tokens,
            text=text[: stop_at(text, sampling.stop)],
            sampled_log_prob=answer.log_prob if "sampled" in there else absent,
            untruncated_log_prob=untruncated if "untruncated" in there else absent,
            policy_version=np.zeros(len(tokens), np.int32),
            finish_reason=answer.finish_reason or "abort",
            temperature=sampling.temperature,
        )

    def _token_request(self, request: Request) -> TokenRequest:
        prompt, sampling, limit = request.prompt.tokens, request.sampling, self.spec.facts.max_length
        if limit is not None:
            sampling = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, limit - len(prompt))))
        seed = server_seed(request.seed, request.prompt.uid, request.sample, 0, turn=request.turn)
        return TokenRequest(
            id=f"proxima-check-{id(self)}-{next(self._ids)}",
            tokens=prompt.tolist(),
            sampling=sampling,
            seed=seed if self.spec.facts.seeds else None,
            stop_tokens=stop_tokens_of(self.setup.tokenizer),
        )


async def whole_answer(spec: BareServer, client: ServerClient, asked: TokenRequest) -> Chunk:
    """The whole completion as one chunk.

    Raises:
        Violation: it hung between two tokens, has no ending, is of another prompt, or has not one log-prob per token.
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
    return joined(chunks)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with the tokens of all chunks and the ending of the last."""
    tokens, log_prob = (np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("tokens", "log_prob"))
    return replace(chunks[-1], tokens=tokens, log_prob=log_prob, sampling_mask=None)


class NoTokenizer:
    """A stand-in for an unknown tokenizer: texts are empty, and no token ends a completion."""

    eos_token_id = None

    def decode(self, tokens: Any, **_: Any) -> str:
        """An empty text."""
        return ""
