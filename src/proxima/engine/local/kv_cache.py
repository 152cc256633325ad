"""Keys and values: those of the running completions in one static tensor, and those of prefixes that requests share."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from proxima.data.columns import Ints
from proxima.data.flow import Prompt

ROUND = 64  # capacity grows in steps of this many tokens


class KVCache:
    """Keys and values of the running completions, one row per slot.

    layers[i]: [2, slots, H_kv, capacity, D], keys then values; row r holds positions 0 … of the completion in slot r.

    Running completions are rows 0 … n-1, so that a step reads them without a copy.

    Args:
        slots: rows; most completions that run at once.
        sizes: of what each layer has of a position: (2, H_kv, D), keys and values; 1 in place of 2 for a single tensor.
    `capacity`, tokens a row holds, starts at 0 and grows on `reserve`.
    `shift` [slots] int64: of each row, see `Decoder.shift`; None: 0 for all.
    `leaders` [2, slots] int64: for each row, another row with the same content at its first positions, and the number
    of these positions. Reading them from that row hits the processor's cache; the row's own copy would come from
    memory.
    """

    def __init__(
        self, layers: int, slots: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        parts, heads, dim = sizes
        self.layers = [torch.zeros(parts, slots, heads, 0, dim, dtype=dtype, device=device) for _ in range(layers)]
        self.capacity = 0
        self.device = device
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
        for side, tensor in enumerate(self.layers[layer]):
            tensor[rows, :, position] = kv[:, side]

    def read(self, layer: int, rows: int, reach: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [rows, H_kv, reach, D] of the first rows."""
        keys, values = self.layers[layer][:, :rows, :, :reach]
        return keys, values


Prefill = Callable[[Sequence[Ints], Sequence[Tensor | None]], tuple[Tensor, list[Tensor]]]
Beginning = tuple[bytes, int]  # name and number of the first tokens: rows with the same name have bit-identical KV


class PrefixCache:
    """Runs prompts and keeps the KV of prefixes that other requests share (`Prompt.shared_prefix`, `Request.shared`).

    A prompt is always run in parts that end at these lengths, whether the KV of the first ones is kept or not, and the
    same part after the same parts has the same bits. So a completion does not depend on what is kept, on memory or on
    timing; only its duration does.
    """

    def __init__(self) -> None:
        self.cached: dict[tuple[tuple[int, ...], bytes], Tensor] = {}  # the most recently used last
        self._loads = 0

    def find(self, tokens: Ints, shared: Sequence[int]) -> tuple[int, Tensor | None]:
        """The number of parts of a prompt that are kept, never covering all of its tokens, and their KV."""
        most = 0
        longest = None
        for count in range(1, len(shared) + 1):
            if shared[count - 1] >= len(tokens):
                continue
            key = _prefix_key(tokens, shared[:count])
            kv = self.cached.pop(key, None)
            if kv is not None:
                self.cached[key] = kv  # mark its shorter prefixes as used too: others may share them
                most = count
                longest = kv
        return most, longest

    def beginnings(self, prompt: Prompt, shared: Sequence[int]) -> list[Beginning]:
        """The beginnings of a prompt's KV under the current weights, the longest first."""
        text = hashlib.blake2b(self._loads.to_bytes(8), digest_size=16)
        names = list[Beginning]()
        start = 0
        for end in dict.fromkeys((*shared, len(prompt.tokens))):
            text.update(end.to_bytes(8) + prompt.tokens[start:end].tobytes())
            names.append((text.digest(), end))
            start = end
        return names[::-1]

    def missing(self, prompt: Prompt, shared: Sequence[int]) -> int:
        """Tokens of a prompt that `prefill` runs."""
        count, _ = self.find(prompt.tokens, shared)
        kept = shared[count - 1] if count else 0
        return len(prompt.tokens) - kept

    def prefill(
        self, run: Prefill, prompts: Sequence[tuple[Prompt, Sequence[int]]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last hidden state [D] and the KV [layers, 2, H_kv, P, D] of each prompt, given with its shared
        lengths. `run`: `Decoder.prefill`."""
        counts = list[int]()  # parts that each has
        kv = list[Tensor | None]()
        for prompt, shared in prompts:
            count, past = self.find(prompt.tokens, shared)
            counts.append(count)
            kv.append(past)
        hidden: list[Tensor] = [torch.empty(0)] * len(prompts)
        tokens = [prompt.tokens for prompt, _ in prompts]
        ends = [list(dict.fromkeys((*shared, len(prompt.tokens)))) for prompt, shared in prompts]
        while unfinished := [i for i, lengths in enumerate(ends) if counts[i] < len(lengths)]:
            alike: dict[object, list[int]] = {}  # prompts whose next part is the same, unless it ends a prompt
            for i in unfinished:
                next_ends = ends[i][: counts[i] + 1]
                ends_prompt = len(next_ends) == len(ends[i])
                key: object = i if ends_prompt else _prefix_key(tokens[i], next_ends)
                alike.setdefault(key, []).append(i)
            firsts = [group[0] for group in alike.values()]
            parts = [tokens[i][: ends[i][counts[i]]] for i in firsts]
            states = run(parts, [kv[i] for i in firsts])
            for group, state, complete in zip(alike.values(), *states, strict=True):
                for i in group:
                    hidden[i] = state
                    kv[i] = complete
                    counts[i] += 1
                prompt, shared = prompts[group[0]]
                if counts[group[0]] <= len(shared):
                    self._keep(prompt, shared[: counts[group[0]]], complete)
        return hidden, [complete for complete in kv if complete is not None]

    def _keep(self, prompt: Prompt, shared: Sequence[int], kv: Tensor) -> None:
        key = _prefix_key(prompt.tokens, shared)
        if key not in self.cached:
            self.cached[key] = kv.contiguous()  # a view would keep the whole batch
        if sum(length > prompt.shared_prefix for length in shared) > 2:  # a later turn: its prefix is used only in this
            self.cached.pop(_prefix_key(prompt.tokens, shared[:-1]), None)  # conversation, the first turn's by a group

    def trim(self, most: int) -> None:
        """Evict the least recently used prefixes until at most `most` positions are kept."""
        excess = sum(kv.shape[3] for kv in self.cached.values()) - most
        while excess > 0:
            excess -= self.cached.pop(next(iter(self.cached))).shape[3]

    def clear(self) -> None:
        """Drop everything, as the weights have changed."""
        self.cached.clear()
        self._loads += 1


def _prefix_key(tokens: Ints, shared: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    return tuple(shared), tokens[: shared[-1]].tobytes()
