"""Keys and values of the running completions: one static tensor, one row per slot."""

import torch
from torch import Tensor
from torch.nn import functional as F

ROUND = 64  # capacity grows in steps of this many tokens


class KVCache:
    """layers[i]: [2, slots, H_kv, capacity, D], keys then values; row r holds positions 0 … of the completion in slot
    r.

    Running completions are rows 0 … n-1, so that a step reads them without a copy.

    Args:
        slots: rows; most completions that run at once.
        held: of each position, by each layer: (2, H_kv, D), keys and values; 1 in place of 2 for a single tensor.
    `capacity`, tokens a row holds, starts at 0 and grows on `reserve`.
    `shift` [slots] int64: of each row, see `Decoder.shift`; None: 0 for all.
    `leaders` [2, slots] int64: for each row, another row with the same content at its first positions, and the number
    of these positions. Reading them from that row hits the processor's cache; the row's own copy would come from
    memory.
    """

    def __init__(
        self, layers: int, slots: int, held: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        parts, heads, dim = held
        self.layers = [torch.zeros(parts, slots, heads, 0, dim, dtype=dtype, device=device) for _ in range(layers)]
        self.capacity, self.device = 0, device
        self.shift: Tensor | None = None
        self.leaders = torch.zeros(2, slots, dtype=torch.int64)

    def reserve(self, tokens: int) -> None:
        """Make room for rows of `tokens`; the content stays."""
        capacity = -(-tokens // ROUND) * ROUND
        if capacity <= self.capacity:
            return
        for i, layer in enumerate(self.layers):
            self.layers[i] = F.pad(layer, (0, 0, 0, capacity - self.capacity))
        self.capacity = capacity

    def put(self, slots: Tensor, prompt: Tensor, shift: int = 0) -> None:
        """Copy one prompt's KV, [layers, 2, H_kv, P, D], into several rows."""
        if shift and self.shift is None:
            self.shift = torch.zeros(self.leaders.shape[1], dtype=torch.int64, device=self.device)
        if self.shift is not None:
            self.shift[slots] = shift
        length = prompt.shape[3]
        for i, layer in enumerate(self.layers):
            layer[:, slots, :, :length] = prompt[i][:, None]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy row `source` to row `target`: the last running completion takes the slot of a finished one."""
        if self.shift is not None:
            self.shift[target] = self.shift[source]
        for layer in self.layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def write(self, layer: int, rows: Tensor, position: Tensor, kv: Tensor) -> None:
        """Write the new token's keys and values, [n, 2, H_kv, D], of `rows` [n] at `position` [n]."""
        for side, held in enumerate(self.layers[layer]):
            held[rows, :, position] = kv[:, side]

    def read(self, layer: int, rows: int, reach: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [rows, H_kv, reach, D] of the first rows."""
        keys, values = self.layers[layer][:, :rows, :, :reach]
        return keys, values
