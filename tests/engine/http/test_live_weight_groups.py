"""Weights that are broadcast to two real vLLM servers, one of which fails: the other has every version, and the one
that failed returns with the perturbed copy and the newest.

PROXIMA_VLLM names the executable; PROXIMA_ROUNDS is the number of failures of each kind, 10 by default."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from proxima.engine.http import group_transport
from proxima.engine.http.client import Address
from proxima.engine.http.dialect import is_incomplete
from proxima.engine.http.replica import Replica
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weight_sync import Report, WeightSync
from proxima.engine.http.weight_transport import PushRound
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from proxima.model.load import load
from tests.engine.http.live_vllm import EXECUTABLE, MODEL, needs_vllm

SIBLING = "tests/engine/http/test_weight_groups.py::test_faults_at_random_buckets[cut]"
pytestmark = [pytest.mark.campaign(SIBLING), needs_vllm]
ROUNDS = int(os.environ.get("PROXIMA_ROUNDS", "10"))
SECONDS = 20.0  # the deadline of a call


class Pair:
    """Two servers and the trainer's side of them."""

    def __init__(self, servers: Any) -> None:
        torch.set_num_threads(1)
        self.loaded = load(str(MODEL), dtype=torch.float32, device="cpu")
        limits: dict[str, Any] = {"weight_seconds": SECONDS, "call_seconds": 90.0}
        spec = Vllm(url=tuple(servers.urls), transfer="group", probe_tokens=64, **limits)
        self.sync, self.version = WeightSync(spec, EngineSetup.of(self.loaded, max_length=512)), 0
        addresses = [Address(url, token=servers.token) for url in servers.urls]
        self.replicas = [Replica(address, spec.dialect(), spec, "live") for address in addresses]

    async def prepare(self) -> None:
        self.version += 1
        with torch.no_grad():
            for weight in self.loaded.model.parameters():
                weight.mul_(1.001)
        update = WeightUpdate(version=self.version, module=self.loaded.model)
        await self.sync.prepare(update, f"live.{self.version}", "bfloat16")

    async def push(self, *replicas: Replica, alone: bool = False) -> list[Report | BaseException]:
        push_round = None if alone else PushRound(replicas)
        for replica in replicas:
            with suppress(ServerError):
                await replica.dialect.pause(replica.client, replica.facts, "keep")

        async def push(replica: Replica) -> Report:
            try:
                return await self.sync.push(replica, push_round)
            finally:
                if push_round is not None:
                    push_round.leave(replica)

        return await asyncio.gather(*map(push, replicas), return_exceptions=True)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    serve = Serve(executable=EXECUTABLE, dtype="bfloat16", eager=True, threads=1, replicas=2, restarts=100)
    log = folder / "server.log"
    with closing(start_servers("vllm", serve, model=str(MODEL), max_length=512, log=log)) as servers:
        made = Pair(servers)
        try:
            for replica in made.replicas:
                replica.facts = await replica.dialect.probe(replica.client)
            made.sync.choose([replica.facts for replica in made.replicas])
            await made.prepare()
            assert all(isinstance(report, dict) for report in await made.push(*made.replicas))
            yield made
        finally:
            await made.sync.close()
            for replica in made.replicas:
                await replica.client.close()


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


async def answers(replica: Replica) -> None:
    for _ in range(600):
        with suppress(ServerError):
            await replica.dialect.probe(replica.client)
            return
        await asyncio.sleep(0.5)
    raise AssertionError("the server does not return")


async def fail(made: Pair, fault: Callable[[Replica], Awaitable[None]], broken: int) -> float:
    """Push while one fails. Returns the seconds until the other one has the weights."""
    await made.prepare()
    start, bad, good = time.monotonic(), made.replicas[broken], made.replicas[1 - broken]
    outcomes, _ = await asyncio.gather(made.push(good, bad), fault(bad))
    assert isinstance(outcomes[0], dict) and isinstance(outcomes[1], ServerError), outcomes
    assert outcomes[0]["probe_mean"] < 0.15
    assert (await good.health()).weight_version == f"live.{made.version}"
    return time.monotonic() - start


async def returns(made: Pair, broken: int, *, perturbed: bool) -> None:
    (report,) = await made.push(made.replicas[broken], alone=True)
    assert isinstance(report, dict) and ("perturbed_mean" in report) == perturbed, report
    reports = (await made.prepare(), await made.push(*made.replicas))[1]
    assert all(isinstance(report, dict) for report in reports), reports


@pytest.mark.parametrize("fault", ["cut", "stopped", "killed"])
async def test_one_of_two_servers_fails(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws, took = random.Random(fault), list[float]()
    monkeypatch.setattr(group_transport, "ABORT_SECONDS", 12.0)
    async with pair(tmp_path) as made:
        whole = group_transport._Sending._load

        async def cut(self: Any, replica: Replica) -> None:
            if replica is not made.replicas[broken]:
                return await whole(self, replica)
            load = replica.dialect.load_weights

            async def load_weights(client: Any, facts: Any, weights: Any) -> None:
                async def updates() -> Any:
                    async for update in weights.updates():
                        tensors = [list(bucket) for bucket in update["tensors"]]
                        bucket = draws.choice(tensors)
                        place = draws.randrange(len(bucket))
                        bucket[place] = ["no.such.weight", *bucket[place][1:]]
                        yield update | {"tensors": tensors}

                await load(client, facts, replace(weights, updates=updates))

            replica.dialect.load_weights = load_weights  # type: ignore[method-assign]
            try:
                await whole(self, replica)
            finally:
                del replica.dialect.load_weights  # type: ignore[attr-defined]
            return None

        async def send_signal(replica: Replica) -> None:
            await asyncio.sleep(draws.uniform(0.0, 1.2))
            for process in found:
                process.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)

        for _ in range(ROUNDS):
            broken = draws.randrange(2)
            found = [] if fault == "cut" else processes(made.replicas[broken])
            if fault == "cut":
                monkeypatch.setattr(group_transport._Sending, "_load", cut)
            took.append(await fail(made, send_signal, broken))
            monkeypatch.setattr(group_transport._Sending, "_load", whole)
            if fault == "stopped":
                for process in found:
                    process.send_signal(signal.SIGCONT)
            if fault == "killed":
                await answers(made.replicas[broken])
            else:
                await asyncio.sleep(2.0)
            label = (await made.replicas[broken].health()).weight_version  # a server may be stopped after its update
            await returns(made, broken, perturbed=fault == "killed" or is_incomplete(label))
    print(f"\n{fault}: {ROUNDS} rounds, the other server had the weights after {max(took):.1f} s at most")
