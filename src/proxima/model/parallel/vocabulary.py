"""Log-probs over a vocabulary whose rows are split over ranks: each rank's results for its own tokens are combined by
exchanging a few numbers per position. No rank sees another's logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional as F

from proxima.model.kept_tokens import KeptTokens
from proxima.model.logit_rows import row_blocks


@dataclass(frozen=True)
class VocabularyPart:
    """The rows start … start + size - 1 of the head, on one rank of a group that has them all. Methods marked
    collective are called by each rank, with tensors of the same shape."""

    group: Any
    start: int
    size: int

    @classmethod
    def of(cls, weight: DTensor) -> "VocabularyPart":
        """The part of a head [V, D] that is split over the ranks of a mesh."""
        shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        return cls(weight.device_mesh.get_group(), offset[0], shape[0])

    def has(self, token: int) -> bool:
        """True if the token belongs to this rank."""
        return self.start <= token < self.start + self.size

    def owned(self, ids: Tensor) -> Tensor:
        """True for the tokens that belong to this rank."""
        return (ids >= self.start) & (ids < self.start + self.size)

    def local(self, ids: Tensor) -> Tensor:
        """The row of each token on this rank; an arbitrary row for a token of another rank."""
        return (ids - self.start).clamp(0, self.size - 1)

    def rows_of(self, target: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`local` of both."""
        return self.local(target), None if others is None else self.local(others)

    def kept(self, kept: KeptTokens) -> KeptTokens:
        """The tokens that could be sampled and belong to this rank."""
        own = self.owned(kept.ids)
        before = torch.cat([own.new_zeros(1, dtype=torch.int64), own.cumsum(0)])
        return KeptTokens(kept.ids[own] - self.start, before[kept.cu], source=kept)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks; collective."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def logsumexp(self, values: Tensor) -> Tensor:
        """log Σ exp(value) over the ranks; collective. -inf stands for no value, and some rank must have one."""
        top = values.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        return top + self.sum((values - top).exp()).log()

    def values_of(self, ids: Tensor, values: Tensor) -> Tensor:
        """The value of each token, from the rank that has it; collective."""
        return self.sum(values.where(self.owned(ids), 0.0))

    def log_prob(
        self, log_z: Tensor, kept_z: Tensor, log_prob: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine each rank's results for its own tokens: log Z, log Z of the tokens that could be sampled (the same
        tensor where all could), and the log-probs of the targets; collective."""
        every = self.logsumexp(log_z)
        kept = every if kept_z is log_z else self.logsumexp(kept_z)
        return every, kept, self.values_of(target, log_prob + kept_z) - kept

    def entropy(self, entropy: Tensor, log_z: Tensor, whole: Tensor) -> Tensor:
        """H = Σ_r w_r (H_r - log w_r), from each rank's entropy H_r of its own tokens; collective.

        Args:
            log_z, whole: of this rank's tokens, and of all: log w_r = log_z - whole.
        """
        share = log_z - whole
        return self.sum(share.exp() * (entropy - share))

    def top_tokens(
        self,
        head: tuple[Tensor, Tensor, Tensor | None],
        target: Tensor,
        temperature: Tensor,
        sizes: tuple[int, int | None, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `top_k_log_prob`; collective.

        Args:
            head: hidden states, weight and bias, in the dtype of their product.
            sizes: its k, vocabulary and chunk.
        """
        (hidden, weight, bias), (k, vocabulary, chunk) = head, sizes
        within = self.size if vocabulary is None else min(max(0, vocabulary - self.start), self.size)
        own, near = min(k, within), self.local(target)
        exact = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        log_z, chosen = torch.empty_like(exact), torch.empty_like(exact)
        ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
        top = exact.new_full((len(hidden), k), -torch.inf)
        for at in range(0, len(hidden), chunk):
            cut = slice(at, at + chunk)
            for rows, logits in row_blocks(F.linear(hidden[cut], weight, bias), temperature[cut]):
                largest = logits[:, :within].topk(own, dim=1)
                ids[cut][rows, :own], top[cut][rows, :own] = largest.indices + self.start, largest.values
                chosen[cut][rows] = logits.gather(1, near[cut][rows, None]).squeeze(1)
                log_z[cut][rows] = logits.logsumexp(1)
        log_z = self.logsumexp(log_z)
        top, ids = self.largest(top, ids, k)
        return self.values_of(target, chosen) - log_z, ids, top - log_z[:, None]

    def largest(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[N, k] the largest of all ranks' values [N, k], by falling value, and their tokens; collective."""
        every = [[torch.empty_like(part) for _ in range(dist.get_world_size(self.group))] for part in (values, ids)]
        for parts, own in zip(every, (values, ids), strict=True):
            dist.all_gather(parts, own.contiguous(), group=self.group)
        top = torch.cat(every[0], 1).topk(k, dim=1)
        return top.values, torch.cat(every[1], 1).gather(1, top.indices)
