"""Keys and values: of the running completions one static tensor, one row per slot; and those of shared prefixes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.data.columns import Ints

if TYPE_CHECKING:
    from proxima.engine.decoder import Decoder

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


class KeptPrefixes:
    """Runs prompts, and keeps the KV of beginnings that other requests share (`Request.shared`).

    A prompt is run in the parts that these lengths make, whether the KV of the first ones is kept or not, and the same
    part after the same parts has the same bits. So nothing that a completion is depends on what is kept, on the memory
    or on the moment; only how long it takes does.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], bytes], Tensor] = {}  # the last used last
        self.positions = 0

    def find(self, tokens: Ints, shared: Sequence[int]) -> tuple[int, Tensor | None]:
        """How many parts of a prompt are kept, never all of its tokens, and their KV."""
        for count in range(len(shared), 0, -1):
            key = _prefix_key(tokens, shared[:count])
            if shared[count - 1] < len(tokens) and (kv := self._kept.pop(key, None)) is not None:
                self._kept[key] = kv
                return count, kv
        return 0, None

    def missing(self, tokens: Ints, shared: Sequence[int]) -> int:
        """Tokens of a prompt that `prefill` runs."""
        count, _ = self.find(tokens, shared)
        return len(tokens) - (shared[count - 1] if count else 0)

    def prefill(
        self, decoder: "Decoder", prompts: Sequence[tuple[Ints, Sequence[int]]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The last hidden state [D] and the KV [layers, 2, H_kv, P, D] of prompts, each given with its `shared`."""
        found = [self.find(*prompt) for prompt in prompts]
        counts, kv = [count for count, _ in found], [past for _, past in found]
        hidden: list[Tensor] = [torch.empty(0)] * len(prompts)
        kept = [shared if decoder.takes_past else () for _, shared in prompts]
        ends = [list(dict.fromkeys((*own, len(tokens)))) for own, (tokens, _) in zip(kept, prompts, strict=True)]
        while left := [i for i, own in enumerate(ends) if counts[i] < len(own)]:
            parts = [prompts[i][0][: ends[i][counts[i]]] for i in left]
            for i, state, whole in zip(left, *decoder.prefill(parts, [kv[i] for i in left]), strict=True):
                hidden[i], kv[i] = state, whole
                counts[i] += 1
                if counts[i] <= len(kept[i]):
                    self._keep(prompts[i][0], kept[i][: counts[i]], whole)
        return hidden, [whole for whole in kv if whole is not None]

    def _keep(self, tokens: Ints, shared: Sequence[int], kv: Tensor) -> None:
        key = _prefix_key(tokens, shared)
        if key not in self._kept:
            self._kept[key] = kv.contiguous()  # a view would keep the whole batch
            self.positions += shared[-1]
        if len(shared) > 2:  # what it continues was of this conversation alone; the opening is of several
            self._forget(_prefix_key(tokens, shared[:-1]))

    def _forget(self, key: tuple[tuple[int, ...], bytes]) -> None:
        if (kv := self._kept.pop(key, None)) is not None:
            self.positions -= kv.shape[3]

    def trim(self, most: int) -> None:
        """Forget what was not used for longest, until no more than `most` positions are kept."""
        while self.positions > most:
            self._forget(next(iter(self._kept)))

    def clear(self) -> None:
        """The weights have changed."""
        self._kept.clear()
        self.positions = 0


def _prefix_key(tokens: Ints, shared: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    return tuple(shared), tokens[: shared[-1]].tobytes()
