"""Weights that are sent to SGLang over real gloo groups, by calls of its own API, to fakes that join as SGLang does."""

import asyncio
import copy
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from proxima.engine.http.client import Address
from proxima.engine.http.dialect import is_incomplete
from proxima.engine.http.replica import Replica
from proxima.engine.http.sglang import Sglang
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights import process_group as group_transport
from proxima.engine.http.weights.buckets import plan_buckets, without_gaps
from proxima.engine.http.weights.process_group import SenderGroup, broadcast
from proxima.engine.http.weights.sync import Report, WeightSync
from proxima.engine.http.weights.transport import PushRound
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.model.pretrained import LoadedModel
from tests.campaigns import campaign
from tests.engine.http.fake_sglang import FakeSglang

HERE = "tests/engine/http/test_sglang_weight_groups.py"
SECONDS = 40.0  # the deadline of a call; a broadcast has half of it. Longer than a busy machine needs


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET", 4096)
    monkeypatch.setattr(group_transport, "FORM_SECONDS", 2.0)
    monkeypatch.setattr(group_transport, "ABORT_SECONDS", 4.0)
    monkeypatch.setattr(group_transport, "HEALTH_SECONDS", 2.0)


class Trainer:
    """The trainer's side of some servers."""

    def __init__(
        self, urls: list[str], loaded: LoadedModel, transfer: str, token: str | None = None, **more: Any
    ) -> None:
        self.loaded, self.version = copy.deepcopy(loaded), 0
        limits = {"weight_seconds": SECONDS, "call_seconds": 60.0, "probe_tokens": 24} | more
        spec = Sglang(url=tuple(urls), transfer=transfer, **limits)  # type: ignore[arg-type]
        self.sync = WeightSync(spec, EngineSetup.of(self.loaded, max_length=256))
        self.replicas = [Replica(Address(url, token=token), spec.dialect(), spec, "test") for url in urls]

    async def open(self) -> None:
        for replica in self.replicas:
            replica.facts = await replica.dialect.probe(replica.client)
        self.sync.choose([replica.facts for replica in self.replicas])

    async def prepare(self) -> None:
        self.version += 1
        with torch.no_grad():
            for weight in self.loaded.model.parameters():
                weight.mul_(1.003)
        update = WeightUpdate(version=self.version, module=self.loaded.model)
        self.sync.newest = await self.sync.prepare(update, self.label, self.replicas[0].facts.dtype)

    @property
    def label(self) -> str:
        return f"test.{self.version}"

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
                    push_round.copies.leave(replica)
                    push_round.leave(replica)

        return await asyncio.gather(*map(push, replicas), return_exceptions=True)

    async def close(self) -> None:
        await self.sync.close()
        for replica in self.replicas:
            await replica.client.close()


@asynccontextmanager
async def fleet(
    loaded: LoadedModel, count: int, transfer: str = "group", **more: Any
) -> AsyncIterator[tuple[Trainer, list[FakeSglang]]]:
    async with AsyncExitStack() as opened:
        servers = [opened.enter_context(FakeSglang(loaded)) for _ in range(count)]
        trainer = Trainer([server.url for server in servers], loaded, transfer, **more)
        opened.push_async_callback(trainer.close)
        await trainer.open()
        yield trainer, servers
        for server in servers:
            server.updates.released.set()
            server.updates.groups.clear()


async def test_sends_leave_the_loops_threads_to_calls(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the servers' names are looked up, for the very calls that the sends wait for."""
    asyncio.get_running_loop().set_default_executor(loops := ThreadPoolExecutor(1))
    taken, start = list[threading.Thread](), SenderGroup.start

    def noted(group: SenderGroup, *arguments: Any) -> None:
        taken.append(threading.current_thread())
        start(group, *arguments)

    monkeypatch.setattr(SenderGroup, "start", noted)
    async with fleet(tiny, 2) as (trainer, _):
        await trainer.prepare()
        reports = await trainer.push(*trainer.replicas)
    assert all(isinstance(report, dict) for report in reports)
    assert taken and not loops._threads.intersection(taken)


async def test_all_servers_are_sent_a_bucket_before_the_next_one_is_read(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a group of its own, and the weights are read once for all of them; when two hang, nothing is read again
    for the third."""
    order, start = list[tuple[str, int]](), SenderGroup.start

    def noted(group: SenderGroup, bucket: Any, content: Any) -> None:
        order.append((group.urls[0], bucket.start))
        start(group, bucket, content)

    monkeypatch.setattr(SenderGroup, "start", noted)
    async with fleet(tiny, 3) as (trainer, servers):
        await trainer.prepare()
        await trainer.push(*trainer.replicas)
        order.clear()
        await trainer.prepare()
        assert all(isinstance(report, dict) for report in await trainer.push(*trainer.replicas))
        starts = [start for _, start in order]
        assert starts == sorted(starts) and len(order) == 3 * len(set(starts)) > 9
        for server in servers[:2]:
            server.updates.at, server.updates.fault = 1, "killed"
        order.clear()
        await trainer.prepare()
        outcomes = await trainer.push(*trainer.replicas)
        assert [isinstance(outcome, dict) for outcome in outcomes] == [False, False, True]
        assert [start for url, start in order if url == servers[2].url] == sorted(set(starts))


def test_tensors_without_gaps_are_the_same_bytes() -> None:
    shapes = [(3,), (8,), (5, 2), (4,), (16,)]  # in bfloat16 6 bytes, 16, 20, 8, 32
    plan = plan_buckets([(f"w{i}", torch.bfloat16, shape) for i, shape in enumerate(shapes)])
    split = without_gaps(plan)
    assert [[place.name for place in bucket.places] for bucket in split] == [["w0"], ["w1", "w2"], ["w3"], ["w4"]]
    places = {place.name: bucket.start + place.start for bucket in plan for place in bucket.places}
    assert {p.name: bucket.start + p.start for bucket in split for p in bucket.places} == places
    assert all(bucket.size == sum(p.end - p.start for p in bucket.places) for bucket in split)


@pytest.mark.parametrize("number", [1, 2])
async def test_torch_forms_the_same_group(number: int) -> None:
    """What SGLang calls: torch's rendezvous, a prefix, and `_new_process_group_helper`. Twice by the same name."""
    replica = Replica(Address("http://127.0.0.1:1"), Sglang().dialect(), Sglang(), "test")
    replica.facts = replace(replica.facts, device="cpu")
    store = group_transport.new_store({replica.url: "127.0.0.1"}, 5.0)
    sender = SenderGroup(store, [replica], number, 5.0)
    plan = plan_buckets([("w", torch.float32, (4,))])

    def join() -> torch.Tensor:
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{sender.port}", 1, 2))  # type: ignore[no-untyped-call]
        prefix = distributed_c10d.PrefixStore("proxima", store)
        backend = distributed_c10d.Backend("gloo")
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], backend, prefix, group_name="proxima", timeout=timedelta(minutes=30)
        )
        distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        received = torch.zeros(16, dtype=torch.uint8)
        group.broadcast([received], distributed_c10d.BroadcastOptions()).wait()
        distributed_c10d.destroy_process_group(group)
        return received

    sent = torch.arange(16, dtype=torch.uint8)
    joined = asyncio.create_task(asyncio.to_thread(join))
    weights: Any = SimpleNamespace(lent=nullcontext, filled=lambda memory: [(plan[0], sent)])
    ends = list[Any]()
    await asyncio.to_thread(broadcast, weights, {sender: "127.0.0.1"}, lambda *end: ends.append(end))
    assert torch.equal(await joined, sent) and ends == [(sender, None)]
    sender.abort()


async def test_a_group_and_a_folder_give_the_same_log_probs(tiny: LoadedModel) -> None:
    figures = []
    for transfer in ("group", "folder"):
        async with fleet(tiny, 2, transfer) as (trainer, servers):
            assert trainer.replicas[0].facts.transfers == ("folder", "group")
            for _ in range(2):
                await trainer.prepare()
                reports = await trainer.push(*trainer.replicas)
                assert all(isinstance(report, dict) for report in reports), reports
                assert [server.version for server in servers] == [trainer.label] * 2
                kept = ("probe_mean", "probe_max", "perturbed_mean", "bytes")
                figures.append([{name: report.get(name) for name in kept} for report in reports])
            calls = [call.url.path for call in servers[0].calls]
            formed = calls.count("/init_weights_update_group")
            assert formed == (1 if transfer == "group" else 0)  # for the perturbed copy and both versions
            assert not servers[0].updates.session
    assert figures[:2] == figures[2:]


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        ("killed", 2),
        ("cut", 2),
        pytest.param("stopped", 1, marks=[pytest.mark.slow, pytest.mark.waits]),
        *campaign(f"{HERE}::test_one_of_two_fails[killed-2]", [("killed", 30), ("cut", 30)]),
        *campaign(f"{HERE}::test_one_of_two_fails[stopped-1]", [("stopped", 4)]),
    ],
)
async def test_one_of_two_fails(fault: str, count: int, tiny: LoadedModel) -> None:
    """At a random bucket; the other gets every version, and the one that failed returns, alone, with the perturbed copy
    first."""
    draws = random.Random(fault)
    async with fleet(tiny, 2, weight_seconds=12.0 if fault == "stopped" else SECONDS) as (trainer, servers):
        await trainer.prepare()
        assert all(isinstance(report, dict) for report in await trainer.push(*trainer.replicas))
        buckets = sum(call.url.path == "/update_weights_from_distributed" for call in servers[0].calls) // 2
        assert buckets > 3
        for _ in range(count):
            broken = draws.randrange(2)
            updates = servers[broken].updates
            updates.at, updates.fault, updates.again = draws.randrange(buckets), fault, 2 if fault == "cut" else 0
            await trainer.prepare()
            outcomes = await asyncio.wait_for(trainer.push(*trainer.replicas), 120)
            assert isinstance(outcomes[1 - broken], dict) and isinstance(outcomes[broken], ServerError), outcomes
            assert servers[1 - broken].version == trainer.label and not servers[1 - broken].paused
            assert is_incomplete(servers[broken].version) and servers[broken].paused
            if fault == "killed":
                servers[broken].restart()
            elif fault == "stopped":
                updates.life = None
                updates.released.set()
                updates.released.clear()
            (report,) = await trainer.push(trainer.replicas[broken], alone=True)
            assert isinstance(report, dict) and "perturbed_mean" in report, report
            assert servers[broken].version == trainer.label


async def test_an_update_that_was_broken_off_is_ended_before_the_server_samples(tiny: LoadedModel) -> None:
    async with fleet(tiny, 1) as (trainer, servers):
        await trainer.prepare()
        await trainer.push(*trainer.replicas)
        servers[0].updates.at, servers[0].updates.fault, servers[0].updates.again = 1, "cut", 2  # it is sent again
        await trainer.prepare()
        assert isinstance((await trainer.push(*trainer.replicas))[0], ServerError)
        assert servers[0].updates.session and is_incomplete(servers[0].version)
        facts = await trainer.replicas[0].dialect.probe(trainer.replicas[0].client)
        assert "incomplete" in facts.more["weights"] and not servers[0].updates.session and not servers[0].paused


async def test_a_group_is_offered_only_where_it_can_be_formed(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tiny, 1) as (trainer, servers):
        info, probe = servers[0].server_info, trainer.replicas[0].dialect.probe
        for size in ("pp_size", "dp_size"):
            monkeypatch.setattr(servers[0], "server_info", lambda size=size: info() | {size: 2})
            assert (await probe(trainer.replicas[0].client)).transfers == ("folder",)
        monkeypatch.setattr(servers[0], "server_info", lambda: info() | {"tp_size": 4})
        assert (await probe(trainer.replicas[0].client)).workers == 4
