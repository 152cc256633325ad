"""Log-probs over a vocabulary whose rows are split over ranks: each rank's results for its own tokens are combined by
exchanging a few numbers per position. No rank sees another's logits."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from proxima.model.kept_tokens import KeptTokens
from proxima.model.parallel.exchange import add_parts
from proxima.model.parallel.sharded import local_part


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
        local, offset = local_part(weight)
        return cls(weight.device_mesh.get_group(), offset[0], len(local))

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
        return add_parts(values, self.group)

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

    def largest(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[N, k] the largest of all ranks' values [N, k], by falling value, and their tokens; collective."""
        every = [[torch.empty_like(part) for _ in range(dist.get_world_size(self.group))] for part in (values, ids)]
        for parts, own in zip(every, (values, ids), strict=True):
            dist.all_gather(parts, own.contiguous(), group=self.group)
        top = torch.cat(every[0], 1).topk(k, dim=1)
        return top.values, torch.cat(every[1], 1).gather(1, top.indices)
