"""Updates of weights that are broken off: the server's workers keep no half-loaded layer, and the next update is whole.

The module that runs in the workers is the real one; around it is a fake of vLLM."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxima.engine.http import client as http_client
from proxima.engine.http.dialect import ServerFacts, WeightsInFolder, is_incomplete
from proxima.engine.http.vllm import VllmDialect, find_vllm_facts
from proxima.engine.http.weights import to_sglang, to_vllm
from proxima.engine.protocol import ServerError
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.fake_vllm_worker import FakeWorker, worker_module

DIALECT, FACTS = VllmDialect(), ServerFacts(server="", model="")
WIDTH, LAYERS, BUCKETS = 8, 14, 15


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return worker_module(monkeypatch)


def write(folder: Path, value: float) -> WeightsInFolder:
    """Weights that are all `value`, in 15 buckets that end in the middle of layers."""
    names = [f"layers.{i}.{name}" for i in range(LAYERS) for name in "qkv"]
    tensors = {name: torch.full((WIDTH,), value) for name in names}
    tensors = {"embed.weight": torch.full((4, WIDTH), value)} | tensors
    folder.mkdir(exist_ok=True)
    for bucket in range(BUCKETS):
        part = [*tensors][bucket * len(tensors) // BUCKETS : (bucket + 1) * len(tensors) // BUCKETS]
        save_file({name: tensors[name] for name in part}, folder / f"model-{bucket:05}.safetensors")
    return WeightsInFolder(version=int(value), label=f"run-{value:g}", folder=folder)


def load(fake: FakeVllm, weights: WeightsInFolder) -> None:
    run(DIALECT.load_folder(fake.client(), FACTS, weights))


def everywhere(worker: FakeWorker) -> set[float]:
    """The values of all weights, those of the packed head included."""
    return {value for weight in worker.model.weights().values() for value in weight.flatten().tolist()}


def check_layers(worker: FakeWorker, *values: float) -> None:
    """Every layer has weights of one version, the packed head those of the embedding, and nothing is half-loaded."""
    assert worker.model.computes and worker.model.embed.weight[0, 0] in values
    assert torch.equal(worker.model.head.packed, worker.model.embed.weight)
    for layer in worker.model.layers:
        (value,) = {weight.mean().item() for weight in layer.parameters()}
        assert value in values


def remove(file: Path) -> None:
    """It is listed, and gone when it is read."""
    file.unlink()
    file.symlink_to("nowhere")


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def reshape(file: Path) -> None:
    """Of which the last tensor is another's."""
    tensors = load_file(file)
    save_file(tensors | {max(tensors): torch.zeros(WIDTH + 1)}, file)


@pytest.mark.parametrize("cut", [remove, tear, reshape])
@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_after_a_bucket_that_failed_the_next_update_is_whole(
    bucket: int, cut: Callable[[Path], None], module: ModuleType, tmp_path: Path
) -> None:
    worker = FakeWorker(module, LAYERS, WIDTH)
    fake = FakeVllm(workers=[worker])
    load(fake, write(tmp_path, 1.0))
    assert everywhere(worker) == {1.0} and fake.version == "run-1"
    weights = write(tmp_path, 2.0)
    cut(cut_file := tmp_path / f"model-{bucket:05}.safetensors")
    with pytest.raises(ServerError, match="/update_weights: status 500"):
        load(fake, weights)
    assert fake.version == "incomplete run-2" and is_incomplete(fake.version)
    check_layers(worker, 1.0, 2.0)
    cut_file.unlink()
    load(fake, write(tmp_path, 3.0))
    assert everywhere(worker) == {3.0} and fake.version == "run-3"


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_an_update_that_lacks_a_parameter_is_refused(bucket: int, module: ModuleType, tmp_path: Path) -> None:
    worker = FakeWorker(module, LAYERS, WIDTH)
    fake, weights, file = FakeVllm(workers=[worker]), write(tmp_path, 1.0), tmp_path / f"model-{bucket:05}.safetensors"
    name, *others = (tensors := load_file(file))
    save_file({other: tensors[other] for other in others}, file)
    with pytest.raises(ServerError, match=f"1 parameters got no weights, such as {name}"):
        load(fake, weights)
    assert fake.version == "incomplete run-1"


def test_an_update_of_another_run_is_awaited(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeVllm(workers=[FakeWorker(module, LAYERS, WIDTH)])
    load(fake, write(tmp_path, 1.0))
    fake.version, looks = "incomplete run-2", []

    async def sleep(seconds: float) -> None:
        looks.append(seconds)
        fake.version = "run-2" if len(looks) == 2 else fake.version

    monkeypatch.setattr(to_vllm, "UPDATE_POLLS", 9)
    monkeypatch.setattr(to_vllm.asyncio, "sleep", sleep)
    assert "weights" not in run(find_vllm_facts(fake.client())).more
    assert looks == [1.0, 1.0] and fake.version == "run-2"


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_server_whose_client_left_half_way_is_closed_before_it_computes(
    bucket: int, module: ModuleType, tmp_path: Path
) -> None:
    workers = [FakeWorker(module, LAYERS, WIDTH) for _ in range(2)]
    fake = FakeVllm(workers=workers)
    load(fake, write(tmp_path, 1.0))
    fake.paused, fake.gone_after = True, bucket
    with pytest.raises(ServerError, match="can't be reached"):
        load(fake, write(tmp_path, 2.0))
    fake.gone_after = None
    facts = run(find_vllm_facts(fake.client()))  # draws tokens
    assert not fake.dead and not fake.paused and facts.more["weights"].startswith("incomplete")
    for worker in workers:
        check_layers(worker, 1.0, 2.0)
    load(fake, write(tmp_path, 3.0))
    assert all(everywhere(worker) == {3.0} for worker in workers) and fake.version == "run-3"
    assert "weights" not in run(find_vllm_facts(fake.client())).more


def test_a_worker_that_failed_alone_does_not_block_the_next_update(module: ModuleType, tmp_path: Path) -> None:
    workers = [FakeWorker(module, LAYERS, WIDTH) for _ in range(2)]
    fake = FakeVllm(workers=workers)
    load(fake, write(tmp_path, 1.0))
    workers[1].model.failure = MemoryError("no room")
    with pytest.raises(ServerError, match="no room"):
        load(fake, write(tmp_path, 2.0))
    run(DIALECT.resume(fake.client(), FACTS))
    for worker in workers:
        check_layers(worker, 1.0, 2.0)
    assert run(DIALECT.health(fake.client(), ServerFacts(server="", model="", takes_weights=True))).weight_version
    load(fake, write(tmp_path, 3.0))
    assert all(everywhere(worker) == {3.0} for worker in workers)


def test_experts_without_new_weights_keep_their_kernel(module: ModuleType, tmp_path: Path) -> None:
    worker = FakeWorker(module, LAYERS, WIDTH)
    method = SimpleNamespace(moe_kernel="packed")
    worker.model.layers[-1].quant_method = method
    fake = FakeVllm(workers=[worker])
    weights = write(tmp_path, 1.0)
    remove(tmp_path / f"model-{BUCKETS - 1:05}.safetensors")
    with pytest.raises(ServerError, match="/update_weights"):
        load(fake, weights)
    assert method.moe_kernel == "packed"


class Slow:
    """A server's client by a clock of its own: each call takes a second, and one that `hangs` all that it may take."""

    url, seconds = "http://x", 60.0

    def __init__(self, hangs: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.now, self.calls = hangs, 0.0, list[str]()
        self.label = "default"
        monkeypatch.setattr(http_client, "monotonic", lambda: self.now)

    async def post(self, path: str, body: Any = None, *, seconds: float = 60.0, **_: Any) -> None:
        self.calls.append(path)
        self.now += seconds if path == self.hangs else 1.0
        self.label = (body or {}).get("new_version", self.label)
        if path == self.hangs:
            raise ServerError(self.url, path, "no complete response in time")

    async def get(self, path: str) -> Any:
        return {"weight_version": self.label}


UPDATE = {"group": {"reused": True}, "tensors": [(("x", "float32", (1,), 0),)] * 3}


async def updates() -> Any:
    for _ in range(3):
        yield {"kind": "group", "content": UPDATE, "last": False}


@pytest.mark.parametrize(
    ("load", "hangs"),
    [
        *(
            (to_vllm.transfer_weights, call)
            for call in ("start_weight_update", "update_weights", "finish_weight_update")
        ),
        *((to_sglang.receive_updates, call[1:]) for call in (to_sglang.BEGIN, to_sglang.RECEIVE, to_sglang.END)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__module__.rpartition(".")[2],
)
def test_a_server_that_does_not_answer_costs_one_deadline(load, hangs, monkeypatch):
    """No call is made again after one that was not answered, and all calls of a push have one deadline."""
    client = Slow(f"/{hangs}", monkeypatch)
    weights = WeightsInFolder(version=1, label="x", folder=Path("x"), seconds=15.0)
    with pytest.raises(ServerError, match="no complete response"):
        run(load(client, weights, updates()))
    assert client.calls[-1] == f"/{hangs}" and client.calls.count(f"/{hangs}") == 1
    assert client.now == 15.0
