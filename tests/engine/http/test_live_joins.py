"""Real vLLM servers that join a run and leave it by the file of `engine.url`, while completions run and weights change.

PROXIMA_VLLM names the executable; PROXIMA_JOINS is the number of joins, 2 by default; PROXIMA_JOIN_SEED seeds the
draws."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from proxima.data.flow import Completion, Prompt
from proxima.engine.http.replica import Replica
from proxima.engine.http.replica_pool import ReplicaPool
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights.probe import trainer_log_prob
from proxima.engine.http.weights.sync import Report, WeightSync
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineSetup, Request, Sampling, WeightUpdate
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from proxima.model.pretrained import LoadedModel
from tests.engine.http.live_vllm import EXECUTABLE
from tests.tiny import tiny_tokenizer

SIBLING = "tests/engine/http/test_server_file.py::test_thirty_joins_while_weights_change"
pytestmark = [
    pytest.mark.campaign(SIBLING),
    pytest.mark.skipif(EXECUTABLE is None, reason="PROXIMA_VLLM names no vLLM"),
]
JOINS, SEED = int(os.environ.get("PROXIMA_JOINS", "2")), os.environ.get("PROXIMA_JOIN_SEED", "0")
CLOSE = 5e-3  # nats, float32 against float32; other weights are farther off by two orders of magnitude
SECONDS = 180.0  # the deadline of a call
LATE = 600.0  # seconds after which something must have happened, on a machine that does other work
KEY = "PROXIMA_TEST_KEY"


def tiny_llama(folder: Path) -> LoadedModel:
    sizes = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2, tie_word_embeddings=False))
    loaded = LoadedModel(model=model.float().eval(), tokenizer=tiny_tokenizer(), path=str(folder))
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(folder)
    return loaded


class Run:
    """The trainer's side: a model whose weights change, the file of servers, and what was asked and given."""

    def __init__(self, loaded: LoadedModel, place: Path, transfer: Any, token: str) -> None:
        self.model, self.place, self.draws = loaded.model, place, random.Random(f"{transfer} {SEED}")
        os.environ[KEY] = token
        limits: dict[str, Any] = {"weight_seconds": SECONDS, "call_seconds": SECONDS, "health_seconds": 0.5}
        self.spec = Vllm(url=str(place), token_env=KEY, transfer=transfer, probe_tokens=64, **limits)
        self.engine: Any = self.spec.build(EngineSetup.of(loaded, max_length=256))
        self.pool: ReplicaPool = self.engine._pool
        self.version, self.asked = 0, 0
        self.states = {0: self.state()}

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def move(self) -> None:
        """A part of an update: the trainer is in the middle of one while servers join."""
        for weight in self.model.parameters():
            weight.mul_(1 + 0.1 * torch.randn(weight.shape))

    async def publish(self) -> None:
        self.move()
        self.version += 1
        self.states[self.version] = self.state()
        await self.engine.publish(WeightUpdate(version=self.version, module=self.model))

    def requests(self, prompts: int, tokens: int) -> list[Request]:
        uids = range(self.asked, self.asked + prompts)
        self.asked += prompts
        made = [
            Prompt(uid=uid, messages=(), tokens=[self.draws.randrange(3, 250) for _ in range(6 + uid % 5)])
            for uid in uids
        ]
        sampling = Sampling(max_tokens=tokens)
        return [Request(prompt=prompt, sample=sample, sampling=sampling) for prompt in made for sample in (0, 1)]

    def list(self, urls: Sequence[str]) -> None:
        new = self.place.with_suffix(".new")
        new.write_text("# servers\n" + "".join(f"{url}\n" for url in urls))
        os.replace(new, self.place)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LATE):
            while not condition():
                await asyncio.sleep(0.05)

    def check(self, asked: Sequence[Request], given: Sequence[Completion]) -> None:
        """Every completion once; tokens of one version by the trainer's model of that version."""
        assert [completion.key for completion in given] == [(r.prompt.uid, r.sample, 0) for r in asked]
        now = self.state()
        for request, completion in zip(asked, given, strict=True):
            versions = set(completion.policy_version.tolist())
            assert versions <= set(self.states)
            if len(versions) == 1:
                self.model.load_state_dict(self.states[versions.pop()])
                tokens = np.concatenate([request.prompt.tokens, completion.tokens]).astype(np.int32)
                expected = trainer_log_prob(self.model, tokens)[-len(completion.tokens) :]
                given_log_prob = np.asarray(completion.sampled_log_prob)[len(completion.tokens) - len(expected) :]
                if len(expected):  # the first tokens of a sequence are not compared
                    assert np.abs(given_log_prob - expected).mean() < CLOSE, completion.key
        self.model.load_state_dict(now)


def processes(url: str) -> list[psutil.Process]:
    """Those of a server: it has the port in its command, and its children compute."""
    port = url.rpartition(":")[2]
    found = [p for p in psutil.process_iter(["cmdline"]) if {port, "serve"} <= set(p.info["cmdline"] or ())]
    server = next(server for server in found if not set(server.children()) & set(found))  # not its guardian
    return [*server.children(recursive=True), server]


@pytest.mark.parametrize("transfer", ["folder", "group"])
def test_servers_join_and_leave(transfer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(joins_and_leaves(transfer, tmp_path, monkeypatch))  # longer than other tests may take


async def joins_and_leaves(transfer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, took = tiny_llama(tmp_path / "model"), list[float]()
    torch.set_num_threads(1)
    small = ("--kv-cache-memory-bytes", str(64 << 20))
    limits: dict[str, Any] = {"restarts": 100, "arguments": small}
    serve = Serve(executable=EXECUTABLE, dtype="float32", eager=True, threads=1, replicas=2, **limits)
    proven, early, reports = set[str](), list[str](), list[Report]()
    push, run_one = WeightSync.push, Replica.run

    async def pushed(self: WeightSync, replica: Replica, push_round: Any = None) -> Report:
        report = await push(self, replica, push_round)
        if push_round is None:
            reports.append(report)
        proven.add(replica.url)
        return report

    async def ran(self: Replica, job: Any) -> Any:
        if self.url not in proven:
            early.append(self.url)
        return await run_one(self, job)

    monkeypatch.setattr(WeightSync, "push", pushed)
    monkeypatch.setattr(Replica, "run", ran)
    log = tmp_path / "server.log"
    with closing(start_servers("vllm", serve, model=loaded.path, max_length=256, log=log)) as servers:
        place = tmp_path / "servers.txt"
        place.write_text(f"{servers.urls[0]}\n")
        run = Run(loaded, place, transfer, servers.token)
        with closing(run.engine):
            await run.publish()
            staying, other = servers.urls
            for joins in range(1, JOINS + 1):
                proven.discard(other)
                if joins % 10 == 2:  # a new process, which may still be starting when it is listed
                    for process in processes(other):
                        process.send_signal(signal.SIGKILL)
                asked = run.requests(8, 96)
                generating, start = asyncio.create_task(collect(run.engine, asked)), time.monotonic()
                run.move()
                run.list([staying, other])
                if run.draws.random() < 0.6:
                    await asyncio.sleep(run.draws.uniform(0.0, 3.0))
                    await asyncio.wait_for(run.publish(), LATE)
                await run.until(lambda joins=joins: run.pool.counts["joined"] == joins)
                took.append(time.monotonic() - start)
                assert "perturbed_mean" in reports[-1] and reports[-1]["probe_max"] < CLOSE, reports[-1]
                run.check(asked, await asyncio.wait_for(generating, LATE))
                await asyncio.wait_for(run.publish(), LATE)
                asked = run.requests(8, 96)
                generating = asyncio.create_task(collect(run.engine, asked))
                leaving = next(replica for replica in run.pool.replicas if replica.url == staying)
                await run.until(lambda job=generating, r=leaving: len(r.running) > 0 or job.done())
                await asyncio.sleep(run.draws.uniform(0.0, 1.0))
                run.list([other])
                await run.until(lambda joins=joins: run.pool.counts["left"] == joins)
                run.check(asked, await asyncio.wait_for(generating, LATE))
                assert not leaving.running and [r.url for r in run.pool.replicas] == [other]
                staying, other = other, staying
                print(f"{transfer}: join and leave {joins}, {took[-1]:.1f} s, {reports[-1]}", flush=True)
            counts = run.pool.counts
            assert not early and counts["completed"] == 2 * run.asked and counts["lost"] == 0
    print(f"{transfer}: {JOINS} joins, {max(took):.1f} s at most; {dict(counts)}")
