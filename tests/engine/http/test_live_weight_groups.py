"""Weights that are broadcast to two real vLLM servers while both generate, and one of them fails. Every completion
arrives once, each of its tokens with the log-prob of the version that it names; the other server gets every version,
and the one that failed returns.

PROXIMA_VLLM names the executable; PROXIMA_ROUNDS is the number of failures of each kind, 10 by default."""

import asyncio
import copy
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from proxima.data.flow import Completion, Prompt
from proxima.engine.http.replica import Replica
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights.process_group import SenderGroup
from proxima.engine.http.weights.stream import StreamedWeights
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineSetup, Request, Sampling, WeightUpdate
from proxima.engine.serve.launch import Serve
from proxima.model.pretrained import LoadedModel
from tests.engine.http.live_vllm import EXECUTABLE
from tests.tiny import tiny_tokenizer

SIBLING = "tests/engine/http/test_weight_groups.py::test_faults_at_random_buckets[cut-4]"
pytestmark = [
    pytest.mark.campaign(SIBLING),
    pytest.mark.skipif(EXECUTABLE is None, reason="PROXIMA_VLLM names no vLLM"),
]
ROUNDS = int(os.environ.get("PROXIMA_ROUNDS", "10"))
BUCKET = 1 << 18  # bytes
WEIGHT_SECONDS, CALL_SECONDS = 20.0, 180.0  # of calls, the first ones take long on a busy machine
LONGEST = 2 * CALL_SECONDS + 4 * WEIGHT_SECONDS  # a publish: pause, an attempt, what it takes to end it, another one
RETURN = 600.0  # seconds; a restart takes a minute, or several on a busy machine
LENGTH = 256  # tokens


def random_llama(folder: Path) -> LoadedModel:
    """About 10 MB in float32, with a tied head."""
    sizes = {"vocab_size": 259, "hidden_size": 192, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 6, "intermediate_size": 512, "max_position_embeddings": LENGTH}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=0, bos_token_id=0, tie_word_embeddings=True)
    loaded = LoadedModel(model=LlamaForCausalLM(config).eval(), tokenizer=tiny_tokenizer(), path=str(folder))
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(folder)
    return loaded


class Run:
    """A trainer whose weights move at each version, and completions that are requested all the time."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.loaded = random_llama(folder / "model")
        small: dict[str, Any] = {"dtype": "float32", "threads": 1, "arguments": ("--num-gpu-blocks-override", "64")}
        serve = Serve(executable=EXECUTABLE, eager=True, replicas=2, restarts=1000, **small)
        limits: dict[str, Any] = {"weight_seconds": WEIGHT_SECONDS, "call_seconds": CALL_SECONDS}
        limits |= {"health_seconds": 2.0, "idle_seconds": 60.0, "retries": 20, "max_running": 4}
        spec = Vllm(serve=serve, transfer="group", probe_tokens=64, **limits)
        setup = replace(EngineSetup.of(self.loaded, max_length=LENGTH), log=folder / "server.log")
        self.engine = spec.build(setup)
        self.begin()

    def begin(self) -> None:
        """Begin with version 0; the engine is there."""
        self.version, self.weights = 0, {0: self._copy()}
        self.asked, self.answers = list[Request](), list[Completion]()
        self.draws = torch.Generator().manual_seed(1)
        self.checked = self.mixed = 0  # completions that were checked; those of several versions
        self._ends = False

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.loaded.model.state_dict().items()}

    @property
    def replicas(self) -> list[Replica]:
        return self.engine._pool.replicas

    @property
    def counts(self) -> Counter[str]:
        return self.engine._pool.counts

    async def publish(self) -> float:
        """Returns the seconds that it took."""
        self.version += 1
        with torch.no_grad():
            for weight in self.loaded.model.parameters():
                weight.mul_(1 + 0.03 * torch.randn(weight.shape, generator=self.draws))
        self.weights[self.version] = self._copy()
        start = time.monotonic()
        await self.engine.pause()
        async with asyncio.timeout(LONGEST):
            await self.engine.publish(WeightUpdate(version=self.version, module=self.loaded.model))
        await self.engine.resume()
        return time.monotonic() - start

    async def generate(self) -> None:
        """Request completions, until `finish`."""
        draws = np.random.default_rng(0)

        async def one_after_another(worker: int) -> None:
            number = 0
            while not self._ends:
                uid, tokens = 1000 * worker + number, draws.integers(1, 259, 5).astype(np.int32)
                sampling = Sampling(max_tokens=int(draws.integers(50, 240)))
                request = Request(
                    prompt=Prompt(uid=uid, messages=(), tokens=tokens), sample=0, sampling=sampling, seed=uid
                )
                self.asked.append(request)
                self.answers += await collect(self.engine, [request])
                number += 1

        await asyncio.gather(*map(one_after_another, range(6)))

    def finish(self) -> None:
        self._ends = True

    async def both_serve(self) -> None:
        async with asyncio.timeout(RETURN):
            while not all(replica.in_service for replica in self.replicas):
                await asyncio.sleep(0.25)

    def check(self) -> None:
        """Every token that has arrived since the last check has the log-prob of the version that it names, and not that
        of the next one."""
        answers, self.checked = self.answers[self.checked :], len(self.answers)
        prompts, model = {r.prompt.uid: r.prompt.tokens for r in self.asked}, copy.deepcopy(self.loaded.model)
        distances, others = [0.0], list[float]()
        for version, weights in self.weights.items():
            model.load_state_dict(weights)
            for answer in answers:
                at, before = answer.policy_version == version, answer.policy_version == version - 1
                if not (at | before).any():
                    continue
                prompt = prompts[answer.key[0]]
                ids = torch.tensor([[*prompt.tolist(), *answer.tokens.tolist()]])
                with torch.inference_mode():
                    rows = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                off = np.abs(rows.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy() - answer.sampled_log_prob)
                distances += off[at].tolist()
                others += off[before].tolist()
                self.mixed += at.any() and not at.all()
        assert max(distances) < 5e-3, max(distances)
        assert not others or np.median(others) > 0.02

    def check_count(self) -> None:
        """Every request has one answer."""
        assert Counter(answer.key for answer in self.answers) == Counter(
            (r.prompt.uid, r.sample, 0) for r in self.asked
        )


@asynccontextmanager
async def training(folder: Path) -> AsyncIterator[Run]:
    run = await asyncio.to_thread(Run, folder)
    try:
        await run.publish()
        generating = asyncio.create_task(run.generate())
        yield run
        run.finish()
        async with asyncio.timeout(LONGEST):
            await generating
    finally:
        await asyncio.to_thread(run.engine.close)


def processes(replica: Replica) -> list[psutil.Process]:
    """Those of the server: it listens on the port, and its children compute."""
    port = replica.url.rpartition(":")[2]
    servers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if port in (process.info["cmdline"] or ()) and "serve" in process.info["cmdline"]
    ]
    server = next(server for server in servers if not set(server.children()) & set(servers))  # not its guardian
    return [*server.children(recursive=True), server]


def send_signal(found: list[psutil.Process], number: int) -> None:
    for process in found:
        process.send_signal(number)


class Faults:
    """Breaks a push: at a bucket that the trainer sends, or by a name that the server does not know."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draws: random.Random) -> None:
        self.bucket, self.strike, self.cut = -1, (lambda: None), ""
        broadcast, load = SenderGroup._broadcast, VllmDialect.load_updates

        def broadcasts(group: Any, content: Any, options: Any) -> Any:
            self.bucket -= 1
            if self.bucket == 0:
                self.strike()
            return broadcast(group, content, options)

        async def loads(dialect: Any, client: Any, facts: Any, weights: Any, given: Any) -> None:
            async def updates() -> Any:
                async for update in given:
                    tensors = [list(bucket) for bucket in update["content"]["tensors"]]
                    bucket = draws.choice(tensors)
                    place = draws.randrange(len(bucket))
                    bucket[place] = ["no.such.weight", *bucket[place][1:]]
                    yield update | {"content": update["content"] | {"tensors": tensors}}

            cut, self.cut = self.cut == client.url, "" if self.cut == client.url else self.cut
            await load(dialect, client, facts, weights, updates() if cut else given)

        monkeypatch.setattr(SenderGroup, "_broadcast", broadcasts)
        monkeypatch.setattr(VllmDialect, "load_updates", loads)


@pytest.mark.timeout(0)  # it has limits of its own
@pytest.mark.parametrize("fault", ["cut", "stopped", "killed", "returned"])
def test_one_of_two_servers_fails(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stopped`: for the time of the push; `killed`: in the middle of it; `returned`: killed before it. A killed server
    returns while newer weights are pushed to the other one."""
    monkeypatch.setattr(weight_buckets, "BUCKET", BUCKET)
    monkeypatch.setattr("proxima.engine.serve.servers.LONGEST_BREAK", 1.0)
    asyncio.run(asyncio.wait_for(rounds(fault, tmp_path, monkeypatch), ROUNDS * RETURN))


async def rounds(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(fault)
    faults, healthy, failing = Faults(monkeypatch, draws), list[float](), list[float]()
    async with training(tmp_path) as run:
        buckets = _buckets_of(run.engine._sync)
        for number in range(ROUNDS):
            broken, bucket = draws.choice(run.replicas), draws.randrange(1, buckets + 1)
            good, ejected = run.replicas[1 - run.replicas.index(broken)], run.counts["ejected"]
            while len(broken.running) < 2:
                await asyncio.sleep(0.05)
            found = processes(broken)
            if fault == "cut":
                faults.cut = broken.url
            elif fault == "returned":
                send_signal(found, signal.SIGKILL)
                await asyncio.sleep(draws.uniform(0, 3))
            else:
                faults.bucket, faults.strike = bucket, _striking(found, fault)
            failing.append(await run.publish())
            assert run.counts["ejected"] > ejected, f"bucket {bucket}"
            assert (await run.engine._loop.run(good.health())).weight_version == good.proof.label
            if fault == "stopped":
                send_signal(found, signal.SIGCONT)
            while fault in ("killed", "returned") and not broken.in_service:
                await asyncio.sleep(draws.uniform(0, 20))
                await run.publish()
            await run.both_serve()
            healthy.append(await run.publish())
            assert len(run.engine._keeper.reports) == 2 and all(replica.in_service for replica in run.replicas)
            seconds = f"{failing[-1]:.1f} s, {healthy[-1]:.1f} s after it"
            run.check()
            print(f"{fault} {number + 1}/{ROUNDS}, bucket {bucket}/{buckets}: {seconds}", flush=True)
    run.check()
    run.check_count()
    lost = [seconds - statistics.median(healthy) for seconds in failing]
    print(f"{fault}: {ROUNDS} rounds; a push {statistics.median(healthy):.1f} s, with the fault + ", end="")
    print(f"{statistics.median(lost):.1f} s, {max(lost):.1f} s at most; {run.checked} completions, {run.mixed} times")
    print(f"one of several versions; {dict(run.counts)}", flush=True)


def _striking(found: list[psutil.Process], fault: str) -> Callable[[], None]:
    return lambda: send_signal(found, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)


def _buckets_of(sync: WeightSync) -> int:
    assert sync.newest is not None
    assert isinstance(sync.newest.handover, StreamedWeights)
    return len(sync.newest.handover.plan)
