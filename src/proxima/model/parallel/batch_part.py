"""Cuts a packed batch along its token axis, by the fields that are on the host: nothing here waits for a device."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from proxima.data.field_checks import tensor_hints
from proxima.data.packed_batch import PackedBatch
from proxima.data.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class BatchPart(PackedBatch):
    """A part of a batch's tokens, possibly padded at the end, and the response tokens that they predict: the `rows` of
    all response tokens. Segments and sequences are those of the whole batch."""

    rows: Annotated[Tensor, "int N"]


def part_of(batch: PackedBatch, rank: int, size: int) -> BatchPart:
    """Part `rank` of `size` equal parts of a batch."""
    count = len(batch.tokens)
    width = -(-count // size)
    start = min(count, rank * width)
    predict = _predicting(batch)
    predicted = np.flatnonzero((predict >= start) & (predict < start + width))
    rows = to_device(torch.from_numpy(predicted), batch.tokens.device)
    pieces = {name: getattr(batch, name)[start : start + width] for name in ("tokens", "position")}
    changed: dict[str, Any] = {name: F.pad(piece, (0, width - len(piece))) for name, piece in pieces.items()}
    for name, hint in tensor_hints(PackedBatch).items():
        if hint.split()[1] == "N" and (column := getattr(batch, name)) is not None:
            changed[name] = column.index_select(0, rows)
    if batch.routed_experts is not None:
        piece = batch.routed_experts[start : start + width]
        changed["routed_experts"] = F.pad(piece, (0, 0, 0, 0, 0, width - len(piece)), value=-1)
    changed["predict"] = changed["predict"] - start
    return BatchPart(**vars(batch) | changed | _kept(batch, predicted), rows=rows)


def _predicting(batch: PackedBatch) -> NDArray[np.int64]:
    """[N] `batch.predict`, from fields on the host."""
    contexts, places = batch.contexts(), [np.zeros(0, np.int64)]
    for segment, prompt, count in zip(batch.responses, batch.prompts, batch.tokens_of, strict=True):
        spans = [*contexts[segment][len(prompt) :], (batch.edges[segment], batch.edges[segment + 1])]
        places += [np.r_[prompt[-1][1] - 1, *(np.arange(*span) for span in spans)][:count]]
    return np.concatenate(places)


def _kept(batch: PackedBatch, rows: NDArray[np.int64]) -> dict[str, Any]:
    """The sets that the tokens of these rows were sampled from, as fields of a batch."""
    if batch.sampling_mask is None:
        return {}
    edges = np.array(batch.sampling_mask_edges)
    ids = np.concatenate([np.zeros(0, np.int64), *(np.arange(edges[n], edges[n + 1]) for n in rows)])
    cuts = np.concatenate([[0], np.cumsum(np.diff(edges)[rows])])
    index, offsets = (to_device(torch.from_numpy(array), batch.tokens.device) for array in (ids, cuts))
    sets = {"sampling_mask": batch.sampling_mask.index_select(0, index), "sampling_mask_cu": offsets}
    return {**sets, "sampling_mask_edges": tuple(cuts.tolist())}
