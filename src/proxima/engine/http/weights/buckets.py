"""A copy of a model's weights as one file of buckets, for transports that send bytes.

`plan_buckets` decides which tensor lies where, from names, dtypes and shapes alone; `write_buckets` fills a file by the
plan. The weights of a sharded model are gathered straight into it, a layer at a time: see `LayerLender`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data.json_reader import load_json
from proxima.engine.process.shared_weights import TensorPlace, unique_weights
from proxima.model.architecture import optional_attribute
from proxima.system.linux import allocate

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
    """Assign tensors, in order, to buckets of at most `largest` bytes (None: `BUCKET`), each aligned to 16 bytes."""
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
    """The same tensors in contiguous buckets: a bucket is split at each gap."""
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
        rows = load_json((folder / PLAN).read_text(encoding="utf-8"))
        tensors = [(name, getattr(torch, dtype), shape) for row in rows for name, dtype, shape, _ in row]
        self.buckets = tuple(plan_buckets(tensors))
        self.size = sum(bucket.size for bucket in self.buckets)

    @classmethod
    def create(cls, folder: Path, buckets: Sequence[Bucket]) -> "Buckets":
        """Allocate a file for a plan. OSError: there is no room."""
        (folder / PLAN).write_text(json.dumps([bucket.as_json for bucket in buckets]), encoding="utf-8")
        created = cls(folder)
        with created.file.open("xb") as file:
            allocate(file, created.size)
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
def write_buckets(model: nn.Module, folder: Path, dtype: torch.dtype | None, *, file_names: bool = False) -> None:
    """Copy the weights of a model, with adapters merged and tied ones once.

    Args:
        dtype: of the written floating-point weights; None: unchanged.
        file_names: see `named_weights`.
    """
    shapes = named_weights(model, file_names=file_names, shapes=True)
    tensors = [(name, written_dtype(weight, dtype), weight.shape) for name, weight in shapes]
    buckets = Buckets.create(folder, plan_buckets(tensors))
    views = buckets.views(buckets.memory())
    for name, weight in named_weights(model, file_names=file_names):
        views[name].copy_(weight)


def named_weights(model: nn.Module, *, file_names: bool, shapes: bool = False) -> Iterable[tuple[str, Tensor]]:
    """Each weight once, with its name; `shapes` as for `unique_weights`.

    Args:
        file_names: the names of the model's own files, see `file_weights`.
    """
    if file_names:
        return file_weights(model, shapes=shapes)
    return ((name, weight) for (name, *_), weight in unique_weights(model, shapes=shapes))


def file_weights(model: Any, *, shapes: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight under its name in the model's files; `shapes` as for `unique_weights`. transformers stacks the
    matrices of experts when it loads them, and gives the stack another name, which a server may ignore without a word.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    named = ((name, weight.detach()) for (name, *_), weight in unique_weights(model, shapes=shapes))
    conversions = optional_attribute(model, "_weight_conversions")
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    if any(len(each.target_patterns) > 1 for each in converters):  # several weights make one in the files
        yield from revert_weight_conversion(model, dict(named)).items()
        return
    for name, weight in named:
        yield from revert_weight_conversion(model, {name: weight}).items() if conversions else [(name, weight)]


def written_dtype(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight is written: integers keep theirs."""
    return weight.dtype if dtype is None or not weight.is_floating_point() else dtype
