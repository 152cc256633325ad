"""What every rank does in `test_sharded_servers`: the trainer's model is sharded over the ranks, and rank 0 has two
servers, each with two tensor-parallel workers, which are threads that run the real worker module."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.http.weights import TRANSPORTS
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights.transport import PushRound
from proxima.engine.process.shared_weights import unique_weights
from proxima.engine.protocol import WeightUpdate
from tests.engine.http.fake_vllm import FakeVllm, unread
from tests.engine.http.fake_vllm_worker import FakeWorker, worker_module
from tests.training.lent_models import as_devices, stack_of
from tests.training.shared_updates import follow

PARTS = 2
PADDED = 64  # rows, of which the vocabulary has a multiple at a server
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED |= {"up_proj": "gate_up_proj"}
SPLIT_COLUMNS = ("o_proj", "down_proj")
FACTS = ServerFacts(server="fake", model="fake", transfers=("folder", "group", "ipc"), device="cpu", workers=PARTS)


def part_of(name: str, whole: Tensor, rank: int, key_heads: int) -> Tensor:
    """What a tensor-parallel worker keeps of a weight: rows of the vocabulary, which is padded with zeros; query heads;
    key heads, each on several workers if there are fewer of them; rows or columns of the MLP; all of a norm."""
    kind = name.split(".")[-2]
    if kind in ("embed_tokens", "lm_head"):
        rows = -(-len(whole) // PADDED) * PADDED
        padded = torch.zeros(rows, *whole.shape[1:], dtype=whole.dtype)
        padded[: len(whole)] = whole
        return padded.chunk(PARTS)[rank]
    if kind in ("k_proj", "v_proj"):
        heads = whole.unflatten(0, (key_heads, -1))
        first = rank * key_heads // PARTS
        return heads[first : first + max(1, key_heads // PARTS)].flatten(0, 1)
    if kind in FUSED:
        return whole.chunk(PARTS)[rank]
    if kind in SPLIT_COLUMNS and whole.dim() > 1:
        return whole.chunk(PARTS, dim=1)[rank]
    return whole


class ShardedModel(nn.Module):
    """The parameters of one worker, as vLLM names and fuses them; a tied head has a packed copy."""

    def __init__(self, shapes: Mapping[str, Tensor], rank: int, key_heads: int) -> None:
        super().__init__()
        self.rank, self.key_heads = rank, key_heads
        self.places = dict[str, tuple[nn.Module, str, int]]()  # layer, parameter and first row, by name in the files
        rows = dict[str, Tensor]()
        for name, shape in shapes.items():
            empty = torch.zeros(part_of(name, torch.zeros(shape.shape), rank, key_heads).shape, dtype=shape.dtype)
            *path, kind, last = name.split(".")
            own = ".".join([*path, FUSED.get(kind, kind), last])
            before = rows.get(own, empty[:0])
            self.places[name] = self._layer(own), last, len(before)
            rows[own] = torch.cat([before, empty])
        for own, weight in rows.items():
            self._layer(own).register_parameter(own.split(".")[-1], nn.Parameter(weight, requires_grad=False))

    def _layer(self, name: str) -> nn.Module:
        module: nn.Module = self
        for part in name.split(".")[:-1]:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names, taken = {id(parameter): name for name, parameter in self.named_parameters()}, set[str]()
        for name, whole in weights:
            layer, last, first = self.places[name]
            parameter: Any = layer._parameters[last]
            taken.add(names[id(parameter)])
            parameter.weight_loader(part_of(name, whole, self.rank, self.key_heads), first)
            names |= {id(weight): own for own, weight in self.named_parameters()}  # of a layer that is whole
        return taken

    @property
    def computes(self) -> bool:
        return not any(weight.is_meta for weight in self.parameters())


class Server:
    """With a worker for each part."""

    def __init__(self, module: Any, number: int, shapes: Mapping[str, Tensor], key_heads: int) -> None:
        self.url, self.dialect, self.facts = f"http://127.0.0.1:{9100 + number}", VllmDialect(), FACTS
        models = [ShardedModel(shapes, rank, key_heads) for rank in range(PARTS)]
        workers = [FakeWorker(module, model=model, rank=rank, size=PARTS) for rank, model in enumerate(models)]
        self.fake = FakeVllm(workers=workers)

    def connect(self) -> None:
        """In the loop that calls it."""
        self.client = ServerClient(Address(self.url), seconds=60)

        async def answer(request: httpx.Request) -> httpx.Response:
            return unread(await asyncio.to_thread(self.fake.answer, request))

        self.client._http = httpx.AsyncClient(base_url=self.url, transport=httpx.MockTransport(answer))

    def check(self, whole: Mapping[str, Tensor]) -> None:
        """Every worker has its part of these weights, to the bit, and nothing else."""
        for rank, worker in enumerate(self.fake.workers):
            left = {name: weight.numel() for name, weight in worker.model.named_parameters()}
            owners = {id(weight): name for name, weight in worker.model.named_parameters()}
            for name, weight in whole.items():
                layer, last, first = worker.model.places[name]
                part = part_of(name, weight, rank, worker.model.key_heads)
                parameter = layer._parameters[last]
                assert torch.equal(parameter[first : first + len(part)], part), (rank, name)
                left[owners[id(parameter)]] -= part.numel()
            assert not any(left.values())


def same_parts(rank: int, folder: Path, layout: dict[str, Any], key_heads: int) -> None:
    """What arrives at every worker, two versions by each way, is its part of a whole copy."""
    ranks, stack = stack_of(rank, folder, layout)
    with pytest.MonkeyPatch.context() as patch:
        as_devices(patch)
        patch.setattr(weight_buckets, "BUCKET", 4096)  # bytes: they end in the middle of layers
        if rank > 0:
            follow(stack, ranks)
            return
        module = worker_module(patch)
        patch.setattr(module, "device_name", lambda device: f"gpu{device.index}")
        asyncio.run(_pushed(stack, module, key_heads))
        ranks.end(None)


async def _pushed(stack: Any, module: Any, key_heads: int) -> None:
    lent = stack.lent_model().model
    for kind in ("group", "ipc"):
        whole = {name: weight.detach() for (name, *_), weight in unique_weights(stack.gathered().model)}
        sent = {name: weight.to(torch.bfloat16) for name, weight in whole.items()}
        servers: list[Any] = [Server(module, number, sent, key_heads) for number in range(2)]
        for server in servers:
            server.connect()
        setup: Any = SimpleNamespace(tokenizer=None, compute=None)
        transport = TRANSPORTS[kind](Vllm(weight_seconds=60.0), setup)
        for version in (1, 2):
            update = WeightUpdate(version=version, module=lent)
            weights = transport.prepare(update, f"run-{version}", "bfloat16")
            assert len(weights.plan) > 10
            push_round = PushRound(servers)
            await asyncio.gather(*(transport.push(server, weights, push_round) for server in servers))
            for server in servers:
                server.check(sent)
                assert server.fake.version == f"run-{version}"
                for worker in server.fake.workers:  # so that the next version has to come
                    for parameter in worker.model.parameters():
                        parameter.fill_(torch.nan)
        await transport.close()
        for server in servers:
            await server.client.close()
