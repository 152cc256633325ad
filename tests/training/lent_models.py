"""What every rank does in `test_lent_model`: rank 0 stages weights for servers, of a lent model and of a whole copy."""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from proxima.data import UserError
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights.sync import StagedWeights, WeightSync
from proxima.engine.http.weights.transport import TRANSPORTS
from proxima.engine.protocol import EngineSetup, WeightUpdate
from proxima.model.compute_thread import ComputeThread
from proxima.model.parallel import layer_lender
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


def content(staged: StagedWeights) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(staged.handover.folder.iterdir())}


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
    """Every file, expected log-prob and bound is that of a whole copy, to the bit; the weights are as before."""
    ranks, stack = stack_of(rank, folder, layout, **settings)
    with torch.no_grad():  # an adapter that changes something
        for number, (name, parameter) in enumerate(stack.model.named_parameters()):
            if "lora_B" in name:
                own_slice(parameter).fill_(0.01 * (number + 1))
    before = slices(stack)
    if rank > 0:
        follow(stack, ranks)
    else:
        whole, module = stack.gathered(), stack.lent_model()
        for way in ("folder", "ipc"):
            expected = staged(stack, whole, way, root / f"{way} whole", dtype)
            with most_at_once(stack.model.model) as most:
                got = staged(stack, module, way, root / f"{way} lent", dtype)
            assert most() < 0.95, most()  # tiny models have few layers
            for ours, theirs in zip(got, expected, strict=True):
                assert content(ours) == content(theirs)
                np.testing.assert_array_equal(ours.expected, theirs.expected)
                assert ours.rounding == theirs.rounding
            assert (got[0].expected != got[1].expected).any()
        ranks.end(None)
    assert all(map(torch.equal, slices(stack), before))


def troubles(rank: int, folder: Path, root: Path) -> None:
    """Errors of rank 0 in the middle of a copy, and Ctrl-C, leave no rank waiting and all weights as they were."""
    ranks, stack = stack_of(rank, folder, {})
    before = slices(stack)
    if rank > 0:
        follow(stack, ranks)
    else:
        module = stack.lent_model()
        for way, weights in (("ipc", 2), ("folder", 2), ("ipc", 30)):  # the last one in the perturbed copy
            with no_room_after(weights), pytest.raises(UserError, match="No space left"):
                staged(stack, module, way, root / f"{way} {weights}", None)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("proxima.engine.http.weights.sync.rounding", interrupted)
            staged(stack, module, "folder", root / "interrupted", None)
        assert not ranks.in_call
        staged(stack, module, "folder", root / "again", None)
        ranks.end(None)
    assert all(map(torch.equal, slices(stack), before))


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


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt
