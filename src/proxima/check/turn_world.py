"""A small world of turns: the model acts, gets a reward, and decides whether to take another turn."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from proxima.check.enumerable_world import EnumerableWorld
from proxima.core.advantage import TokenRewards
from proxima.core.segment import segment_index, segment_sum
from proxima.data import PolicyBatch


@dataclass(frozen=True)
class TurnWorld(EnumerableWorld):
    """A world in which each token is a turn; at most two turns unless `horizon` says otherwise.

        J(π) = Σ_y π(y) Σ_k r(y_1 … y_k)

    Token 0 is the last turn of an episode, so the policy chooses when to stop. The observation after a turn is a
    function of the turns so far, which are the state. A per-token advantage gets `TokenRewards`, a per-completion one
    `Outcomes`.
    """

    horizon: int = 2

    @cached_property
    def turn(self) -> Tensor:
        """[N] int64, the number of each token's turn."""
        return self.depth[self.row]

    @cached_property
    def turn_reward(self) -> Tensor:
        """[N] float64 in [0, 1], one for each state and action: the same in all episodes that begin with them."""
        size = (len(self.prefixes), self.vocabulary)
        table = torch.rand(size, generator=self._generator(0), dtype=torch.float64)
        return table[self.row, self.token]

    @cached_property
    def reward(self) -> Tensor:
        """[S] float64, the sum over the turns."""
        return segment_sum(self.turn_reward, self.cu_seqlens)

    def token_advantage(self, advantage: Callable[[Any], Tensor], chosen: Tensor, own: PolicyBatch) -> Tensor:
        if not getattr(advantage, "per_token", False):
            return super().token_advantage(advantage, chosen, own)
        starts = self.cu_seqlens[chosen]
        index = segment_index(own.cu_seqlens, len(own))
        at = starts[index] + torch.arange(len(own)) - own.cu_seqlens[index]
        return advantage(
            TokenRewards(
                reward=self.turn_reward[at],
                loss_mask=own.loss_mask,
                cu_seqlens=own.cu_seqlens,
                group=torch.zeros_like(chosen),
                turn=self.turn[at],
                state=self.row[at],
            )
        )

    def bias_per_turn(self, policy: Tensor, group_size: int) -> Tensor:
        """[P, V] the bias of the expected gradient of `turn_returns` with `biased_per_turn` and gamma 1, its difference
        from ∇J, in closed form.

            Σ_k q_k (∇E[r_k; k reached] − m_k ∇p_k) − ∇J        p_k = P(k reached)        m_k = E[r_k | k reached]
            q_k = 1 − (1 − p_k)^(G − 1)        q_0 = 1

        q_k is the probability that another episode of the group reaches the turn; without one, the turn has no
        advantage. With many episodes, q_k = 1, the bias is −Σ_{k ≥ 1} m_k ∇p_k.
        """
        leaf = policy.detach().requires_grad_()
        likelihood = self.probability(self.log_prob(leaf))[segment_index(self.cu_seqlens, len(self.row))]
        total = -(likelihood * self.turn_reward).sum()
        for k in range(self.horizon):
            here = self.turn == k
            reached, paid = likelihood[here].sum(), (likelihood * self.turn_reward)[here].sum()
            others = 1 - (1 - reached.detach()) ** (group_size - 1)
            total = total + others * (paid - (paid / reached).detach() * reached)
        return torch.autograd.grad(total, leaf)[0]
