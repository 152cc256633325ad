"""Weights that are sent over a real gloo group, or through a file in memory, to the real worker module. Around it are
fakes of vLLM; each server is in a thread of its own, as its calls block."""

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from proxima.data import FieldError, UserError
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import GroupMember, ServerFacts, ServerHealth, is_incomplete
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights import process_group as group_transport
from proxima.engine.http.weights import transport as weight_transport
from proxima.engine.http.weights.buckets import plan_buckets, plan_of
from proxima.engine.http.weights.ipc import IpcTransport
from proxima.engine.http.weights.process_group import GroupTransport, host_for, own_addresses
from proxima.engine.http.weights.stream import OutdatedError, StreamedWeights
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.http.weights.transport import PushRound, Receivers, choose_transport
from proxima.engine.http.weights.weight_folders import FolderTransport
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.model.pretrained import LoadedModel
from tests.campaigns import campaign
from tests.engine.http.fake_vllm import FakeVllm, unread
from tests.engine.http.fake_vllm_worker import FakeWorker, worker_module
from tests.engine.http.received import received
from tests.tiny import tiny_tokenizer

HERE = "tests/engine/http/test_weight_groups.py"
WIDTH, LAYERS, LENGTH = 8, 14, 60.0
UPDATE = WeightUpdate(version=1, module=nn.Linear(1, 1))  # is not read
FACTS = ServerFacts(server="fake", model="fake", transfers=("folder", "group", "ipc"), device="cpu")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(weight_buckets, "BUCKET", 70)  # bytes: 22 buckets, which end in the middle of layers
    monkeypatch.setattr(group_transport, "HEALTH_SECONDS", 2.0)
    return worker_module(monkeypatch)


class Trained(nn.Module):
    """The trainer's model: every weight is `value`, under the names of the fake's."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(4, WIDTH), nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in self.layers:
            for name in "qkv":
                layer.register_parameter(name, nn.Parameter(torch.zeros(WIDTH)))
        self.head = nn.Linear(WIDTH, 4, bias=False)
        self.head.weight = self.embed.weight
        for weight in self.parameters():
            nn.init.constant_(weight, value)


class FakeServer:
    """A server on an address of its own, whose weight calls block in a thread. `life`: None is healthy; `killed`
    refuses every call, `stopped` answers none; `at` and `fault` say in which bucket what happens."""

    def __init__(self, module: ModuleType, port: int) -> None:
        self.module, self.url = module, f"http://127.0.0.1:{port}"
        self.dialect, self.facts, self.life = VllmDialect(), FACTS, None
        self.at: int | None = None
        self.fault = ""
        self.threads = list[threading.Thread]()
        self.start()

    def start(self) -> None:
        """A new process: it has its first weights, and is in no group."""
        self.worker = FakeWorker(self.module, LAYERS, WIDTH)
        self.fake, self.life, self.at = FakeVllm(workers=[self.worker]), None, None
        self.client = ServerClient(Address(self.url), seconds=5)
        self.client._http = httpx.AsyncClient(base_url=self.url, transport=httpx.MockTransport(self._answer))
        load = self.worker.model.load_weights

        def load_weights(weights: Any) -> set[str]:
            if self.at == 0:
                self.at = None
                self._break()
            self.at = None if self.at is None else self.at - 1
            return load(weights)

        self.worker.model.load_weights = load_weights  # type: ignore[method-assign]

    def _break(self) -> None:
        if self.fault == "cut":
            raise ValueError("a bucket that cannot be loaded")
        if self.fault == "killed":  # the kernel closes its connections
            self.life = "killed"
            self.worker.engine._leave()
            raise SystemExit
        self.life = "stopped"
        self.released = threading.Event()
        self.released.wait(LENGTH)
        raise SystemExit

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.life == "stopped":
            await asyncio.sleep(60)
        if self.life == "killed":
            raise httpx.ConnectError("refused")
        answers = list[httpx.Response]()

        def work() -> None:
            try:
                answers.append(self.fake.answer(request))
            except SystemExit:
                return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.threads.append(thread)
        while thread.is_alive() and self.life is None:
            await asyncio.sleep(0.002)
        while self.life == "stopped":
            await asyncio.sleep(0.05)
        if not answers:
            raise httpx.ReadError("the connection is gone")
        return unread(answers[0])

    async def health(self) -> ServerHealth:
        return await self.dialect.health(self.client, FACTS)

    def values(self) -> set[float]:
        return {value for weight in self.worker.model.weights().values() for value in weight.flatten().tolist()}


@pytest.fixture
def servers(module: ModuleType) -> Iterator[list[FakeServer]]:
    made = [FakeServer(module, port) for port in (9001, 9002, 9003)]
    yield made
    for server in made:
        if server.life == "stopped":
            server.released.set()
        for thread in server.threads:
            thread.join(10)
        server.worker.engine._leave()


class Pusher:
    """A transport and the versions that it sends."""

    def __init__(self, kind: type[Any], seconds: float = LENGTH) -> None:
        spec = Vllm(weight_seconds=seconds)
        self.transport, self.version = kind(spec, SimpleNamespace(tokenizer=None, compute=None)), 0

    def prepare(self) -> StreamedWeights:
        self.version += 1
        update = WeightUpdate(version=self.version, module=Trained(float(self.version)))
        return self.transport.prepare(update, f"run-{self.version}", None)

    async def push(self, weights: StreamedWeights, servers: list[Any]) -> dict[Any, Exception]:
        push_round = PushRound(servers)

        async def push(server: Any) -> None:
            try:
                await self.transport.push(server, weights, push_round)
            finally:
                push_round.leave(server)

        outcomes = await asyncio.gather(*map(push, servers), return_exceptions=True)
        for outcome in outcomes:
            assert outcome is None or isinstance(outcome, ServerError), outcome
        return {server: e for server, e in zip(servers, outcomes, strict=True) if isinstance(e, ServerError)}


def test_a_plan_aligns_tensors_and_keeps_their_order() -> None:
    shapes = [(3,), (5, 2), (400,), (1,)]
    plan = plan_buckets([(f"w{i}", torch.bfloat16, shape) for i, shape in enumerate(shapes)])
    assert [[place.name for place in bucket.places] for bucket in plan] == [["w0", "w1"], ["w2"], ["w3"]]
    assert all(place.start % 16 == 0 for bucket in plan for place in bucket.places)
    assert [bucket.start for bucket in plan] == [0, 48, 848] and plan[-1].size == 16


def test_buckets_are_the_model() -> None:
    assert len(plan_of(Trained(1.5), torch.bfloat16, file_names=False)) > 3
    got = received(Trained(1.5), torch.bfloat16)
    assert len(got) == 3 * LAYERS + 1
    assert all(weight.dtype == torch.bfloat16 and (weight == 1.5).all() for weight in got.values())


@pytest.mark.parametrize("kind", [GroupTransport, IpcTransport])
async def test_every_server_has_each_version(kind: type[Any], servers: list[FakeServer]) -> None:
    pusher, names = Pusher(kind), set()
    for version in (1, 2):
        assert await pusher.push(pusher.prepare(), servers) == {}
        for server in servers:
            assert server.values() == {float(version)} and server.fake.version == f"run-{version}"
            names.add(getattr(server.worker.engine.group, "__getitem__", lambda _: None)(0))
    assert len(names) == 1  # the same servers use the same group again
    await pusher.transport.close()


async def test_a_server_that_is_pushed_alone_joins_the_next_group(servers: list[FakeServer]) -> None:
    pusher = Pusher(GroupTransport)
    await pusher.push(pusher.prepare(), servers[:2])
    await pusher.transport.push(servers[2], weights := pusher.prepare())
    assert servers[2].values() == {2.0} and servers[0].values() == {1.0}
    await pusher.transport.push(servers[0], weights)
    assert servers[0].values() == {2.0}
    assert await pusher.push(pusher.prepare(), servers) == {}
    assert all(server.values() == {3.0} for server in servers)
    await pusher.transport.close()


@pytest.mark.parametrize("bucket", range(0, 22, 5))
async def test_a_cut_bucket_costs_only_its_server(bucket: int, servers: list[FakeServer]) -> None:
    pusher = Pusher(GroupTransport)
    servers[1].at, servers[1].fault = bucket, "cut"
    errors = await pusher.push(pusher.prepare(), servers)
    assert list(errors) == [servers[1]] and is_incomplete(servers[1].fake.version) and servers[1].worker.model.computes
    assert all(server.values() == {1.0} for server in (servers[0], servers[2]))
    await pusher.transport.push(servers[1], pusher.prepare())
    assert servers[1].values() == {2.0} and servers[1].fake.version == "run-2"
    await pusher.transport.close()


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rounds"),
    [
        ("killed", 4),
        pytest.param("stopped", 1, marks=pytest.mark.waits),
        ("cut", 4),
        ("returned", 4),
        *campaign(f"{HERE}::test_faults_at_random_buckets[killed-4]", [("killed", 30), ("cut", 30)]),
        *campaign(f"{HERE}::test_faults_at_random_buckets[stopped-1]", [("stopped", 2)]),
        *campaign(f"{HERE}::test_faults_at_random_buckets[returned-4]", [("returned", 30)]),
    ],
)
async def test_faults_at_random_buckets(fault: str, rounds: int, servers: list[FakeServer]) -> None:
    """The others get every version, within the deadlines; the server that failed returns, alone, with the newest. One
    that was restarted unnoticed, `returned`, gets it with the others."""
    # A stopped member costs a round its deadline, which must be longer than a busy machine needs for the others.
    draws = random.Random(fault)
    pusher = Pusher(GroupTransport, seconds=16.0 if fault == "stopped" else LENGTH)
    for _ in range(rounds):
        broken = draws.choice(servers)
        if fault == "returned":
            broken.worker.engine._leave()  # as the end of a process does
            broken.start()
        else:
            broken.at, broken.fault = draws.randrange(22), fault
        errors = await asyncio.wait_for(pusher.push(weights := pusher.prepare(), servers), 3 * LENGTH)
        assert list(errors) == ([] if fault == "returned" else [broken]), errors
        assert all(server.values() == {float(pusher.version)} for server in servers if server not in errors)
        if broken.life == "stopped":
            broken.released.set()
            broken.worker.engine._leave()
        if fault in ("killed", "stopped"):
            broken.start()
        if broken in errors:
            await pusher.transport.push(broken, weights)
        assert broken.values() == {float(pusher.version)}
    await pusher.transport.close()


async def test_the_trainers_own_error_is_shown(servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The members only see that the connection was closed."""

    def start(group: Any, bucket: Any, content: Any) -> None:
        raise RuntimeError("the trainer has no memory left")

    monkeypatch.setattr(group_transport.SenderGroup, "start", start)
    pusher = Pusher(GroupTransport)
    errors = await pusher.push(pusher.prepare(), servers[:2])
    assert len(errors) == 2 and all("the trainer has no memory left" in str(error) for error in errors.values())
    assert all(server.worker.model.computes for server in servers)
    await pusher.transport.close()


def test_groups_of_gpus_end_no_process(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog ends a process whose collective exceeds its deadline, unless waits are blocking."""
    name, found = "TORCH_NCCL_BLOCKING_WAIT", list[Any]()

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            found.append(os.environ.get(name))

    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member_of: Any = SimpleNamespace(url="u", facts=FACTS, dialect=VllmDialect())
    group = group_transport.SenderGroup(store, [member_of], 1, 5.0)
    group.backend = "nccl"
    group._form("127.0.0.1")
    member = GroupMember(
        name="g",
        host="127.0.0.1",
        port=store.port,
        rank=1,
        size=2,
        backend="nccl",
        seconds=5,
        form_seconds=5,
        reused=False,
    )
    FakeWorker(module).engine.join(asdict(member))
    assert found == ["1", "1"] and name not in os.environ


def test_groups_of_gpus_that_are_formed_at_once_end_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has a group of its own after a break; they are formed in several threads."""
    name, found, threads = "TORCH_NCCL_BLOCKING_WAIT", list[Any](), list[threading.Thread]()
    first_is_made, second_is_made = threading.Event(), threading.Event()

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            if threading.current_thread() is threads[0]:
                first_is_made.set()
                second_is_made.wait(0.02)  # in vain if the second one waits for the first
            else:
                second_is_made.set()
                threads[0].join()
            found.append(os.environ.get(name))

    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    for number in range(2):
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        member: Any = SimpleNamespace(url=f"u{number}", facts=FACTS, dialect=VllmDialect())
        group = group_transport.SenderGroup(store, [member], number, 5.0)
        group.backend = "nccl"
        threads.append(threading.Thread(target=group._form, args=["127.0.0.1"]))
    threads[0].start()
    assert first_is_made.wait(5)
    threads[1].start()
    threads[1].join()
    assert found == ["1", "1"] and name not in os.environ


async def test_a_round_that_is_cancelled_loads_nothing_more(servers: list[FakeServer]) -> None:
    pusher, push_round = Pusher(GroupTransport), PushRound(servers[:2])
    pushes = [asyncio.create_task(pusher.transport.push(s, pusher.prepare(), push_round)) for s in servers[:2]]
    while not pusher.transport._groups:
        await asyncio.sleep(0.001)
    assert push_round.outcome is not None
    for push in pushes:
        push.cancel()
    await asyncio.wait([*pushes, push_round.outcome], timeout=5)
    assert all(push.cancelled() for push in pushes) and push_round.outcome.cancelled()
    assert all(group.broken for group in pusher.transport._groups.values())
    await pusher.transport.close()


def test_servers_here_and_elsewhere_get_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on another machine has no way to this one's loopback."""
    ways = {"127.0.0.1": "127.0.0.1", "192.0.2.1": "192.0.2.7"}
    monkeypatch.setattr(group_transport, "own_address", lambda url: ways[url.split("/")[2].split(":")[0]])
    listening = list[str]()
    create = group_transport.socket.create_server
    monkeypatch.setattr(group_transport.socket, "create_server", lambda at: listening.append(at[0]) or create(("", 0)))
    urls = ("http://127.0.0.1:1", "http://192.0.2.1:1")
    addresses = own_addresses(urls)
    group_transport.new_store(addresses, 5.0)
    assert listening == [""] and {host_for(url, addresses) for url in urls} == {"192.0.2.7"}


def test_a_store_listens_where_servers_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loopback only, until a server joins from elsewhere."""
    listening = list[str]()
    create = group_transport.socket.create_server
    monkeypatch.setattr(group_transport.socket, "create_server", lambda at: listening.append(at[0]) or create(("", 0)))
    group_transport.new_store({"http://127.0.0.1:1": "127.0.0.1"}, 5.0)
    group_transport.new_store({"http://127.0.0.1:1": "127.0.0.1", "http://192.0.2.1:1": "192.0.2.7"}, 5.0)
    assert listening == ["127.0.0.1", ""]


async def test_a_group_is_tried_before_the_first_weights(servers: list[FakeServer]) -> None:
    """The servers' workers join it; each version then has a group as ever."""
    pusher = Pusher(GroupTransport)
    await pusher.transport.check(servers, UPDATE)
    assert all(server.worker.engine.group is not None for server in servers)
    assert await pusher.push(pusher.prepare(), servers) == {} and servers[2].values() == {1.0}
    await pusher.transport.close()


@pytest.mark.parametrize("here", [True, False])
async def test_auto_takes_files_only_where_servers_can_read_them(
    here: bool, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server can't connect to the trainer."""
    monkeypatch.setattr(group_transport, "FORM_SECONDS", 1.0)

    def join(member: dict[str, Any]) -> None:
        raise ConnectionRefusedError(f"no way to {member['host']}")

    assert weight_transport.is_this_machine("http://127.0.0.1:1") and not weight_transport.is_this_machine(
        "http://192.0.2.1:1"
    )
    monkeypatch.setattr("proxima.engine.http.weights.transport.is_this_machine", lambda url: here)
    servers[0].worker.engine.join = join  # type: ignore[method-assign]
    sync = object.__new__(WeightSync)
    monkeypatch.setenv("T", "key")
    remote = {} if here else {"url": "http://192.0.2.1:1", "allow_remote": True, "token_env": "T"}
    setup: Any = SimpleNamespace(tokenizer=None, compute=None, shares_devices=False, adapter_rank=0)
    sync.spec, sync.setup = Vllm(**remote), setup  # type: ignore[arg-type]
    sync.kind, sync.transport = "group", GroupTransport(sync.spec, sync.setup)
    if not here:
        with pytest.raises(UserError, match=r"no process group .*no way to .*let the servers connect"):
            await sync.check(servers[:2], UPDATE)
    else:
        line = await sync.check(servers[:2], UPDATE)
        assert (
            line is not None and "are sent by folder: no process group can be formed with http://127.0.0.1:9001" in line
        )
        assert "no way to 127.0.0.1" in line and isinstance(sync.transport, FolderTransport)
    await sync.transport.close()


async def test_a_group_that_is_asked_for_and_not_possible_is_an_error(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer has another fault."""
    monkeypatch.setattr(group_transport, "FORM_SECONDS", 1.0)

    def join(member: dict[str, Any]) -> None:
        raise ConnectionRefusedError(f"no way to {member['host']}")

    sync = object.__new__(WeightSync)
    sync.spec, sync.setup = Vllm(transfer="group"), SimpleNamespace(tokenizer=None, compute=None)  # type: ignore[assignment]
    sync.transport = GroupTransport(sync.spec, sync.setup)
    servers[0].life = "killed"
    assert await sync.check(servers[:2], UPDATE) is None
    servers[1].worker.engine.join = join  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"engine.transfer='group' is not possible: .*9002: .*no way to 127.0.0.1"):
        await sync.check(servers[:2], UPDATE)
    await sync.transport.close()


async def test_handles_are_for_the_gpus_of_the_ranks_and_groups_for_others(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle of GPU memory is valid on that GPU, and NCCL refuses two members on one."""
    ipc, group = (Pusher(kind).transport for kind in (IpcTransport, GroupTransport))
    await ipc.check(servers, UPDATE)  # on CPUs there is nothing to compare
    for server in servers:
        server.facts, server.worker.engine.device = replace(FACTS, device="cuda"), torch.device("cuda:1")
    with pytest.raises(UserError, match="9001 computes on a GPU, and the trainer on a CPU; use engine.transfer=group"):
        await ipc.check(servers, UPDATE)
    gpus = {torch.device("cuda:0"): "GPU-a", torch.device("cuda:1"): "GPU-a"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[device]))
    for module in ("stream", "ipc", "process_group"):
        monkeypatch.setattr(f"proxima.engine.http.weights.{module}.device_of", lambda module: torch.device("cuda:0"))
    await ipc.check(servers, UPDATE)
    with pytest.raises(UserError, match="9001 is on a GPU of the trainer's.*use engine.transfer=ipc"):
        await group._check_devices(servers, UPDATE)
    gpus[torch.device("cuda:1")] = "GPU-b"
    with pytest.raises(UserError, match="does not share the trainer's GPUs, GPU-a: .*a worker is on GPU GPU-b"):
        await ipc.check(servers, UPDATE)
    await group._check_devices(servers, UPDATE)
    for server in servers:
        server.facts, server.worker.engine.device = FACTS, torch.device("cpu")
    with pytest.raises(UserError, match="9001 computes on a CPU, and the trainer on a GPU"):
        await ipc.check(servers, UPDATE)
    for transport in (ipc, group):
        await transport.close()


@pytest.mark.parametrize("kind", [GroupTransport, IpcTransport])
async def test_weights_that_are_being_trained_are_not_sent(kind: type[Any], servers: list[FakeServer]) -> None:
    """Nor if the update begins while a group is formed; a server is then closed when it is resumed."""
    pusher, before = Pusher(kind), servers[0].values()
    weights = pusher.prepare()
    for held in ([False], [True, False])[: 1 + (kind is GroupTransport)]:
        update = replace(weights.update, holds=lambda held=held: held.pop(0))
        with pytest.raises(OutdatedError, match="it gets the next ones"):
            await pusher.transport.push(servers[0], replace(weights, update=update))
        await servers[0].dialect.resume(servers[0].client, FACTS)  # closes what was broken off
        assert not held and servers[0].worker.model.computes
    assert servers[0].values() == before
    await pusher.transport.push(servers[0], weights)
    assert servers[0].values() == {1.0}
    await pusher.transport.close()


def test_a_server_without_a_way_to_it_is_an_error_of_the_server() -> None:
    with pytest.raises(ServerError, match="it can't be reached"):
        group_transport.own_address("http://unknown.invalid:1")


def test_the_way_is_chosen_by_what_reaches_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T", "key")
    plain, on_gpu = ServerFacts(server="", model=""), replace(FACTS, device="cuda")
    remote: dict[str, Any] = {"url": "http://192.0.2.1:1", "allow_remote": True, "token_env": "T"}

    def chosen(facts: list[ServerFacts], shared: bool = False, **settings: Any) -> tuple[str, str]:
        return choose_transport(Receivers(facts, Vllm(**settings), shared))

    assert chosen([FACTS, FACTS]) == ("folder", "the servers are on this machine")
    assert chosen([FACTS, FACTS], **remote)[0] == "group"
    assert chosen([FACTS, on_gpu], **remote)[0] == "group"
    with pytest.raises(FieldError, match="weight_folder=None is needed: servers on other machines do not see"):
        chosen([FACTS, plain], **remote)
    assert chosen([FACTS], weight_folder="/w", **remote)[0] == "folder"
    assert chosen([on_gpu])[0] == "group" and chosen([on_gpu], **remote)[0] == "group"
    assert chosen([on_gpu], shared=True)[0] == "ipc" and chosen([on_gpu], shared=True, **remote)[0] == "ipc"
    assert chosen([replace(on_gpu, transfers=("folder",))], shared=True)[0] == "folder"
    assert chosen([FACTS], transfer="ipc") == ("ipc", "set by engine.transfer")
    with pytest.raises(FieldError, match="transfer='group' is not offered by every server; use folder or auto"):
        chosen([plain], transfer="group")
    with pytest.raises(FieldError, match="needs servers on this machine"):
        chosen([FACTS], transfer="ipc", **remote)
    with pytest.raises(FieldError, match="two members on one; use folder, ipc or auto"):
        chosen([on_gpu], shared=True, transfer="group")


class Mailed(FolderTransport):
    """A transport from a package of its own."""

    @classmethod
    def unreached(cls, receivers: Receivers) -> str | None:
        return None if receivers.spec.on_this_machine else "can't reach servers elsewhere"


def test_a_transport_of_your_own_is_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T", "key")
    own = f"{__name__}:Mailed"
    assert choose_transport(Receivers([FACTS], Vllm(transfer=own))) == (own, "set by engine.transfer")
    sync = WeightSync(
        Vllm(transfer=own), EngineSetup.of(LoadedModel(model=nn.Linear(1, 1), tokenizer=tiny_tokenizer(), path=""), 400)
    )
    assert own in sync.choose([FACTS]) and isinstance(sync.transport, Mailed)
    remote = Vllm(transfer=own, url="http://192.0.2.1:1", allow_remote=True, token_env="T")
    with pytest.raises(FieldError, match=r"Mailed' can't reach servers elsewhere; use group or auto"):
        choose_transport(Receivers([FACTS], remote))
    with pytest.raises(FieldError, match=r"transfer='grop' must be auto, folder, group, ipc or package.module:Class"):
        Vllm(transfer="grop")
    with pytest.raises(FieldError, match=r"transfer='no_such:Class' can't be imported: No module named 'no_such'"):
        Vllm(transfer="no_such:Class")


def test_what_a_hanging_member_costs_leaves_room_within_the_deadline() -> None:
    parts = [group_transport.BUCKET_PART, group_transport.ABORT_PART, group_transport.SOUND_PART]
    assert sum(parts) == pytest.approx(5 / 6)
    assert parts[1] > parts[0]  # a healthy member ends by itself before it is given up
