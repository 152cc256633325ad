"""How the fake server is spoken to, and an engine over fakes."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from proxima.data import Prompt, UserError
from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.http import (
    Chunk,
    CompletionRules,
    HttpEngine,
    ServerFacts,
    ServerHealth,
    ServerSpec,
    SyncReport,
    WeightHandover,
)
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from tests.engine.http.fake_model import STOP, VOCABULARY, LetterTokenizer, sequence_log_probs
from tests.engine.http.fake_server import FakeServer

SETS = ("pause_modes", "interrupts")
PROBE = ([1, 2, 3], [4, 5, 6, 0, 1, 2])


class PlainDialect:
    """Speaks to `FakeServer`."""

    kind: ClassVar[str] = "plain"

    async def probe(self, client):
        facts = await client.get("/facts")
        if facts.get("sleeps"):
            await client.post("/wake")
        more = {name: facts[name] for name in facts if name not in ("letters", *SETS)}
        if "weight_updates" in more:
            more["weight_updates"] = tuple(more["weight_updates"])
        sets = {name: frozenset(facts[name]) for name in SETS}
        fixed = {"server": "fake 1", "token_ids": True, "seeds": True, "weight_updates": ("value",)}
        return ServerFacts(**(fixed | more | sets))

    async def stream(self, client, facts, request):
        body = asdict(request.sampling) | {"id": request.id, "tokens": list(request.tokens), "seed": request.seed or 0}
        body["cache_salt"] = request.cache_salt
        async with client.lines("/generate", body) as lines:
            async for line in lines:
                content = json.loads(line)
                spans = content.get("spans")
                yield Chunk(
                    tokens=np.array(content["tokens"], np.int32),
                    log_prob=np.array(content["log_probs"], np.float32),
                    finish_reason=content["finish"],
                    version_spans=None if spans is None else tuple(tuple(span) for span in spans),
                    prompt_tokens=content.get("prompt"),
                )

    async def score(self, client, facts, prompt, tokens):
        scores = await client.post("/score", {"prompt": np.array(prompt).tolist(), "tokens": np.array(tokens).tolist()})
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

    async def abort(self, client, facts, ids):
        await client.post("/abort", {"ids": list(ids)})

    async def load_weights(self, client, facts, weights):
        value = json.loads((weights.folder / "weights.json").read_text())
        await client.post("/weights", {"weights": value, "label": weights.label}, seconds=weights.seconds)

    async def reset_prefix_cache(self, client, facts, *, running):
        await client.post("/forget", {"running": running})

    async def health(self, client, facts):
        load = await client.get("/load")
        label = load.pop("label")
        return ServerHealth(weight_version=label if facts.weight_version else None, **load)


@dataclass(frozen=True, kw_only=True)
class Plain(ServerSpec):
    """Settings that make a test quick."""

    idle_seconds: float = 20.0
    call_seconds: float = 20.0
    health_seconds: float = 0.02
    away_seconds: float = 60.0

    def dialect(self):
        return PlainDialect()


class OneWeight(torch.nn.Module):
    """The trainer's model."""

    def __init__(self, weights: float) -> None:
        super().__init__()
        self.weights = weights


class PlainSync:
    """Writes a folder, has each replica load it, and compares log-probs of known tokens with the formula."""

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder

    async def prepare(self, update, label):
        self.update, self.label = update, label
        (self.folder / "weights.json").write_text(json.dumps(update.module.weights))

    async def push(self, replica):
        weights = WeightHandover(version=self.update.version, label=self.label, folder=self.folder, how="value")
        await replica.dialect.load_weights(replica.client, replica.facts, weights)
        running = self.spec.interrupt == "recompute"
        await replica.dialect.reset_prefix_cache(replica.client, replica.facts, running=running)
        await replica.dialect.resume(replica.client, replica.facts)
        scores = await replica.score(*PROBE)
        off = float(np.abs(scores - sequence_log_probs(self.update.module.weights, *PROBE)).max())
        if off > 1e-5:
            raise UserError(f"engine: {replica.url} computes with other weights: {off:.3g} nats off")
        return SyncReport(
            url=replica.url, version=self.update.version, how="value", seconds=0.0, metrics={"probe_max": off}
        )

    async def close(self):
        (self.folder / "weights.json").unlink(missing_ok=True)


def rules(**changes) -> CompletionRules:
    return CompletionRules(
        **{
            "tokenizer": LetterTokenizer(),
            "stop_tokens": (STOP,),
            "vocabulary": VOCABULARY,
            "max_length": 200,
            "log_probs": "processed",
        }
        | changes
    )


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
def engine_over(servers: Sequence[FakeServer], folder: Path, **settings) -> Iterator[HttpEngine]:
    spec = Plain(url=tuple(server.url for server in servers), **settings)
    engine = HttpEngine(spec, rules(), PlainSync(spec, folder))
    try:
        yield engine
    finally:
        engine.close()


def update(version: int, weights: float) -> WeightUpdate:
    return WeightUpdate(version=version, module=OneWeight(weights))


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


def expected(request: Request, completion, weights: dict[int, float]) -> np.ndarray:
    """[T] what its log-probs are by the formula, each token by the weights that it says it is of."""
    each = [weights[version] for version in completion.policy_version.tolist()]
    return sequence_log_probs(each, request.prompt.tokens, completion.tokens, completion.temperature)
