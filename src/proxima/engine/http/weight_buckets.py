"""A copy of a model's weights as one file of buckets, for transports that send bytes.

`plan_buckets` decides which tensor lies where, from names, dtypes and shapes alone; `write_buckets` fills a file by the
plan. The weights of a sharded model are gathered straight into it, a layer at a time: see `LayerLender`.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data.json_reader import load_json
from proxima.engine.process.shared_weights import TensorPlace, unique_weights

BUCKET = 1 << 28  # bytes; a larger tensor has a bucket of its own
ALIGNED = 16  # bytes
BYTES, PLAN = "weights.bin", "buckets.json"


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together. `start` and `size` are bytes of the file; the places count from `start`."""

    start: int
    size: int
    places: tuple[TensorPlace, ...]

    @property
    def as_json(self) -> list[list[Any]]:
        """[[name, dtype, shape, first byte], …] as the server's worker reads it."""
        return [[place.name, place.dtype, list(place.shape), place.start] for place in self.places]


def plan_buckets(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], largest: int | None = None) -> list[Bucket]:
    """Deal tensors out to buckets of at most `largest` bytes (None: `BUCKET`), in order, each aligned to 16 bytes."""
    buckets, places, start, end = list[Bucket](), list[TensorPlace](), 0, 0

    def close() -> None:
        nonlocal start, end
        size = -(-end // ALIGNED) * ALIGNED
        buckets.append(Bucket(start, size, tuple(places)))
        places.clear()
        start, end = start + size, 0

    for name, dtype, shape in tensors:
        place = TensorPlace(name, str(dtype).removeprefix("torch."), tuple(shape), -(-end // ALIGNED) * ALIGNED)
        if places and place.end > (largest or BUCKET):
            close()
            place = TensorPlace(place.name, place.dtype, place.shape, 0)
        places.append(place)
        end = place.end
    close()
    return buckets


def without_gaps(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The same tensors in buckets in which each lies right behind the one before it: they are split at gaps."""
    split = list[Bucket]()
    for bucket in buckets:
        run = list[TensorPlace]()
        for place in (*bucket.places, None):
            if run and (place is None or place.start != run[-1].end):
                first = run[0].start
                places = (replace(each, start=each.start - first) for each in run)
                split.append(Bucket(bucket.start + first, run[-1].end - first, tuple(places)))
                run.clear()
            if place is not None:
                run.append(place)
    return split


class Buckets:
    """A file of buckets in a folder. Read by any number of threads; written once."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / BYTES
        rows = load_json((folder / PLAN).read_text())
        tensors = [(name, getattr(torch, dtype), shape) for row in rows for name, dtype, shape, _ in row]
        self.buckets = tuple(plan_buckets(tensors))
        self.size = sum(bucket.size for bucket in self.buckets)

    @classmethod
    def create(cls, folder: Path, buckets: Sequence[Bucket]) -> "Buckets":
        """Allocate a file for a plan. OSError: there is no room."""
        (folder / PLAN).write_text(json.dumps([bucket.as_json for bucket in buckets]))
        created = cls(folder)
        with created.file.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, created.size)  # memory that is short is an error here, not a signal
        return created

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, without the gaps between them."""
        return sum(place.end - place.start for bucket in self.buckets for place in bucket.places)

    def memory(self) -> Tensor:
        """The file, mapped: [size] uint8."""
        return torch.from_file(str(self.file), shared=True, size=self.size, dtype=torch.uint8)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Each tensor in `memory`, by its name."""
        views = dict[str, Tensor]()
        for bucket in self.buckets:
            for place in bucket.places:
                flat = memory[bucket.start + place.start : bucket.start + place.end]
                views[place.name] = flat.view(getattr(torch, place.dtype)).view(*place.shape)
        return views


@torch.no_grad()
def write_buckets(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy the weights of a model, with adapters merged and tied ones once.

    Args:
        dtype: of the written floating-point weights; None: unchanged.
    """
    shapes = unique_weights(model, shapes=True)
    tensors = [(names[0], written_dtype(weight, dtype), weight.shape) for names, weight in shapes]
    buckets = Buckets.create(folder, plan_buckets(tensors))
    views = buckets.views(buckets.memory())
    for (name, *_), weight in unique_weights(model):
        views[name].copy_(weight)


def written_dtype(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight is written: integers keep theirs."""
    return weight.dtype if dtype is None or not weight.is_floating_point() else dtype
