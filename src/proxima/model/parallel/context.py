"""Ranks that split the tokens of a packed batch between them: Ulysses.

    L tokens of the axis    | rank 0       | rank 1       | rank 2    ·· |     equal parts; the last ones may be padding
    embedding, linear layers, norms, rotary: each rank its own part
    attention: rank r gets some heads of all L tokens, by an all-to-all, and gives them back by another
    outputs of each response token: of the rank that holds the state which predicts it; then all have all of them

So attention is that of one process, `packed` or flash attention over whole sequences, including shared prompts and
windows, and a loss sees whole sequences. The ranks of a group compute the same loss, and each differentiates only its
own outputs: the sum of their gradients is that of one process.

Source: arXiv 2309.14509. Differs: the number of heads need not be divisible by the ranks, and key heads are repeated
where necessary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from proxima.data import FieldError, require
from proxima.data.field_checks import tensor_hints
from proxima.data.packed_batch import PackedBatch
from proxima.data.transfer import to_device
from proxima.model.attention import FLASH, Segments, ShownImages, attend_segments, flash_attention, packed_states
from proxima.model.moe import RoutingPass
from proxima.model.parallel.mesh import add_parts, exchange, meshes_of
from proxima.model.parallel.sharding import Sharding
from proxima.model.proof import proof_of

Attend = Callable[..., Tensor]  # (layer, q, k, v, scale, window): `attend` of `packed_attention`
FIELD = "placement.context_parallel"
SUMS = frozenset({"expert_count", "expert_probability", "route_counts"})  # outputs that are sums over tokens
FED = frozenset({"routed_experts"})  # outputs of each token that is fed, [L, …]


@dataclass(frozen=True, kw_only=True)
class BatchPart(PackedBatch):
    """A part of a batch's tokens, possibly padded at the end, and the response tokens that they predict: the `rows` of
    all response tokens. Segments and sequences are those of the whole batch."""

    rows: Annotated[Tensor, "int N"]


def check_context(config: Any, sharding: Sharding, ranks: int, model: nn.Module | None, *, name: str) -> None:
    """`check_split` for context parallelism; `model` may lack its weights, and None is not checked.

    Raises:
        FieldError: the model has fewer query heads than ranks, or carries information between tokens elsewhere than in
            an attention that proxima computes.
    """
    text = config.get_text_config()
    tensor = sharding.tensor_parallel
    count = sharding.context_parallel
    mixed = None if model is None else proof_of(model).problem("packed")
    if mixed is not None:
        other = f"does not keep packed sequences apart ({mixed})"
        raise FieldError(FIELD, count, f"splits packed tokens, and {name} {other}", remedy="set it to 1")
    heads = max(1, text.num_attention_heads // tensor)
    legal = max(number for number in range(1, heads + 1) if ranks // tensor % number == 0)
    bound = f"must be at most the number of query heads of {name}, {text.num_attention_heads}"
    if tensor > 1:
        bound += f", over tensor_parallel={tensor}"
    require(count <= heads, FIELD, count, bound, remedy=f"set it to {legal}")


class ContextGroup:
    """The ranks that compute one packed batch together, of which this is one.

    Raises:
        FieldError: the model's attention is `padded`.
    """

    def __init__(self, sharding: Sharding, device: torch.device, attention: str) -> None:
        bound = f"needs packed sequences, and model.attention={attention} is set"
        require(attention != "padded", FIELD, sharding.context_parallel, bound, remedy="set it to 1")
        self.attention = attention
        mesh = meshes_of(sharding, device).context
        assert mesh is not None
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self._deal = lru_cache(maxsize=16)(partial(_deal, self.size))  # of this model: its tensors may be fake ones

    def run(self, function: Callable[[PackedBatch], Any], batch: PackedBatch) -> Any:
        """Combine the results of `function` for the parts of all ranks: a tensor [N, …], or a dict of such tensors and
        the outputs in `SUMS` and `FED`. The backward pass goes through this rank's part. Collective."""
        part = part_of(batch, self.rank, self.size)
        given = function(part)
        if isinstance(given, Tensor):
            return self._gathered(given, part, batch)
        combined: dict[str, Tensor | None] = {}
        for name, own in given.items():
            combined[name] = None if own is None else self._gathered(own, part, batch, name)
        return combined

    def _gathered(self, own: Tensor, part: BatchPart, batch: PackedBatch, name: str = "") -> Tensor:
        if name in SUMS:
            return add_parts(own, self.group)
        rows = part.rows
        count = len(batch.target)
        if name in FED:  # padding at the end is cut off
            start = self.rank * len(part.tokens)
            count = len(batch.tokens)
            end = max(start, min(count, start + len(own)))
            rows = torch.arange(start, end, device=own.device)
            own = own[: len(rows)]
        wide = own if own.is_floating_point() else own.long()  # not every backend adds up small integers
        rows_of_all = wide.new_zeros(count, *own.shape[1:]).index_copy(0, rows, wide)
        return add_parts(rows_of_all, self.group).to(own.dtype)

    def hidden(
        self, backbone: nn.Module, part: PackedBatch, routing: RoutingPass | None, images: ShownImages | None
    ) -> Tensor:
        """[n, D] the states that predict the response tokens of a part. Collective. There is no dropout."""
        of_heads: Attend
        if self.attention in FLASH:
            of_heads = flash_attention(part, self.attention)
        else:
            of_heads = partial(_rectangles, Segments(part))
        attend = partial(self._attend, of_heads, part.edges[-1])
        segments = None if images is None else images.segments
        return packed_states(backbone, part, routing, images, segments=segments, attend=attend)

    def _attend(self, of_heads: Attend, count: int, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        """q [l, H, D], k, v [l, H_kv, D] of this rank's l tokens → [l, H, D], computed as some heads of all L tokens by
        `of_heads`."""
        width, query_heads, dim = q.shape
        order, queries, keys = self._deal(query_heads, k.shape[1], q.device)
        own = queries[self.rank]
        own_keys = keys[self.rank]
        heads = torch.cat([q, k, v], dim=1).transpose(0, 1).index_select(0, order)
        sent = [n + 2 * m for n, m in zip(queries, keys, strict=True)]
        own_sent = sent[self.rank]
        received = exchange(heads, [own_sent] * self.size, sent, self.group)
        whole = received.view(self.size, own_sent, width, dim).transpose(1, 2).flatten(0, 1)
        whole_q, whole_k, whole_v = whole[:count].split([own, own_keys, own_keys], dim=1)
        out = of_heads(layer, whole_q, whole_k, whole_v, *how)
        padded = F.pad(out, (0, 0, 0, 0, 0, self.size * width - count))
        back = padded.view(self.size, width, own, dim).transpose(1, 2).flatten(0, 1)
        return exchange(back, queries, [own] * self.size, self.group).transpose(0, 1)


def _rectangles(segments: Segments, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
    """Attention of whole sequences by `attend_segments`, which is the same in every layer."""
    return attend_segments(segments, q, k, v, *how)


def _deal(ranks: int, heads: int, key_heads: int, device: torch.device) -> tuple[Tensor, list[int], list[int]]:
    """Assign heads to ranks. Returns the order in which the heads of (q, k, v), H + 2 H_kv in a row, are sent, rank by
    rank, and the numbers of query heads and of key heads for each rank. A rank's number of key heads divides that of
    its query heads; a key head that further query heads read is sent more than once."""
    group = heads // key_heads
    order = list[int]()
    queries = list[int]()
    keys = list[int]()
    for start, end in pairwise(heads * rank // ranks for rank in range(ranks + 1)):
        alike = int(np.gcd.reduce([start, end, group]))
        if start // group == (end - 1) // group:
            alike = end - start
        read = [heads + head // group for head in range(start, end, alike)]
        order += range(start, end)
        order += read
        order += [head + key_heads for head in read]  # the values of these keys
        queries.append(end - start)
        keys.append(len(read))
    return to_device(torch.tensor(order), device), queries, keys


def part_of(batch: PackedBatch, rank: int, size: int) -> BatchPart:
    """Part `rank` of `size` equal parts of a batch."""
    count = len(batch.tokens)
    width = -(-count // size)
    start = min(count, rank * width)
    predict = _predicting(batch)
    predicted = np.flatnonzero((predict >= start) & (predict < start + width))
    rows = to_device(torch.from_numpy(predicted), batch.tokens.device)
    changed: dict[str, Any] = {}
    for name, hint in tensor_hints(PackedBatch).items():
        dtype, axis, *others = hint.split()
        column = getattr(batch, name)
        if column is not None and axis == "N":
            changed[name] = column.index_select(0, rows)
        elif column is not None and axis == "L":
            piece = column[start : start + width]
            padding = [0, 0] * len(others) + [0, width - len(piece)]
            filler = -1 if dtype == "id" else 0
            changed[name] = F.pad(piece, padding, value=filler)
    changed["predict"] = changed["predict"] - start
    return BatchPart(**vars(batch) | changed | _sampling_masks(batch, predicted), rows=rows)


def _predicting(batch: PackedBatch) -> NDArray[np.int64]:
    """[N] `batch.predict`, from fields on the host."""
    contexts = batch.contexts()
    places = [np.zeros(0, np.int64)]
    for segment, prompt, count in zip(batch.responses, batch.prompts, batch.tokens_of, strict=True):
        last_of_prompt = prompt[-1][1] - 1
        own = (batch.edges[segment], batch.edges[segment + 1])
        spans = [*contexts[segment][len(prompt) :], own]
        tokens = [np.arange(start, end) for start, end in spans]
        predicting = np.concatenate([[last_of_prompt], *tokens])
        places.append(predicting[:count])
    return np.concatenate(places)


def _sampling_masks(batch: PackedBatch, rows: NDArray[np.int64]) -> dict[str, Any]:
    """The sets that the tokens of these rows were sampled from, as fields of a batch."""
    if batch.sampling_mask is None:
        return {}
    edges = np.array(batch.sampling_mask_edges)
    ids = [np.zeros(0, np.int64)]
    ids += [np.arange(edges[n], edges[n + 1]) for n in rows]
    cuts = np.concatenate([[0], np.cumsum(np.diff(edges)[rows])])
    index = to_device(torch.from_numpy(np.concatenate(ids)), batch.tokens.device)
    return {
        "sampling_mask": batch.sampling_mask.index_select(0, index),
        "sampling_mask_cu": to_device(torch.from_numpy(cuts), batch.tokens.device),
        "sampling_mask_edges": tuple(cuts.tolist()),
    }
