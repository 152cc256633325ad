"""Reads the optimizer state of a checkpoint: tensors that any number of ranks wrote by slices, on any number of
ranks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from proxima.train.optimizer_step import sharded_as

OFFSETS, KEY = "saved_offsets", "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint, in the metadata of a file


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, in a file."""

    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def read_optimizer(place: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the folder `place`, or of the file of that name with `.safetensors`, by `kind/weight`. If the
    weight is sharded, so is its tensor, and a rank reads only its own slice; every other tensor is read whole.

    Raises:
        OSError, SafetensorError: a file can't be read.
    """
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place.with_suffix(".safetensors")]
    pieces = pieces_of(files)
    return {name: assembled(name, parts, weights.get(name.partition("/")[2])) for name, parts in pieces.items()}


def pieces_of(files: Iterable[Path]) -> dict[str, list[Piece]]:
    """The location of the blocks of each tensor, by its name."""
    pieces = dict[str, list[Piece]]()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            saved = json.loads((opened.metadata() or {}).get(KEY, "{}"))
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                shape = tuple(opened.get_slice(name).get_shape())
                offset = tuple(saved[name][OFFSETS]) if name in saved else (0,) * len(shape)
                pieces.setdefault(name, []).append(Piece(file, offset, shape))
    return pieces


def assembled(name: str, pieces: list[Piece], weight: Tensor | None = None) -> Tensor:
    """The tensor of these blocks; sharded like `weight` if that is sharded and of the same shape except for the
    columns."""
    shape = [max(edge) for edge in zip(*[_end(piece.offset, piece.shape) for piece in pieces], strict=True)]
    with safe_open(pieces[0].file, framework="pt") as opened:
        if not shape:
            scalar: Tensor = opened.get_tensor(name)
            return scalar
        dtype = opened.get_slice(name)[tuple(slice(0, 0) for _ in shape)].dtype
    rows = None if weight is None or not hasattr(weight, "to_local") else list(weight.shape)[:-1]
    if weight is None or rows is None or rows != shape[:-1]:
        values = torch.zeros(shape, dtype=dtype)
        _read_block(name, pieces, values, (0,) * len(shape))
        return values
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    like: Any = weight
    size = torch.Size(shape)
    local_shape, offset = compute_local_shape_and_global_offset(size, like.device_mesh, like.placements)
    block = torch.zeros(local_shape, dtype=dtype, device=like.to_local().device)
    _read_block(name, pieces, block, tuple(offset))
    return sharded_as(weight, block, size)


def _read_block(name: str, pieces: list[Piece], block: Tensor, offset: tuple[int, ...]) -> None:
    """Fill a block that begins at `offset` of the whole from the pieces that overlap it."""
    for piece in pieces:
        start = [max(pair) for pair in zip(offset, piece.offset, strict=True)]
        ends = zip(_end(offset, tuple(block.shape)), _end(piece.offset, piece.shape), strict=True)
        stop = [min(pair) for pair in ends]
        if all(a < b for a, b in zip(start, stop, strict=True)):
            with safe_open(piece.file, framework="pt") as opened:
                block[_slices(start, stop, offset)] = opened.get_slice(name)[_slices(start, stop, piece.offset)].to(
                    block.device
                )


def _end(offset: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    return [at + size for at, size in zip(offset, shape, strict=True)]


def _slices(start: list[int], stop: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, origin, strict=True))
