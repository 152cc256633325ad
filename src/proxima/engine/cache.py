"""Keys and values: of the running completions one static tensor, one row per slot; and those of turns that ended."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from proxima.data.columns import Ints

if TYPE_CHECKING:
    from proxima.engine.protocol import Request

ROUND = 64  # capacity grows in steps of this many tokens


class KVCache:
    """layers[i]: [2, slots, H_kv, capacity, D], keys then values; row r holds positions 0 … of the completion in slot
    r.

    Running completions are rows 0 … n-1, so that a step reads them without a copy.

    Args:
        slots: rows; most completions that run at once.
        parts: 2 for keys and values; 1 for a decoder that keeps a single tensor per position.
    `capacity`, tokens a row holds, starts at 0 and grows on `reserve`.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        parts: int = 2,
    ) -> None:
        self.shape = (parts, slots, heads, 0, head_dim)
        self.layers = [torch.zeros(self.shape, dtype=dtype, device=device) for _ in range(layers)]
        self.capacity, self.device = 0, device

    def reserve(self, tokens: int) -> None:
        """Make room for rows of `tokens`; the content stays."""
        capacity = -(-tokens // ROUND) * ROUND
        if capacity <= self.capacity:
            return
        for i, layer in enumerate(self.layers):
            grown = layer.new_zeros(*self.shape[:3], capacity, self.shape[4])
            grown[:, :, :, : self.capacity] = layer
            self.layers[i] = grown
        self.capacity = capacity

    def put(self, slots: Tensor, prompt: Tensor) -> None:
        """Copy one prompt's KV, [layers, 2, H_kv, P, D], into several rows."""
        length = prompt.shape[3]
        for i, layer in enumerate(self.layers):
            layer[:, slots, :, :length] = prompt[i][:, None]

    def take(self, slot: int, length: int) -> Tensor:
        """A copy of a row's first positions, [layers, 2, H_kv, length, D], as `put` takes it."""
        return torch.stack([layer[:, slot, :, :length] for layer in self.layers])

    def move(self, source: int, target: int, length: int) -> None:
        """Copy row `source` to row `target`: the last running completion takes the slot of a finished one."""
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def write(self, layer: int, rows: Tensor, position: Tensor, kv: Tensor) -> None:
        """Put the new token's keys and values, [n, 2, H_kv, D], of `rows` [n] at `position` [n]."""
        for part, held in enumerate(self.layers[layer]):
            held[rows, :, position] = kv[:, part]

    def read(self, layer: int, rows: "int | Tensor", reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, H_kv, reach, D]: views of the first `rows`, copies of these [n]."""
        own = slice(rows) if isinstance(rows, int) else rows
        keys, values = self.layers[layer][:, :, :, :reach]
        return keys[own], values[own]


class KeptTurns:
    """KV of turns that ended, for the next turn of the same conversation: it begins with the same tokens, and only the
    rest is run. Kept until then, or until the weights change, or until `most` later ones are kept: a conversation that
    comes back after that is run whole, with the rounding of a prefill.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[tuple[int, int], tuple[Ints, Tensor]] = {}

    def keep(self, request: "Request", tokens: Ints, kv: Tensor) -> None:
        """After `tokens` were sampled, the last of which was not run."""
        self._kept[request.prompt.uid, request.sample] = np.concatenate([request.prompt.tokens, tokens]), kv
        if len(self._kept) > self.most:
            del self._kept[next(iter(self._kept))]

    def take(self, request: "Request") -> Tensor | None:
        """The KV of the first tokens of a request's prompt; None where it begins otherwise."""
        if not request.turn:
            return None
        seen, kv = self._kept.pop((request.prompt.uid, request.sample), (None, None))
        prompt = request.prompt.tokens
        same = seen is not None and len(seen) <= len(prompt) and np.array_equal(seen, prompt[: len(seen)])
        return kv if same else None

    def clear(self) -> None:
        """The weights have changed."""
        self._kept.clear()
