"""A cache of the keys and values of prefixes that several requests share, so that they are computed once."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxima.data.columns import Ints
from proxima.data.flow import Prompt
from proxima.engine.local.decoder import Decoder

Beginning = tuple[bytes, int]  # name and number of the first tokens: rows with the same name have bit-identical KV


class KeptPrefixes:
    """Runs prompts and keeps the KV of prefixes that other requests share (`Prompt.opening`, `Request.shared`).

    A prompt is always run in parts that end at these lengths, whether the KV of the first ones is kept or not, and the
    same part after the same parts has the same bits. So a completion does not depend on what is kept, on memory or on
    timing; only its duration does.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[tuple[int, ...], bytes], Tensor] = {}  # the most recently used last
        self._loads = 0

    def find(self, tokens: Ints, shared: Sequence[int]) -> tuple[int, Tensor | None]:
        """The number of parts of a prompt that are kept, never covering all of its tokens, and their KV."""
        most, longest = 0, None
        for count in range(1, len(shared) + 1):
            key = _prefix_key(tokens, shared[:count])
            if shared[count - 1] < len(tokens) and (kv := self.kept.pop(key, None)) is not None:
                self.kept[key] = kv  # mark its shorter prefixes as used too: others may share them
                most, longest = count, kv
        return most, longest

    def beginnings(self, prompt: Prompt, shared: Sequence[int]) -> list[Beginning]:
        """The beginnings of a prompt's KV under the current weights, the longest first."""
        text, names, start = hashlib.blake2b(self._loads.to_bytes(8), digest_size=16), list[Beginning](), 0
        for end in dict.fromkeys((*shared, len(prompt.tokens))):
            text.update(end.to_bytes(8) + prompt.tokens[start:end].tobytes())
            names.append((text.digest(), start := end))
        return names[::-1]

    def missing(self, prompt: Prompt, shared: Sequence[int]) -> int:
        """Tokens of a prompt that `prefill` runs."""
        count, _ = self.find(prompt.tokens, shared)
        return len(prompt.tokens) - (shared[count - 1] if count else 0)

    def prefill(
        self, decoder: Decoder, prompts: Sequence[tuple[Prompt, Sequence[int]]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the last hidden state [D] and the KV [layers, 2, H_kv, P, D] of each prompt, given with its shared
        lengths."""
        prefixes = [self.find(prompt.tokens, shared) for prompt, shared in prompts]
        counts, kv = [count for count, _ in prefixes], [past for _, past in prefixes]
        hidden: list[Tensor] = [torch.empty(0)] * len(prompts)
        tokens = [prompt.tokens for prompt, _ in prompts]
        ends = [list(dict.fromkeys((*shared, len(prompt.tokens)))) for prompt, shared in prompts]
        while left := [i for i, own in enumerate(ends) if counts[i] < len(own)]:
            alike: dict[Any, list[int]] = {}  # prompts whose next part is the same, unless it ends a prompt
            for i in left:
                key = _prefix_key(tokens[i], ends[i][: counts[i] + 1]) if counts[i] + 1 < len(ends[i]) else i
                alike.setdefault(key, []).append(i)
            firsts = [own[0] for own in alike.values()]
            parts = [tokens[i][: ends[i][counts[i]]] for i in firsts]
            states = decoder.prefill(parts, [kv[i] for i in firsts])
            for own, state, whole in zip(alike.values(), *states, strict=True):
                for i in own:
                    hidden[i], kv[i] = state, whole
                    counts[i] += 1
                prompt, shared = prompts[own[0]]
                if counts[own[0]] <= len(shared):
                    self._keep(prompt, shared[: counts[own[0]]], whole)
        return hidden, [whole for whole in kv if whole is not None]

    def _keep(self, prompt: Prompt, shared: Sequence[int], kv: Tensor) -> None:
        key = _prefix_key(prompt.tokens, shared)
        if key not in self.kept:
            self.kept[key] = kv.contiguous()  # a view would keep the whole batch
        if sum(length > prompt.opening for length in shared) > 2:  # a later turn: its prefix is used only in this
            self.kept.pop(_prefix_key(prompt.tokens, shared[:-1]), None)  # conversation, the first turn's by a group

    def trim(self, most: int) -> None:
        """Evict the least recently used prefixes until at most `most` positions are kept."""
        excess = sum(kv.shape[3] for kv in self.kept.values()) - most
        while excess > 0:
            excess -= self.kept.pop(next(iter(self.kept))).shape[3]

    def clear(self) -> None:
        """Drop everything, as the weights have changed."""
        self.kept.clear()
        self._loads += 1


def _prefix_key(tokens: Ints, shared: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    return tuple(shared), tokens[: shared[-1]].tobytes()
