"""Advantages of tokens: per-token rewards in, [N] advantages out; with whitening and KL rewards."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from proxima.core.advantage.protocol import TokenAdvantage, TokenRewards, required
from proxima.core.segment import SequenceRows, segment_index
from proxima.data import require
from proxima.data.field_checks import check_choices


def reward_to_go(rewards: TokenRewards, gamma: float = 1.0) -> Tensor:
    """[N] G_t = Σ_{k ≥ t} γ^{k−t} r_k over the loss tokens of the sequence; 0 outside the loss."""
    rows = SequenceRows.of(rewards.loss_mask, rewards.cu_seqlens)
    return rows.packed(rows.suffix_sums(rewards.reward[rows.tokens].double(), gamma), rewards.reward)


EpsilonPlace = Literal["inside", "outside"]  # of the square root


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift: bool = True,
    epsilon: float = 1e-8,
    ddof: int = 1,
    place: EpsilonPlace = "inside",
) -> Tensor:
    """(x − mean) / sqrt(var + ε) over the masked tokens; 0 outside the mask.

    Args: values [N] float; mask [N] bool; `shift=False` adds the mean back; `place="outside"` divides by
        sqrt(var) + ε; `ddof` of the variance.
    Edge cases: fewer than two tokens are left unchanged (verl raises for none and warns for one).
    Source: verl, TRL, AReaL. Differs: verl leaves whitened garbage at masked positions (P18); AReaL's variance is
        biased (A7). Teaching notebooks of PPO often have `ddof=0, place="outside"`.
    """
    chosen = values[mask].double()
    if len(chosen) < 2:
        return torch.where(mask, values, 0.0)
    mean = chosen.mean()
    variance = chosen.var(correction=ddof)
    if place == "inside":
        scale = torch.rsqrt(variance + epsilon)
    else:
        scale = 1 / (variance.sqrt() + epsilon)
    added_back = 0.0 if shift else mean
    out = (values.double() - mean) * scale + added_back
    return torch.where(mask, out, 0.0).to(values.dtype)


def place_scores(score: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] zeros, with each sequence's score [S] on its last loss token; the score of a sequence without one is
    dropped."""
    index = segment_index(cu_seqlens, len(mask))
    last = torch.full((len(score),), -1, dtype=torch.long, device=mask.device)
    position = torch.arange(len(mask), device=mask.device)
    last = last.scatter_reduce(0, index[mask], position[mask], "amax")
    out = torch.zeros(len(mask), dtype=score.dtype, device=score.device)
    out[last[last >= 0]] = score[last >= 0]
    return out


def with_kl(reward: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """[N] r_t − coefficient · KL_t on the loss tokens: PPO's per-token reward. `kl` [N] nats, from `PENALTIES`."""
    return reward - torch.where(mask, coefficient * kl.detach(), 0.0)


@dataclass(frozen=True)
class Gae(TokenAdvantage):
    """Generalised advantage estimation with a critic.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        over loss tokens

    Args:
        gamma: discount, in [0, 1].
        lam: in [0, 1]; 1 is reward-to-go minus value, 0 one step.
        whiten: standardise the result over all loss tokens (see `whiten`).
        whiten_ddof: 0 or 1, of the variance.
        whiten_epsilon: where the 1e-8 is: `inside` the root, or `outside`.
        rewards: `reward`, `value` [N]; `bootstrap` [S] is V after the last token.
    Returns: [N] in the rewards' dtype, 0 outside the loss. `returns(rewards)` gives A + V before whitening, the
        critic's target.
    Raises: ValueError if `value` is missing.
    Edge cases: tokens outside the loss are skipped. A truncated completion bootstraps from `bootstrap`, others from 0.
    Source: arXiv 1506.02438, Eq. 16. verl `gae`, TRL PPOTrainer, AReaL.
    Differs: verl and TRL always bootstrap 0; verl whitens always and leaves garbage at masked positions (P18); TRL's
        recursion runs over padding (T20); AReaL works on masks shifted by one (A7).
    """

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    whiten_ddof: int = 1
    whiten_epsilon: EpsilonPlace = "inside"
    needs: ClassVar[frozenset[str]] = frozenset({"value"})

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "must be in [0, 1]")
        require(0 <= self.lam <= 1, "lam", self.lam, "must be in [0, 1]")
        require(self.whiten_ddof in (0, 1), "whiten_ddof", self.whiten_ddof, "must be 0 or 1")
        check_choices(self)

    def __call__(self, rewards: TokenRewards) -> Tensor:
        advantage = self._raw(rewards)
        if not self.whiten:
            return advantage
        return whiten(advantage, rewards.loss_mask, ddof=self.whiten_ddof, place=self.whiten_epsilon)

    def returns(self, rewards: TokenRewards) -> Tensor:
        """[N] A + V before whitening; 0 outside the loss."""
        zero = torch.zeros_like(rewards.reward)
        return self._raw(rewards) + torch.where(rewards.loss_mask, required(self, "value", rewards.value), zero)

    def _raw(self, rewards: TokenRewards) -> Tensor:
        rows = SequenceRows.of(rewards.loss_mask, rewards.cu_seqlens)
        value = required(self, "value", rewards.value).detach()[rows.tokens].double()
        beyond: Tensor | float = 0.0
        if rewards.bootstrap is not None:
            beyond = rewards.bootstrap[rows.row].double()
        after = torch.where(rows.column + 1 == rows.count[rows.row], beyond, value.roll(-1))
        delta = rewards.reward[rows.tokens].double() + self.gamma * after - value
        return rows.packed(rows.suffix_sums(delta, self.gamma * self.lam), rewards.reward)


@dataclass(frozen=True)
class ReinforcePp(TokenAdvantage):
    """REINFORCE++: the discounted reward-to-go, whitened over the loss tokens of the whole batch. No group, no critic.

        A_t = whiten(G_t)        G_t = sum_{k >= t} gamma^(k-t) r_k
        whiten: (x - mean) / sqrt(var + 1e-8), ddof = 1

    Args:
        gamma: discount, in [0, 1].
        rewards: `reward` [N], in the paper including −β KL; `loss_mask`, `cu_seqlens`.
    Returns: [N] in the rewards' dtype, 0 outside the loss.
    Source: arXiv 2501.03262. verl `reinforce_plus_plus` (P19). Differs: statistics are over the step, verl's over a
        rank.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "must be in [0, 1]")

    def __call__(self, rewards: TokenRewards) -> Tensor:
        return whiten(reward_to_go(rewards, self.gamma), rewards.loss_mask)


@dataclass(frozen=True)
class OptimalTokenBaseline(TokenAdvantage):
    """A baseline per position: the group's mean return, weighted by each completion's gradient variance so far.

        W_{i,t} = sum_{j <= t} v_{i,j}, v = 1 - 2 pi + sum pi^2        B_t = sum_i G_{i,t} W_{i,t} / sum_i W_{i,t}
        A = G - B

    Args:
        epsilon: added to the denominator, > 0.
        zero_tail: B is 0 beyond the second longest completion of a group, where one would be its own baseline.
        rewards: `reward`, `score_variance` [N] (times w^2 under importance weights w), `group` [S].
    Returns: [N], 0 outside the loss; positions count loss tokens. Raises: ValueError if a tensor is missing.
    Edge cases: a group of one has advantage 0 (verl: its raw return).
    Source: verl `optimal_token_baseline` with positions as its `tir_` variant packs them. Differs: in P16, P21.
    """

    epsilon: float = 1e-8
    zero_tail: bool = True
    needs: ClassVar[frozenset[str]] = frozenset({"group", "score_variance"})

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "must be > 0")

    def __call__(self, rewards: TokenRewards) -> Tensor:
        rows = SequenceRows.of(rewards.loss_mask, rewards.cu_seqlens)
        label, index = torch.unique(required(self, "group", rewards.group), return_inverse=True)
        returns = rows.suffix_sums(rewards.reward[rows.tokens].double())
        variance = required(self, "score_variance", rewards.score_variance).detach()[rows.tokens].double()
        energy = rows.prefix_sums(variance)
        longest = torch.zeros_like(label, dtype=torch.int64).scatter_reduce(0, index, rows.count, "amax")
        position = (longest.cumsum(0) - longest)[index][rows.row] + rows.column  # of the group, beside all others
        zeros = torch.zeros_like(returns)
        above = zeros.index_add(0, position, returns * energy)
        below = zeros.index_add(0, position, energy)
        running = zeros.index_add(0, position, zeros + 1)
        baseline = above / (below + self.epsilon)
        if self.zero_tail:
            baseline = torch.where(running > 1, baseline, 0.0)
        size = torch.bincount(index, minlength=len(label))[index]
        advantage = torch.where((size > 1)[rows.row], returns - baseline[position], 0.0)
        return rows.packed(advantage, rewards.reward)
