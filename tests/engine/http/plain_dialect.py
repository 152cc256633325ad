"""How the fake server is spoken to, an engine over fakes, and what completions are by the formula of their model."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from proxima.data import Prompt, UserError
from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.http.client import StreamSize
from proxima.engine.http.dialect import Chunk, ServerFacts, ServerHealth, WeightHandover, WrittenTokens
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.generation_job import CompletionRules
from proxima.engine.http.server_spec import ServerSpec
from proxima.engine.local import collect
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from tests.engine.http.fake_model import STOP, VOCABULARY, LetterTokenizer, sequence_log_probs
from tests.engine.http.fake_server import FakeServer

PROBE = ([1, 2, 3], [4, 5, 6, 0, 1, 2])
WEIGHTS = {0: 0.5, 1: 0.8, 2: 1.3}  # of each version; servers begin with the first
IN_PLACE = {"batch_invariant": False}  # facts of servers that hold completions while weights change
ELSEWHERE = IN_PLACE | {"version_spans": False}  # they end, and the rest is requested
LONG = 600.0  # seconds after which something must have happened


class PlainDialect:
    """Speaks to `FakeServer`."""

    kind: ClassVar[str] = "plain"
    servers: dict[str, FakeServer]  # by their URLs

    async def probe(self, client):
        facts = await client.get("/facts")
        if facts.get("sleeps"):
            await client.post("/wake")
        fixed = {"server": "fake 1", "seeds": True, "takes_weights": True}
        return ServerFacts(**(fixed | {name: value for name, value in facts.items() if name != "letters"}))

    async def stream(self, client, facts, request):
        body = asdict(request.sampling) | {"id": request.id, "tokens": list(request.tokens), "seed": request.seed or 0}
        body["cache_salt"] = request.cache_salt
        async with contextlib.aclosing(client.events("/generate", body, StreamSize(1 << 20, 1 << 20))) as events:
            async for content in events:
                spans = content.get("spans")
                yield Chunk(
                    tokens=np.array(content["tokens"], np.int32),
                    log_prob=np.array(content["log_probs"], np.float32),
                    finish_reason=content["finish"],
                    version_spans=None if spans is None else tuple(tuple(span) for span in spans),
                    prompt_tokens=content.get("prompt"),
                )

    async def score(self, client, facts, given, first):
        scores = await client.post("/score", {"prompt": given.written[:first], "tokens": given.written[first:]})
        return np.array(scores, np.float32)

    async def tokenize(self, client, facts, text):
        return await client.post("/tokenize", {"text": text})

    async def pause(self, client, facts, mode):
        await client.post("/pause", {"mode": mode})

    async def resume(self, client, facts):
        await client.post("/resume")

    async def sleep(self, client, facts):
        await client.post("/sleep")

    async def wake(self, client, facts):
        await client.post("/wake")

    async def load_weights(self, client, facts, weights):
        value = json.loads((weights.folder / "weights.json").read_text())
        await client.post("/weights", {"weights": value, "label": weights.label}, seconds=weights.seconds)

    async def reset_prefix_cache(self, client, facts, *, running):
        await client.post("/forget", {"running": running})

    async def health(self, client, facts):
        return ServerHealth(**await client.get("/load"))


@dataclass(frozen=True, kw_only=True)
class Plain(ServerSpec):
    """Settings that make a test quick, and that no busy machine makes fail."""

    idle_seconds: float = 60.0
    call_seconds: float = 30.0
    health_seconds: float = 0.02
    away_seconds: float = LONG
    talk: Any = None  # a dialect

    def dialect(self):
        return self.talk or PlainDialect()


class OneWeight(torch.nn.Module):
    """The trainer's model."""

    def __init__(self, weights: float) -> None:
        super().__init__()
        self.weights = weights


class PlainSync:
    """Writes a folder, has each replica load it, and compares log-probs of known tokens with the formula."""

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder

    async def prepare(self, update, label, dtype):
        self.update, self.label = update, label
        (self.folder / "weights.json").write_text(json.dumps(update.module.weights))

    async def push(self, replica):
        weights = WeightHandover(version=self.update.version, label=self.label, folder=self.folder)
        await replica.dialect.load_weights(replica.client, replica.facts, weights)
        running = self.spec.interrupt == "recompute"
        await replica.dialect.reset_prefix_cache(replica.client, replica.facts, running=running)
        await replica.dialect.resume(replica.client, replica.facts)
        given = WrittenTokens.of(np.concatenate(PROBE), None)
        scores = await replica.dialect.score(replica.client, replica.facts, given, len(PROBE[0]))
        off = float(np.abs(scores - sequence_log_probs(self.update.module.weights, *PROBE)).max())
        if off > 1e-5:
            raise UserError(f"engine: {replica.url} computes with other weights: {off:.3g} nats off")
        return {"seconds": 0.0, "probe_max": off}

    async def close(self):
        (self.folder / "weights.json").unlink(missing_ok=True)


RULES = CompletionRules(tokenizer=LetterTokenizer(), stop_tokens=(STOP,), vocabulary=VOCABULARY, max_length=200)


@contextlib.contextmanager
def fakes(count: int = 1, **settings) -> Iterator[list[FakeServer]]:
    """Servers, in a thread of their own."""
    loop = EventLoopThread("fakes")
    servers = [FakeServer(loop, seed=i, **settings) for i in range(count)]
    try:
        yield servers
    finally:

        async def last() -> None:
            for server in servers:
                server.server.close()
                server.place.close()

        loop.close(last)


@contextlib.contextmanager
def engine_over(servers: Sequence[FakeServer], folder: Path, routes=None, **settings) -> Iterator[HttpEngine]:
    spec = Plain(url=tuple(server.url for server in servers), **settings)
    if spec.talk is not None:
        spec.talk.servers = {server.url: server for server in servers}
    engine = HttpEngine(spec, replace(RULES, routes=routes), PlainSync(spec, folder))
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


async def until(condition) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.002)


def held(server: FakeServer, tokens: int) -> bool:
    """Whether all that runs has come to the token where it waits."""
    return bool(server.running) and all(len(request.tokens) == tokens for request in list(server.running.values()))


async def begun(engine: HttpEngine, servers: Sequence[FakeServer], asked: Sequence[Request], tokens: int = 2):
    """What asks for the completions, once all run and wait after so many tokens, or have ended before."""
    for server in servers:
        server.stop_after = tokens
    task = asyncio.create_task(collect(engine, asked))

    def all_wait() -> bool:
        if sum(server.begun for server in servers) < len(asked):  # read before `running`
            return False
        running = [request for server in servers for request in list(server.running.values())]
        return all(len(request.tokens) == tokens for request in running)

    await until(all_wait)
    return task


def go_on(servers: Sequence[FakeServer]) -> None:
    for server in servers:
        server.stop_after = None


async def across_new_weights(engine: HttpEngine, servers: Sequence[FakeServer], asked: Sequence[Request]):
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
async def hanging_calls_ended(engine: HttpEngine, servers: Sequence[FakeServer]):
    """Meanwhile a completion that hangs has had its idle seconds at once; on a busy machine, any few seconds that a
    test can wait for would be over for every completion."""

    async def end_them() -> None:
        while True:
            for replica, server in zip(engine._pool.replicas, servers, strict=True):
                for request in list(server.running.values()):
                    key = tuple(map(int, request.body["id"].split("-")[1:4]))
                    for call in list(replica.running.values()) if request.hangs else ():
                        # what has not been read yet would begin its idle seconds again
                        if call.job.request.key == key and call.answered == request.answered:
                            request.hangs = False
                            engine._loop.submit(call.limit, 0.0)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(end_them())
    yield
    task.cancel()


def hold_scores(server: FakeServer, times: float = float("inf")):
    """The server's next scores, of the weights that it has, wait until the function that this returns is called."""
    release, scored = asyncio.Event(), server._scored

    async def later(body):
        nonlocal times
        times -= 1
        waits, scores = times >= 0, await scored(body)
        if waits:
            await release.wait()
        return scores

    server._scored = later
    return lambda: server.loop.submit(release.set)


def replicas(engine: HttpEngine) -> list[bool]:
    """Which are in service."""
    return [replica.in_service for replica in engine._pool.replicas]
