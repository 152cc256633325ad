"""Servers of this process, with a model that is a formula and faults on demand; how they are spoken to, which needs no
network; an engine over them, and what completions are by the formula.

Faults of a completion, by `script` (the next ones) or `rates` (each with its probability, by `seed`):

    error      status 500              overload   status 429           hang       a token, then nothing
    break      a token, then the connection is closed                  nan        a log-prob is NaN
    unstopped  it goes on after the stop token                        unmasked   a token is not in its sampling mask
    silent     the end comes without experts
"""

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import httpx
import numpy as np
import torch

from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.data.flow import Prompt
from proxima.engine.http.client import ServerClient
from proxima.engine.http.dialect import (
    Chunk,
    Dialect,
    ServerFacts,
    ServerHealth,
    TokenRequest,
    WeightsInFolder,
    WrittenTokens,
)
from proxima.engine.http.engine import HttpEngine, ServerSpec
from proxima.engine.http.generation_job import CompletionRules
from proxima.engine.http.weights.sync import StagedWeights
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import Request, Sampling, ServerError, WeightUpdate
from tests.engine.http.fake_model import (
    LETTERS,
    STOP,
    VOCABULARY,
    LetterTokenizer,
    draw,
    log_probs,
    rows_of,
    sequence_log_probs,
    states,
    truncated,
)
from tests.engine.http.fake_vllm import unread
from tests.processes import until

FACTS: dict[str, Any] = {
    "server": "fake 1",
    "model": "formula",
    "max_length": 256,
    "log_probs": "processed",
    "takes_weights": True,
    "keeps_kv": True,
    "version_spans": True,
    "seeds": True,
    "batch_invariant": True,
}
PROBE = ([1, 2, 3], [4, 5, 6, 0, 1, 2])
WEIGHTS = {0: 0.5, 1: 0.8, 2: 1.3}  # of each version; servers begin with the first
IN_PLACE = {"batch_invariant": False}  # facts of servers that hold completions while weights change
ELSEWHERE = IN_PLACE | {"version_spans": False}  # they end, and the rest is requested
LONG = 600.0  # seconds after which something must have happened
SERVERS: WeakValueDictionary[str, "PlainServer"] = WeakValueDictionary()  # by their addresses, where nobody listens
NUMBERS = count(1)


@dataclass(eq=False)
class Running:
    """A completion that is being generated."""

    request: TokenRequest
    fault: str | None
    kv: list[float]
    tokens: list[int] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    sets: list[list[int]] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    ended: str | None = None
    answered: bool = False  # a chunk was sent
    hangs: bool = False

    @property
    def everything(self) -> list[int]:
        return [*map(int, self.request.tokens), *self.tokens]


@dataclass
class Failure:
    """What calls are answered with, so many times."""

    status: int = 500
    message: Any = "broken on purpose"
    times: float = float("inf")
    headers: dict[str, str] = field(default_factory=dict)


class PlainServer:
    """What a server has and does. Attributes may be changed at any time.

    Args:
        facts: what differs from FACTS.
        rates: of faults.
        seed: of their draws, each of which belongs to a request.
        slow: seconds a token.

    `stop_after`: completions stop sampling after so many tokens, until it is None. `ignores_weights`: answers that new
    weights are loaded, and keeps the others. `forgetful`: keeps the label of the weights that it had. `silent_aborts`:
    sends no experts with them.
    """

    def __init__(
        self,
        *,
        facts: dict[str, Any] | None = None,
        rates: dict[str, float] | None = None,
        seed: int = 0,
        slow: float = 0.0,
    ) -> None:
        self.facts, self.rates, self.slow = FACTS | (facts or {}), rates or {}, slow
        self.letters = self.facts.pop("letters", LETTERS)
        self.script: deque[str | None] = deque()
        self.calls: Counter[str] = Counter()
        self.requests: list[TokenRequest] = []
        self.stop_after: int | None = None
        self.ignores_weights = self.forgetful = self.silent_aborts = self.shared = False
        self.failing: dict[str, Failure] = {}  # by the calls
        self.begun = 0  # requests that came as far as sampling
        self.seed, self.asked = seed, Counter[str]()
        self.url = f"http://127.0.0.1:{next(NUMBERS)}"
        SERVERS[self.url] = self
        self.come_back()

    # ---- what happens to servers -------------------------------------------------------------------------------------

    def die(self) -> None:
        """Close every connection, and accept no other."""
        self.life: object = None

    def break_streams(self) -> None:
        self.life = object()

    def come_back(self) -> None:
        """As a new process, with the weights that it was first started with."""
        self.life = object()
        self.weights, self.label, self.paused = 0.5, "start", False
        self.asleep = False
        self.cache: dict[tuple[str | None, tuple[int, ...]], list[float]] = {}
        self.running: dict[str, Running] = {}

    def restart(self) -> None:
        self.die()
        self.come_back()

    def fail(self, *calls: str, **how: Any) -> None:
        """From now on, as `Failure` says: all of them together as many times."""
        self.failing |= dict.fromkeys(calls, Failure(**how))

    async def called(self, client: ServerClient, call: str) -> None:
        """Count the call; raise what the client makes of a server that is away, or that answers with a failure."""
        self.calls[call] += 1
        await self.lives(self.life, call)
        if (failure := self.failing.get(call)) is not None and failure.times > 0:
            failure.times -= 1
            answer = httpx.Response(failure.status, json={"error": failure.message}, headers=failure.headers)
            await client._check_status(call, unread(answer))

    async def lives(self, life: object, call: str, seconds: float = 0.0) -> None:
        """Wait so long, and raise what the client does if the server has died meanwhile."""
        await asyncio.sleep(seconds)
        if life is None or life is not self.life:
            raise ServerError(self.url, call, "can't be reached" if life is None else "the connection broke")

    # ---- sampling ----------------------------------------------------------------------------------------------------

    async def complete(self, client: ServerClient, request: TokenRequest) -> AsyncIterator[Chunk]:
        life = self.life
        self.requests.append(request)
        fault = self._fault(request)
        if fault in ("error", "overload"):
            await client._check_status("/generate", unread(httpx.Response(500 if fault == "error" else 429)))
        running = self.running[request.id] = Running(request, fault, self._kv(request))
        running.rows.append(rows_of(running.everything[:-1], self.weights))
        self.begun += 1
        uniforms = np.random.default_rng(request.seed or 0)
        try:
            while running.ended is None:
                at = len(running.tokens)
                await self.lives(life, "/generate", self.slow)
                while running.ended is None and (
                    self.paused or (self.stop_after is not None and at >= self.stop_after)
                ):
                    await self.lives(life, "/generate", 0.001)
                if running.ended is None and not (at == 1 and fault in ("hang", "break")):
                    self._one_token(running, uniforms.random())
                if fault in ("hang", "break") and (at == 1 or running.ended is not None):  # the first may be the last
                    running.hangs = fault == "hang"
                    while fault == "hang":
                        await self.lives(life, "/generate", 0.001)
                    raise ServerError(self.url, "/generate", "the connection broke")
                running.answered = True
                yield self._chunk(running, at)
        finally:
            self.running.pop(request.id, None)

    def _fault(self, request: TokenRequest) -> str | None:
        if self.script:
            return self.script.popleft()
        name = "-".join(request.id.split("-")[1:4])  # an id begins with the engine's and ends with the attempt's
        self.asked[name] += 1
        at = random.Random(f"{self.seed} {name} {self.asked[name]}").random()  # whoever comes first
        for fault, rate in self.rates.items():
            if (at := at - rate) < 0:
                return fault
        return None

    def _chunk(self, running: Running, at: int) -> Chunk:
        """What was sampled since, and with the end, all labels and experts."""
        log_prob, sets, request = np.array(running.log_prob[at:]), running.sets[at:], running.request
        if running.fault == "unmasked" and not at:
            sets = [[token for token in range(STOP) if token != running.tokens[0]]]
        named = running.ended is not None and self.facts["version_spans"]
        silent = running.fault == "silent" or (running.ended == "abort" and self.silent_aborts)
        routed = running.ended is not None and request.routes is not None and not silent
        return Chunk(
            tokens=running.tokens[at:],
            log_prob=log_prob * np.nan if running.fault == "nan" else log_prob,
            finish_reason=running.ended,
            version_spans=tuple(spans_of(running.labels)) if named else None,
            prompt_tokens=None if at else request.tokens,
            sampling_mask=SamplingMask.of_sets(sets) if request.sampling_mask else None,
            routes=np.concatenate(running.rows) if routed else None,
        )

    def _kv(self, request: TokenRequest) -> list[float]:
        """Of the prompt, from the cache as far as it goes."""
        tokens, salt = tuple(map(int, request.tokens)), request.cache_salt
        prefix = next((kv for n in range(len(tokens), 0, -1) if (kv := self.cache.get((salt, tokens[:n])))), [])
        kv = self.cache[salt, tokens] = states(self.weights, tokens, prefix)
        return list(kv)

    def _one_token(self, running: Running, uniform: float) -> None:
        running.rows.append(rows_of(running.everything, self.weights)[-1:])
        sampling, running.kv = running.request.sampling, states(self.weights, running.everything, running.kv)
        full = log_probs(self.weights, running.everything[-1], running.kv, sampling.temperature)
        sampled = truncated(full, sampling.top_k)
        token = draw(sampled, uniform, sampling.temperature)
        reported = full if self.facts["log_probs"] == "raw" else sampled
        running.tokens.append(token)
        running.log_prob.append(float(reported[token]))
        running.labels.append(self.label)
        running.sets.append(np.flatnonzero(np.isfinite(sampled)).tolist())
        text = LetterTokenizer().decode(running.tokens)
        if (token == STOP and running.fault != "unstopped") or any(entry in text for entry in sampling.stop):
            running.ended = "stop"
        elif len(running.tokens) >= sampling.max_tokens:
            running.ended = "length"

    async def score(self, written: list[int], first: int) -> np.ndarray:
        life = self.life
        while self.paused:
            await self.lives(life, "/score", 0.001)
        return sequence_log_probs(self.weights, written[:first], written[first:])

    async def health(self) -> ServerHealth:
        return ServerHealth(weight_version=self.label, model=self.facts["model"])


class PlainDialect(Dialect):
    """Speaks to them."""

    kind: ClassVar[str] = "plain"

    async def called(self, client, call) -> PlainServer:
        server = SERVERS[client.url]
        await server.called(client, call)
        return server

    async def probe(self, client):
        server = await self.called(client, "/facts")
        if server.facts.get("sleeps"):
            await self.wake(client, None)
        return ServerFacts(**server.facts)

    async def stream(self, client, facts, request):
        server = await self.called(client, "/generate")
        async with contextlib.aclosing(server.complete(client, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def score(self, client, facts, given, first):
        return await (await self.called(client, "/score")).score(given.written, first)

    async def tokenize(self, client, facts, text):
        return LetterTokenizer((await self.called(client, "/tokenize")).letters)(text)["input_ids"]

    async def pause(self, client, facts, mode):
        server = await self.called(client, "/pause")
        server.paused = True
        for running in server.running.values() if mode == "abort" else ():
            running.ended = running.ended or "abort"

    async def resume(self, client, facts):
        (await self.called(client, "/resume")).paused = False

    async def sleep(self, client, facts):
        server = await self.called(client, "/sleep")
        assert server.paused and not server.running
        server.asleep = True

    async def wake(self, client, facts):
        (await self.called(client, "/wake")).asleep = False

    async def wake_cache(self, client, facts):
        """They take everything at once."""

    async def load_folder(self, client, facts, weights):
        server = await self.called(client, "/weights")
        assert server.paused or server.shared
        if not server.ignores_weights:
            server.weights = float(str(weights.folder))
        if not server.forgetful:
            server.label = weights.label

    async def reset_prefix_cache(self, client, facts, *, running):
        server = await self.called(client, "/forget")
        server.cache.clear()
        for entry in server.running.values() if running else ():
            entry.kv = states(server.weights, entry.everything[:-1])

    async def health(self, client, facts):
        return await (await self.called(client, "/load")).health()


def spans_of(labels: list[str]) -> list[tuple[str, int, int]]:
    """(label, start, end) of the labels of tokens."""
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    return [(labels[a], a, b) for a, b in zip(starts, [*starts[1:], len(labels)], strict=False)]


@dataclass(frozen=True, kw_only=True)
class Plain(ServerSpec):
    """Settings that make a test quick, and that no busy machine makes fail."""

    idle_seconds: float = 60.0
    call_seconds: float = 30.0
    health_seconds: float = 0.02
    away_seconds: float = LONG

    def dialect(self):
        return PlainDialect()


class OneWeight(torch.nn.Module):
    """The trainer's model."""

    def __init__(self, weights: float) -> None:
        super().__init__()
        self.weights = weights


class PlainSync:
    """Has each replica load weights, and compares log-probs of known tokens with the formula."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec

    def choose(self, facts):
        """There is one way."""

    async def check(self, replicas, update):
        """It is open."""

    def forget(self, replica):
        """All weights are compared."""

    def label_of(self, tag, number, version):
        return f"{tag}.{number}.v{version}"

    async def prepare(self, update, label, dtype):
        named = Path(str(update.module.weights))  # they are a number, and need no file
        handover = WeightsInFolder(version=update.version, label=label, folder=named)
        return StagedWeights(handover, update, None, np.zeros(0))

    async def push(self, replica, push_round=None):
        weights = self.newest.handover
        await replica.dialect.load_folder(replica.client, replica.facts, weights)
        running = self.spec.interrupt == "recompute"
        await replica.dialect.reset_prefix_cache(replica.client, replica.facts, running=running)
        await replica.dialect.resume(replica.client, replica.facts)
        given = WrittenTokens.of(np.concatenate(PROBE), None)
        scores = await replica.dialect.score(replica.client, replica.facts, given, len(PROBE[0]))
        off = float(np.abs(scores - sequence_log_probs(float(weights.folder.name), *PROBE)).max())
        if off > 1e-5:
            raise UserError(f"engine: {replica.url} computes with other weights: {off:.3g} nats off")
        return {"seconds": 0.0, "probe_max": off}

    async def close(self):
        """There is nothing to remove."""


RULES = CompletionRules(tokenizer=LetterTokenizer(), stop_tokens=(STOP,), vocabulary=VOCABULARY, max_length=200)


def fakes(count: int = 1, **settings) -> list[PlainServer]:
    return [PlainServer(seed=i, **settings) for i in range(count)]


@contextlib.contextmanager
def engine_over(servers: Sequence[PlainServer], routes=None, **settings) -> Iterator[HttpEngine]:
    spec = Plain(url=tuple(server.url for server in servers), **settings)
    engine = HttpEngine(spec, replace(RULES, routes=routes), PlainSync(spec))
    try:
        yield engine
    finally:
        engine.close()


def update(version: int, weights: float | None = None) -> WeightUpdate:
    return WeightUpdate(version=version, module=OneWeight(WEIGHTS[version] if weights is None else weights))


def requests(prompts: int = 3, samples: int = 4, *, first: int = 0, seed: int = 1, **sampling) -> list[Request]:
    """Prompts of 3, 4, 5, 3 … tokens."""
    chosen = Sampling(**({"max_tokens": 12} | sampling))
    made_prompts = [
        Prompt(uid=uid, messages=(), tokens=[(uid + i) % STOP for i in range(3 + uid % 3)])
        for uid in range(first, first + prompts)
    ]
    return [
        Request(prompt=prompt, sample=s, sampling=chosen, seed=seed) for prompt in made_prompts for s in range(samples)
    ]


def expected(request: Request, completion) -> np.ndarray:
    """[T] what its log-probs are by the formula, each token by the weights that it says it is of."""
    each = [WEIGHTS[version] for version in completion.policy_version.tolist()]
    return sequence_log_probs(each, request.prompt.tokens, completion.tokens, completion.temperature)


def versions(given) -> set[int]:
    """Of all their tokens."""
    return {version for completion in given for version in completion.policy_version.tolist()}


def check(asked: Sequence[Request], given, *only: int) -> None:
    """Every request once, each by the formula, and of these versions only, where some are given."""
    assert [completion.key for completion in given] == [(r.prompt.uid, r.sample, 0) for r in asked]
    for request, completion in zip(asked, given, strict=True):
        np.testing.assert_allclose(completion.sampled_log_prob, expected(request, completion), atol=1e-6)
        assert 1 <= len(completion.tokens) <= request.sampling.max_tokens
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == STOP else "length")
        assert STOP not in completion.tokens[:-1]
        assert completion.text == LetterTokenizer().decode(completion.tokens)
    assert not only or versions(given) == set(only)


# ---- what happens meanwhile ------------------------------------------------------------------------------------------


def held(server: PlainServer, tokens: int) -> bool:
    """Whether all that runs has come to the token where it waits."""
    return bool(server.running) and all(len(running.tokens) == tokens for running in list(server.running.values()))


async def begun(engine: HttpEngine, servers: Sequence[PlainServer], asked: Sequence[Request], tokens: int = 2):
    """What asks for the completions, once all run and wait after so many tokens, or have ended before."""
    for server in servers:
        server.stop_after = tokens
    task = asyncio.create_task(collect(engine, asked))

    def all_wait() -> bool:
        if sum(server.begun for server in servers) < len(asked):  # read before `running`
            return False
        return all(held(server, tokens) for server in servers if server.running)

    await until(all_wait)
    return task


def go_on(servers: Sequence[PlainServer]) -> None:
    for server in servers:
        server.stop_after = None


async def across_new_weights(engine: HttpEngine, servers: Sequence[PlainServer], asked: Sequence[Request]):
    """Completions that new weights come to after their fourth token."""
    for server in servers:
        server.stop_after = 4
    task = asyncio.create_task(collect(engine, asked))
    while sum(len(completion.tokens) for completion in await engine.in_flight()) < 4:
        await asyncio.sleep(0.001)
    await engine.pause()
    await engine.publish(update(1))
    go_on(servers)
    await engine.resume()
    return await task


@contextlib.asynccontextmanager
async def hanging_calls_ended(engine: HttpEngine, servers: Sequence[PlainServer]):
    """Meanwhile a completion that hangs has had its idle seconds at once; on a busy machine, any few seconds that a
    test can wait for would be over for every completion."""

    async def end_them() -> None:
        while True:
            for replica, server in zip(engine._pool.replicas, servers, strict=True):
                for running in list(server.running.values()):
                    key = tuple(map(int, running.request.id.split("-")[1:4]))
                    for call in list(replica.running.values()) if running.hangs else ():
                        # what has not been read yet would begin its idle seconds again
                        if call.job.request.key == key and call.answered == running.answered:
                            running.hangs = False
                            engine._loop.submit(call.limit, 0.0)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(end_them())
    yield
    task.cancel()


def hold_scores(server: PlainServer, times: float = float("inf")):
    """The server's next scores, of the weights that it has, wait until the function that this returns is called."""
    released, score = Event(), server.score

    async def later(*given):
        nonlocal times
        times -= 1
        waits, scores = times >= 0, await score(*given)
        while waits and not released.is_set():
            await asyncio.sleep(0.001)
        return scores

    server.score = later
    return released.set


def replicas(engine: HttpEngine) -> list[bool]:
    """Which are in service."""
    return [replica.in_service for replica in engine._pool.replicas]
