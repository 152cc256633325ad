"""Advantages of turns: rewards of the tokens of episodes in, [N] advantages out, the same for all tokens of a turn."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.advantage.group import Grpo, Rloo
from proxima.core.advantage.protocol import TokenAdvantage, TokenRewards, required
from proxima.core.segment import segment_index, suffix_sums
from proxima.data import require
from proxima.data.field_checks import check_choices
from proxima.data.outcomes import Outcomes


@dataclass(frozen=True)
class _TurnTable:
    """The turns of S episodes as a table [S, K], K the largest number of turns.

    Args:
        reward: [S, K] reward units, of each turn; 0 where there is none.
        reached: [S, K] bool, the turn has a loss token.
        counts: [S] bool, the episode has a loss token, or a score without acting, which is then its return.
        group: [S] int64.
        tokens, row, column: [n] int64, the loss tokens, and the place of each in the table.
    """

    reward: Tensor
    reached: Tensor
    counts: Tensor
    group: Tensor
    tokens: Tensor
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, spec: TokenAdvantage, rewards: TokenRewards) -> "_TurnTable":
        mask = rewards.loss_mask
        group = required(spec, "group", rewards.group)
        tokens = mask.nonzero().flatten()
        row = segment_index(rewards.cu_seqlens, len(mask))[tokens]
        column = required(spec, "turn", rewards.turn)[tokens].long()
        turns = 0
        if len(column):
            turns = int(column.max()) + 1
        reward = rewards.reward.new_zeros(len(group), turns)
        reached = mask.new_zeros(len(group), turns)
        reward.index_put_((row, column), rewards.reward[tokens], accumulate=True)
        reached[row, column] = True
        counts = reached.any(1)
        if rewards.idle is not None and turns:
            is_idle = rewards.idle.isfinite()
            reward[is_idle, 0] = rewards.idle[is_idle]
            counts = counts | is_idle
        return cls(reward, reached, counts, group.long(), tokens, row, column)

    def returns(self, gamma: float) -> Tensor:
        """[S, K] Σ_{l ≥ k} γ^(l−k) r_l; after an episode has ended, the value of its last turn."""
        width = self.reward.shape[1]
        if not width:
            return self.reward
        column = torch.arange(width, device=self.reward.device)
        last = torch.where(self.reached, column, 0).amax(1, keepdim=True)
        return suffix_sums(self.reward, gamma).gather(1, torch.minimum(column, last))

    def compared(self, values: Tensor, valid: Tensor) -> Outcomes:
        """`values` [S, K] as outcomes [S · K]: a turn is compared with the same turn of its group's other episodes."""
        label = self.group.unique(return_inverse=True)[1][:, None] * values.shape[1]
        index = label + torch.arange(values.shape[1], device=values.device)
        return Outcomes.of(values.flatten(), index.flatten(), valid.flatten())

    def of_tokens(self, advantage: Tensor, like: Tensor) -> Tensor:
        """[N] the advantage [S, K] of each loss token's turn; 0 outside the loss."""
        out = torch.zeros_like(like)
        out[self.tokens] = advantage[self.row, self.column].to(like.dtype)
        return out


@dataclass(frozen=True)
class TurnReturns(TokenAdvantage):
    """The return from a turn on, minus what the other episodes of the group returned from that turn on.

        G_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}        A_{i,k} = G_{i,k} - mean_{j != i} G_{j, min(k, K_j)}

    r_{i,l} is the reward of turn l of episode i, K_j the last turn of episode j. The baseline of a turn is computed
    from other episodes alone; those that have ended contribute their last return. So it adds no bias, whoever decides
    when to stop. The biased form compares the reward of each turn with the mean reward of the other episodes at that
    turn, and then adds up the differences:

        biased_per_turn:  A_{i,k} = sum_{l >= k} gamma^(l-k) (r_{i,l} - mean_{j != i, K_j >= l} r_{j,l})

    An episode subtracts one mean per turn, so each further turn costs the mean reward of that turn. A policy that
    chooses when to stop learns to avoid that cost. With p_l the probability that turn l is reached, m_l its
    mean reward, and many episodes, the gradient is that of J minus sum_{l >= 1} m_l grad p_l; docs/bias.md has numbers.

    Args:
        gamma: discount of a turn, in [0, 1].
        baseline: `leave_one_out`, which is unbiased; or `biased_per_turn`, for comparison.
        rewards: `reward`, `turn` [N], `group` [S].
    Returns: [N] in the rewards' dtype, reward units, 0 outside the loss. Raises: ValueError if a tensor is missing.
    Edge cases: episodes of one turn: `rloo`, to the bit; so it is for gamma 1 and a reward only at the end. A group of
        one episode, or of equal returns from a turn on: 0. An episode without a loss token is in no mean.
    Source: the leave-one-out baseline (RLOO, arXiv 2402.14740) for the return from a turn on. `biased_per_turn` is the
        comparison per turn of MT-GRPO, arXiv 2505.11821, added up over turns; its bias: verl issue 7244.
    Differs: MT-GRPO divides by standard deviations, and its means include the episode itself.
    """

    gamma: float = 1.0
    baseline: Literal["leave_one_out", "biased_per_turn"] = "leave_one_out"
    needs: ClassVar[frozenset[str]] = frozenset({"group", "turn"})

    def __post_init__(self) -> None:
        check_choices(self)
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "must be in [0, 1]")

    def __call__(self, rewards: TokenRewards) -> Tensor:
        turns = _TurnTable.of(self, rewards)
        if self.baseline == "leave_one_out":
            counts = turns.counts[:, None].expand_as(turns.reached)
            advantage = Rloo()(turns.compared(turns.returns(self.gamma), counts)).view_as(turns.reward)
        else:
            centred = Rloo()(turns.compared(turns.reward, turns.reached)).view_as(turns.reward)
            advantage = suffix_sums(centred, self.gamma)
        return turns.of_tokens(advantage, rewards.reward)


@dataclass(frozen=True)
class Gigpo(TokenAdvantage):
    """Compare an episode with its group, and each of its turns with those that began in the same state.

        A_{i,k} = A^E_i + weight A^S_{i,k}        A^E = (R_i - mean_group R) / F        R_i = sum_k r_{i,k}
        A^S = (G_{i,k} - mean_state G) / F        G_{i,k} = sum_{l >= k} gamma^(l-k) r_{i,l}

    The turns of a state are those of all episodes of the group, whatever their number. F is 1, or the standard
    deviation of the returns that the mean is over.

    Args:
        gamma: discount of a turn, in [0, 1].
        weight: of A^S, >= 0; omega in the paper.
        scale: F is 1 for `none`, and the standard deviation (ddof = 1) plus epsilon for `group`.
        epsilon: added to the standard deviation, > 0.
        rewards: `reward`, `turn`, `state` [N], `group` [S]. A state is the environment's name for it (`Reply.state`),
            or else the tokens of the last observation; before the first turn it is the prompt.
    Returns: [N] in the rewards' dtype, 0 outside the loss. Raises: ValueError if a tensor is missing.
    Edge cases: a turn that is alone in its state has A^S = 0, and so have turns of a state with equal returns. Weight
        0: `grpo`, to the bit. Episodes of one turn: 1 + weight times `grpo`. One without a loss token is in no mean.
    Source: GiGPO, arXiv 2505.10978, Eq. 3 to 8; gamma .95, weight 1 and `scale: none` as in its code (verl-agent).
    Differs: verl-agent takes the mean of A^E over turns, so that a long episode counts for more, and gives a group of
        one its raw return (P16); it can also merge states that are similar.
    """

    gamma: float = 0.95
    weight: float = 1.0
    scale: Literal["none", "group"] = "none"
    epsilon: float = 1e-6
    needs: ClassVar[frozenset[str]] = frozenset({"group", "turn", "state"})

    def __post_init__(self) -> None:
        Grpo(self.scale, self.epsilon)  # checks both
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "must be in [0, 1]")
        require(0 <= self.weight < float("inf"), "weight", self.weight, "must be >= 0 and finite")

    def __call__(self, rewards: TokenRewards) -> Tensor:
        turns = _TurnTable.of(self, rewards)
        relative = Grpo(self.scale, self.epsilon)
        of_episode = relative(Outcomes.of(turns.reward.sum(1), turns.group, turns.counts))
        state = torch.zeros_like(turns.reached, dtype=torch.long)
        state[turns.row, turns.column] = required(self, "state", rewards.state)[turns.tokens].long()
        pairs = torch.stack([turns.group[:, None].expand_as(state), state], -1)[turns.reached]
        label = pairs.unique(dim=0, return_inverse=True)[1]
        of_turn = torch.zeros_like(turns.reward)
        of_turn[turns.reached] = relative(Outcomes.of(turns.returns(self.gamma)[turns.reached], label))
        return turns.of_tokens(of_episode[:, None] + self.weight * of_turn, rewards.reward)
