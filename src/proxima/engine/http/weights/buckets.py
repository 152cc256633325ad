"""A model's weights as buckets of bytes, for transports that send them.

`plan_buckets` decides which tensor lies where, from names, dtypes and shapes alone. `filled_buckets` fills one after
the other by the plan, in memory of the device on which the model is trained. The weights of a sharded model are
gathered straight into them, a layer at a time: see `LayerLender`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from proxima.engine.process.shared_weights import TensorPlace, unique_weights

BUCKET = 1 << 28  # bytes; a larger tensor has a bucket of its own
ALIGNED = 16  # bytes


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together. `start` and `size` are bytes of all buckets, laid end to end; the places count
    from `start`."""

    start: int
    size: int
    places: tuple[TensorPlace, ...]

    @property
    def as_json(self) -> list[list[Any]]:
        """[[name, dtype, shape, first byte], …] as the server's worker reads it."""
        return [[place.name, place.dtype, list(place.shape), place.start] for place in self.places]


def plan_buckets(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], largest: int | None = None) -> list[Bucket]:
    """Assign tensors, in order, to buckets of at most `largest` bytes (None: `BUCKET`), each aligned to 16 bytes."""
    buckets = list[Bucket]()
    places = list[TensorPlace]()
    start = 0
    end = 0

    def close() -> None:
        nonlocal start, end
        size = _aligned(end)
        buckets.append(Bucket(start, size, tuple(places)))
        places.clear()
        start += size
        end = 0

    for name, dtype, shape in tensors:
        place = TensorPlace(name, str(dtype).removeprefix("torch."), tuple(shape), _aligned(end))
        if places and place.end > (largest or BUCKET):
            close()
            place = TensorPlace(place.name, place.dtype, place.shape, 0)
        places.append(place)
        end = place.end
    close()
    return buckets


def _aligned(end: int) -> int:
    """Where the next tensor begins after one that ends there."""
    return -(-end // ALIGNED) * ALIGNED


def without_gaps(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The same tensors in contiguous buckets: a bucket is split at each gap."""
    split = list[Bucket]()
    for bucket in buckets:
        run = list[TensorPlace]()
        for place in (*bucket.places, None):
            if run and (place is None or place.start != run[-1].end):
                first = run[0].start
                places = tuple(replace(each, start=each.start - first) for each in run)
                split.append(Bucket(bucket.start + first, run[-1].end - first, places))
                run.clear()
            if place is not None:
                run.append(place)
    return split


def weight_bytes(buckets: Iterable[Bucket]) -> int:
    """Bytes of the weights, without the gaps between them."""
    return sum(place.end - place.start for bucket in buckets for place in bucket.places)


def plan_of(model: nn.Module, dtype: torch.dtype | None, *, file_names: bool) -> list[Bucket]:
    """The buckets for the weights of a model, with adapters merged and tied ones once. Reads no weights.

    Args:
        dtype: of the floating-point weights in them; None: unchanged.
        file_names: see `named_weights`.
    """
    shapes = named_weights(model, file_names=file_names, shapes=True)
    return plan_buckets((name, written_dtype(weight, dtype), weight.shape) for name, weight in shapes)


@torch.no_grad()
def filled_buckets(
    model: nn.Module, buckets: Sequence[Bucket], memory: Callable[[int], Tensor], *, file_names: bool
) -> Iterator[tuple[Bucket, Tensor]]:
    """Yield each bucket with its bytes, [size] uint8. Two are in memory at a time: what is done with the one before
    must have ended when the next one is asked for.

    Args:
        memory: allocates so many bytes, where the reader wants them.
    """
    most = max(bucket.size for bucket in buckets)
    both = [memory(most) for _ in range(min(2, len(buckets)))]
    named = iter(named_weights(model, file_names=file_names))
    for number, bucket in enumerate(buckets):
        content = both[number % 2][: bucket.size]
        for place in bucket.places:
            name, weight = next(named)
            assert name == place.name
            flat = content[place.start : place.end]
            flat.view(getattr(torch, place.dtype)).view(*place.shape).copy_(weight)
        yield bucket, content


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
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    if any(len(each.target_patterns) > 1 for each in converters):  # several weights make one in the files
        yield from revert_weight_conversion(model, dict(named)).items()
        return
    for name, weight in named:
        if conversions:
            yield from revert_weight_conversion(model, {name: weight}).items()
        else:
            yield name, weight


def written_dtype(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight is written: integers keep theirs."""
    if dtype is None or not weight.is_floating_point():
        return weight.dtype
    return dtype
