"""Keys and values of the running completions: one static block, one row a slot."""

import torch
from torch import Tensor

ROUND = 64  # capacity grows in steps of this many tokens


class KVCache:
    """layers[i]: [2, slots, H_kv, capacity, D], keys then values; row r holds positions 0 … of the completion in slot
    r.

    Running completions are rows 0 … n-1, so that a step reads them without a copy.

    Args:
        slots: rows; most completions that run at once.
        parts: 2 for keys and values; a decoder that keeps something else a position may say 1.
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
        """Make room for rows of `tokens`; what is there stays."""
        wanted = -(-tokens // ROUND) * ROUND
        if wanted <= self.capacity:
            return
        for i, held in enumerate(self.layers):
            grown = held.new_zeros(*self.shape[:3], wanted, self.shape[4])
            grown[:, :, :, : self.capacity] = held
            self.layers[i] = grown
        self.capacity = wanted

    def put(self, slots: Tensor, prompt: Tensor) -> None:
        """Copy one prompt's KV, [layers, 2, H_kv, P, D], into several rows."""
        length = prompt.shape[3]
        for i, held in enumerate(self.layers):
            held[:, slots, :, :length] = prompt[i][:, None]

    def move(self, source: int, target: int, length: int) -> None:
        """Row `source` becomes row `target`: the hole that a finished completion left is filled by the last running
        one."""
        for held in self.layers:
            held[:, target, :, :length] = held[:, source, :, :length]

    def write(self, layer: int, rows: Tensor, position: Tensor, kv: Tensor) -> None:
        """Put the new token's keys and values, [n, 2, H_kv, D], of `rows` [n] at `position` [n]."""
        for part, held in enumerate(self.layers[layer]):
            held[rows, :, position] = kv[:, part]

    def read(self, layer: int, rows: int, reach: int) -> tuple[Tensor, Tensor]:
        """Views [rows, H_kv, reach, D] of keys and values."""
        keys, values = self.layers[layer]
        return keys[:rows, :, :reach], values[:rows, :, :reach]
