"""What every rank does in `test_lent_model`: rank 0 stages weights for servers, of a lent model and of a whole copy."""

import asyncio
import errno
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from proxima.data import UserError
from proxima.engine.http.dialect import WeightsInFolder
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights import TRANSPORTS, ipc
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights.stream import StreamedWeights
from proxima.engine.http.weights.sync import StagedWeights, WeightSync
from proxima.engine.protocol import EngineSetup, WeightUpdate
from proxima.model.compute_thread import ComputeThread
from proxima.model.parallel import gather, layer_lender
from proxima.model.parallel.lending import lender_of
from proxima.model.parallel.sharding import Sharding, own_slice
from proxima.model.pretrained import LoadedModel
from proxima.training.process_ranks import ProcessRanks
from proxima.training.stack import TrainStack
from tests.model.parallel.passes import model_of, source
from tests.training.shared_updates import follow, train_stack

Staged = tuple[StagedWeights, StagedWeights]


def stack_of(rank: int, folder: Path, layout: dict[str, Any], **settings: Any) -> tuple[ProcessRanks, TrainStack]:
    sharding = Sharding(**layout)
    ranks = ProcessRanks(rank, dist.get_world_size(), ranks_per_share=sharding.ranks_per_share)
    return ranks, train_stack(model_of(source(folder, sharding=sharding, **settings), "policy"), ranks, 20)


def slices(stack: TrainStack) -> list[torch.Tensor]:
    return [own_slice(p).clone() for p in stack.model.model.parameters()]


def staged(stack: TrainStack, lent: LoadedModel, way: str, root: Path, dtype: str | None) -> Staged:
    """The first weights of a run, and their perturbed copy."""
    setup = replace(EngineSetup.of(stack.model.loaded, 128), compute=ComputeThread())
    spec = Vllm(probe_tokens=24, weight_folder=str(root))
    sync = WeightSync(spec, setup)
    sync.transport = TRANSPORTS[way](spec, setup)
    prepared = asyncio.run(sync.prepare(WeightUpdate(version=0, module=lent.model), "v0", dtype))
    assert sync._perturbed is not None
    return prepared, sync._perturbed


def sent(staged: StagedWeights) -> dict[str, torch.Tensor]:
    """What a server gets of staged weights, by name."""
    weights = staged.handover
    if isinstance(weights, WeightsInFolder):
        files = sorted(weights.folder.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert isinstance(weights, StreamedWeights)
    reader = Reader()
    ipc._stream(weights, reader)  # type: ignore[arg-type]
    assert len(reader.devices) == (1 if lender_of(weights.module) is None else dist.get_world_size())
    return reader.weights


class Reader:
    """Servers whose workers read what each rank has a handle of, and find the same."""

    def __init__(self) -> None:
        self.weights, self.devices = dict[str, torch.Tensor](), set[str]()

    def begin(self) -> None:
        """It waits for the first bucket."""

    def give(self, update: Mapping[str, Any]) -> None:
        content = update["content"]
        read = [views(handle, content["tensors"]) for handle in content["handles"].values()]
        for other in read[1:]:
            assert all(torch.equal(other[name], weight) for name, weight in read[0].items())
        self.weights |= read[0]
        self.devices |= content["handles"].keys()

    def wait(self) -> None:
        """It has read everything."""

    def end(self, ended: Any) -> None:
        assert ended.whole


def views(handle: Mapping[str, Any], tensors: Any) -> dict[str, torch.Tensor]:
    memory, found = torch.from_file(handle["file"], size=handle["size"], dtype=torch.uint8), {}
    for name, dtype, shape, start in tensors:
        kind = getattr(torch, dtype)
        found[name] = memory[start : start + math.prod(shape) * kind.itemsize].clone().view(kind).view(shape)
    return found


def as_devices(patch: pytest.MonkeyPatch) -> None:
    """Each rank has a device of its own: its bucket is in a file that others can read, and has a handle by its name."""
    plain = ipc._BucketMemory.handle

    def handle(memory: ipc._BucketMemory, content: torch.Tensor) -> Any:
        own = dist.get_rank() if dist.is_initialized() else 0
        return {f"gpu{own}": each for each in plain(memory, content).values()}

    patch.setattr(ipc._BucketMemory, "handle", handle)
    patch.setattr(ipc._BucketMemory, "named", property(lambda _: True, lambda *_: None), raising=False)


@contextmanager
def most_at_once(sharded: torch.nn.Module) -> Iterator[Callable[[], float]]:
    """The largest share of a model's weights that are whole on rank 0 at the same time."""
    whole = sum(p.numel() for p in sharded.parameters())
    shares, load = [0.0], layer_lender.LayerLender.load

    def loaded(lender: Any, unit: int = layer_lender.OUTER) -> None:
        load(lender, unit)
        sizes = [p.untyped_storage().nbytes() // p.element_size() for p in lender.module.parameters()]
        shares.append(sum(size for size in sizes if size > 1) / whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_lender.LayerLender, "load", loaded)
        yield lambda: max(shares)


def same_staged(
    rank: int, folder: Path, root: Path, layout: dict[str, Any], dtype: str | None, settings: dict[str, Any]
) -> None:
    """Every weight that is sent is that of a whole copy, to the bit; the log-probs, and what the copy is perturbed by,
    are within rounding, as the ranks compute them packed; the weights are as before."""
    ranks, stack = stack_of(rank, folder, layout, **settings)
    with torch.no_grad():  # an adapter that changes something
        for number, (name, parameter) in enumerate(stack.model.named_parameters()):
            if "lora_B" in name:
                own_slice(parameter).fill_(0.01 * (number + 1))
    before = slices(stack)
    coarse = layout.get("param_dtype") == "bfloat16"  # the ranks have no other weights
    with pytest.MonkeyPatch.context() as patch:
        as_devices(patch)
        patch.setattr(gather, "SMALL", 4000)  # some are gathered together, some alone
        if rank > 0:
            follow(stack, ranks)
        else:
            whole, module = stack.gathered(), stack.lent_model()
            for way in ("folder", "ipc"):
                expected = staged(stack, whole, way, root / f"{way} whole", dtype)
                with most_at_once(stack.model.model) as most:
                    got = staged(stack, module, way, root / f"{way} lent", dtype)
                    ours = [sent(each) for each in got]
                assert most() < 0.95, most()  # tiny models have few layers
                theirs = [sent(each) for each in expected]
                assert ours[0].keys() == theirs[0].keys() and all(
                    torch.equal(ours[0][n], theirs[0][n]) for n in ours[0]
                )
                moved = 2e-2 if dtype == "bfloat16" or coarse else 1e-3
                for name, weight in ours[1].items():
                    torch.testing.assert_close(weight, theirs[1][name], rtol=moved, atol=moved)
                for one, other in zip(got, expected, strict=True):
                    np.testing.assert_allclose(one.expected, other.expected, atol=0.3 if coarse else 2e-3)
                assert (got[1].rounding is None) == coarse and (got[0].expected != got[1].expected).any()
            ranks.end(None)
    assert all(map(torch.equal, slices(stack), before))


def troubles(rank: int, folder: Path, root: Path) -> None:
    """Errors of rank 0 in the middle of a copy, and Ctrl-C, leave no rank waiting and all weights as they were."""
    ranks, stack = stack_of(rank, folder, {})
    before = slices(stack)
    with pytest.MonkeyPatch.context() as patch:
        as_devices(patch)
        _troubles(rank, root, ranks, stack)
    assert all(map(torch.equal, slices(stack), before))


def _troubles(rank: int, root: Path, ranks: ProcessRanks, stack: TrainStack) -> None:
    if rank > 0:
        follow(stack, ranks)
    else:
        module = stack.lent_model()
        for weights in (2, 30):  # the last one in the perturbed copy
            with no_room_after(weights), pytest.raises(UserError, match="No space left"):
                staged(stack, module, "folder", root / str(weights), None)
        streamed = staged(stack, module, "ipc", root, None)
        for weights in streamed:
            reader = Reader()
            reader.give = no_reader  # type: ignore[method-assign]
            reader.end = lambda ended: None  # type: ignore[method-assign]
            with pytest.raises(OSError, match="gone"):
                ipc._stream(weights.handover, reader)  # type: ignore[arg-type]
            assert not ranks.in_call and len(sent(weights)) > 2
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("proxima.engine.http.weights.sync.rounding", interrupted)
            staged(stack, module, "folder", root / "interrupted", None)
        assert not ranks.in_call
        staged(stack, module, "folder", root / "again", None)
        ranks.end(None)


@contextmanager
def no_room_after(count: int) -> Iterator[None]:
    """The file system is full after so many weights."""
    seen, weights = 0, weight_buckets.unique_weights

    def until_full(model: torch.nn.Module, *, shapes: bool = False) -> Iterator[Any]:
        nonlocal seen
        for weight in weights(model, shapes=shapes):
            seen += not shapes
            if seen > count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield weight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_buckets, "unique_weights", until_full)
        yield
    assert seen > count


def no_reader(update: Any) -> None:
    raise OSError("gone")


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt
