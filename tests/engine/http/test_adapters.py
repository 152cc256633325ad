"""Adapters that are sent alone: the calls, the proof, and what is refused."""

import copy
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proxima.config.resolution import resolve
from proxima.config.schema import RunConfig
from proxima.config.sections.model import adapters_can_be_served
from proxima.data import FieldError, UserError
from proxima.engine.http.dialect import (
    ADAPTER,
    ServerFacts,
    TokenRequest,
    WeightsInFolder,
    WrittenTokens,
    is_incomplete,
)
from proxima.engine.http.server_checks import check_facts
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.http.weights.adapters import AdapterTransport
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.http.weights.transport import Receivers, choose_transport
from proxima.engine.protocol import EngineRequirements, EngineSetup, Sampling, ServerError, WeightUpdate
from proxima.model.adapters.adapter_files import WEIGHTS, read_matrices
from proxima.model.adapters.lora import adapter_names
from proxima.model.pretrained import LoadedModel
from tests.engine.helpers import unloaded
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.test_weight_probe import ModelServer
from tests.model.adapters import move, with_adapter

FACTS = ServerFacts(
    server="fake", model="fake", dtype="float32", log_probs="processed", takes_weights=True,
    transfers=("folder", "adapters"), adapter_rank=8,
)  # fmt: skip


class AdaptedServer(ModelServer):
    """A server with a base of its own that is given adapters; it never loads the matrices in `ignores`."""

    def __init__(self, loaded: LoadedModel, dtype: str = "float32", ignores: Collection[str] = ()) -> None:
        super().__init__(loaded, ignores, replace(FACTS, dtype=dtype))
        self.model.to(getattr(torch, dtype))

    async def load_adapter(self, client: None, facts: ServerFacts, weights: WeightsInFolder, link: Path) -> None:
        assert link.resolve() == weights.folder
        self.calls.append(f"load {weights.label}")
        kept = {name: self.model.get_parameter(name).detach().clone() for name in self.ignores}
        read_matrices(self.model, str(link), field_name="model.path")
        with torch.no_grad():
            for name, value in kept.items():
                self.model.get_parameter(name).copy_(value)
        self.label = weights.label


@pytest.fixture
def adapted(tiny_model: Callable[[str], Path]) -> LoadedModel:
    return with_adapter(tiny_model("llama"), dtype=torch.float32, moved=False)


def sync_of(loaded: LoadedModel) -> WeightSync:
    setup = replace(EngineSetup.of(loaded, max_length=400), adapter_rank=4)
    sync = WeightSync(Vllm(probe_tokens=256, adapters_only=True), setup)
    assert sync.choose([FACTS]) == "engine: new weights are sent by adapters: set by engine.adapters_only"
    return sync


async def push(sync: WeightSync, server: Any, module: torch.nn.Module, version: int = 0) -> Any:
    sync.newest = await sync.prepare(WeightUpdate(version=version, module=module), f"v{version}", server.facts.dtype)
    return await sync.push(server)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_server_with_base_and_adapter_is_proven(dtype: str, adapted: LoadedModel) -> None:
    server, sync = AdaptedServer(adapted, dtype), sync_of(adapted)
    before = {name: weight.detach().clone() for name, weight in adapted.model.named_parameters()}
    report = await push(sync, server, adapted.model)
    assert server.calls[0] == "load v0-perturbed" and "perturbed_mean" in report
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.model.named_parameters())
    move(adapted)
    report = await push(sync, server, adapted.model, 1)
    bytes_each = torch.finfo(getattr(torch, dtype)).bits // 8
    matrices = sum(adapted.model.get_parameter(name).numel() for name in adapter_names(adapted.model))
    assert matrices * bytes_each <= report["bytes"] < matrices * bytes_each + 20_000  # with their names
    assert server.facts.adapter == ADAPTER and "perturbed_mean" not in report
    await sync.close()


@pytest.mark.slow
async def test_every_matrix_that_stays_behind_is_found(adapted: LoadedModel) -> None:
    sync = sync_of(adapted)
    await push(sync, AdaptedServer(adapted), adapted.model)
    for name in adapter_names(adapted.model):
        sync._proven.clear()
        with pytest.raises(UserError, match=r"perturbed copy"):
            await sync.push(AdaptedServer(adapted, ignores=[name]))  # type: ignore[arg-type]
    await sync.close()


async def test_another_base_is_found(adapted: LoadedModel) -> None:
    server, sync = AdaptedServer(adapted), sync_of(adapted)
    with torch.no_grad():
        server.model.get_parameter("model.norm.weight").mul_(1.05)
    with pytest.raises(UserError, match=r"does not compute with the weights"):
        await push(sync, server, adapted.model)
    await sync.close()


@pytest.mark.parametrize("label", ["0a1b2c3d.7.v6", "incomplete 0a1b2c3d.7.v6-perturbed"])
async def test_a_base_that_another_run_has_replaced_is_refused(label: str, adapted: LoadedModel) -> None:
    server, sync = AdaptedServer(adapted), sync_of(adapted)
    server.label = label
    with pytest.raises(UserError, match=r"has weights of an earlier run \(.*\) in place of the base"):
        await push(sync, server, adapted.model)
    assert server.calls == []
    server.label = sync.label_of("0a1b2c3d", 7, 6)  # of a run that sent adapters alone
    assert "perturbed_mean" in await sync.push(server)  # type: ignore[arg-type]
    await sync.close()


# ---- what vLLM is told -----------------------------------------------------------------------------------------------


def handover(folder: Path, version: int) -> WeightsInFolder:
    (folder / f"v{version}").mkdir()
    return WeightsInFolder(version=version, label=f"run.v{version}", folder=folder / f"v{version}")


class Told:
    """A transport and a replica over a fake."""

    def __init__(self, fake: FakeVllm, folder: Path) -> None:
        self.fake, self.client, self.dialect, self.url = fake, fake.client(), VllmDialect(), "http://127.0.0.1:1"
        setup: Any = SimpleNamespace(tokenizer=None)
        self.transport = AdapterTransport(Vllm(), setup)
        self.transport._folders.kept.append(folder / "v0")

    async def push(self, weights: WeightsInFolder) -> None:
        await self.transport.push(self, weights)  # type: ignore[arg-type]

    def spoken(self) -> list[tuple[str, Any]]:
        calls = [(path, body) for path, body in self.fake.calls if path not in ("/v1/models", "/inference/v1/generate")]
        self.fake.calls.clear()
        return calls

    async def named(self) -> list[Any]:
        """The models that the requests of a score and of a completion name."""
        self.fake.calls.clear()
        await self.dialect.score(self.client, self.facts, WrittenTokens([1, 2, 3], (), np.array([1, 2, 3])), 1)
        request = TokenRequest(id="1", tokens=[1, 2, 3], sampling=Sampling(max_tokens=2))
        assert [chunk async for chunk in self.dialect.stream(self.client, self.facts, request)]
        return [body.get("model") for _, body in self.fake.calls]


async def told(tmp_path: Path) -> Told:
    replica = Told(FakeVllm(lora=16), tmp_path)
    replica.facts = await replica.dialect.probe(replica.client)
    assert replica.facts.adapter_rank == 16 and "adapters" in replica.facts.transfers
    replica.fake.calls.clear()
    return replica


async def test_the_first_adapter_is_registered_and_later_ones_replace_it(tmp_path: Path) -> None:
    replica = await told(tmp_path)
    assert await replica.named() == [None, None]
    replica.fake.calls.clear()
    first, second = handover(tmp_path, 0), handover(tmp_path, 1)
    await replica.push(first)
    (before, headless, registered, after) = replica.spoken()
    assert headless == ("/collective_rpc", {"method": "skip_head_adapter"})
    link = Path(replica.fake.adapters[ADAPTER])
    assert registered == ("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(link)})
    assert is_incomplete(before[1]["new_version"]) and after[1] == {"new_version": "run.v0"}
    assert link.resolve() == replica.fake.adapter == first.folder and await replica.named() == [ADAPTER, ADAPTER]
    replica.fake.calls.clear()
    await replica.push(second)
    call = {"method": "replace_adapter", "kwargs": {"folder": str(second.folder)}}
    assert replica.spoken()[1] == ("/collective_rpc", call)
    assert link.resolve() == replica.fake.adapter == second.folder and replica.fake.version == "run.v1"


async def test_a_restarted_server_gets_the_adapter_anew(tmp_path: Path) -> None:
    replica = await told(tmp_path)
    await replica.push(handover(tmp_path, 0))
    replica.fake.adapters.clear()
    replica.fake.adapter = None
    newest = handover(tmp_path, 1)
    await replica.push(newest)
    assert replica.fake.adapter == newest.folder and await replica.named() == [ADAPTER, ADAPTER]


async def test_an_adapter_of_another_run_is_removed(tmp_path: Path) -> None:
    replica = await told(tmp_path)
    replica.fake.adapters[ADAPTER], replica.fake.adapter = "/gone", tmp_path
    newest = handover(tmp_path, 0)
    await replica.push(newest)
    assert replica.fake.adapter == newest.folder
    calls = ["/v1/unload_lora_adapter", "/collective_rpc", "/v1/load_lora_adapter"]
    assert [path for path, _ in replica.spoken()][1:4] == calls


async def test_a_server_that_could_not_load_says_so(tmp_path: Path) -> None:
    replica = await told(tmp_path)
    await replica.push(handover(tmp_path, 0))
    gone = handover(tmp_path, 1)
    gone.folder.rmdir()
    with pytest.raises(ServerError, match=r"No adapter found"):
        await replica.push(gone)
    assert is_incomplete(replica.fake.version)


async def test_a_server_of_several_adapters_takes_none(tmp_path: Path) -> None:
    replica = Told(FakeVllm(lora=16), tmp_path)
    replica.fake.loras = 2
    facts = await replica.dialect.probe(replica.client)
    assert facts.adapter_rank == 0 and "adapters" not in facts.transfers


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"transfers": ("folder",), "adapter_rank": 0}, r"adapters_only=True.*loads no adapters.*--enable-lora"),
        ({"adapter_rank": 2}, r"adapters of rank 2, and model.lora.rank is 4"),
    ],
)
def test_a_server_without_room_for_the_adapter_is_refused(facts: dict[str, Any], line: str) -> None:
    needs = EngineRequirements(model=unloaded(), publishes=True, adapter_rank=4)
    server, spec = replace(FACTS, **facts), Vllm(adapters_only=True)
    for check in (
        lambda: check_facts(spec, server, needs, "http://x"),
        lambda: choose_transport(Receivers([server], spec, adapter_rank=4)),
    ):
        with pytest.raises(FieldError, match=line):
            check()


def test_whole_weights_are_sent_where_there_are_no_adapters() -> None:
    kind, _ = choose_transport(Receivers([replace(FACTS, transfers=("folder",))], Vllm(adapters_only=True)))
    assert kind == "folder"
    with pytest.raises(FieldError, match=r"transfer='ipc' is not used with adapters_only"):
        Vllm(adapters_only=True, transfer="ipc")


def test_the_folder_is_one_that_peft_reads(adapted: LoadedModel, tmp_path: Path) -> None:
    from peft import LoraConfig

    transport = AdapterTransport(Vllm(weight_folder=str(tmp_path)), EngineSetup.of(adapted))
    move(adapted)
    weights = transport.prepare(WeightUpdate(version=1, module=adapted.model), "v1", "bfloat16")
    config = LoraConfig.from_pretrained(str(weights.folder))
    assert (config.r, config.lora_alpha) == (4, 8) and weights.size < 200_000
    tensors = load_file(weights.folder / WEIGHTS)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    save_file({name: value.float() for name, value in tensors.items()}, weights.folder / WEIGHTS)
    copied = copy.deepcopy(adapted.model)
    read_matrices(copied, str(weights.folder), field_name="model.path")
    for name in adapter_names(copied):
        exact = adapted.model.get_parameter(name).to(torch.bfloat16).float()
        assert torch.equal(copied.get_parameter(name), exact)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], r"engine.adapters_only.*model.lora is null"),
        (["model.lora={dora: true}"], r"model.lora.dora.*vLLM computes no DoRA"),
        (["model.lora={rank: 600}"], r"model.lora.rank.*at most 512"),
        (["model.lora={targets: [q_proj, lm_head]}"], r"model.lora.targets.*lm_head"),
        (["model.lora={}"], r"engine.adapters_only.*sglang"),
    ],
)
def test_recipes_whose_adapters_cannot_be_served_are_refused(words: list[str], line: str) -> None:
    kind = "sglang" if "sglang" in line else "vllm"
    resolved = resolve("quickstart", [f"engine={{kind: {kind}, adapters_only: true}}", *words], root=RunConfig)
    config = resolved.config
    (finding,) = adapters_can_be_served(resolved, config.model, config.algorithm)
    assert re.search(line, " ".join(finding))
