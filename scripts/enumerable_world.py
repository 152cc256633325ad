"""Worlds so small that expectations are exact sums: the gradient, bias and spread of any loss (docs/bias.md)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, product
from math import factorial, prod
from typing import Any

import torch
from torch import Tensor

from proxima.core import TokenRewards
from proxima.core.segment import segment_index, segment_sum
from proxima.data import require
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch

BatchLoss = Callable[[PolicyBatch], Tensor]
STOP = 0


@dataclass(frozen=True)
class GradientMoments:
    """Moments of the gradient of one batch: its expectation [P, V], and its standard deviation sqrt(E|g − E g|²)."""

    mean: Tensor
    std: float


@dataclass(frozen=True)
class EnumerableWorld:
    """All completions of one prompt, with a tabular policy: one row of logits for each prefix.

        J(π) = Σ_y π(y) R(y)        E_μ[g] = Σ over batches of completions, of probability times gradient

    A completion ends with token 0 or at the horizon, so lengths differ and early tokens determine which later ones are
    reached. Rewards and logits are drawn from the seed. A policy is given by its logits, [P, V] float64.

    Args:
        vocabulary: V, the number of tokens including the end token, >= 2.
        horizon: T, the maximum length, >= 1. There are P = Σ_{t<T} (V − 1)^t prefixes.
        seed: the seed of rewards and logits.
    Edge cases: `moments` with groups of size G enumerates C(S + G − 1, G) batches for S completions; the defaults have
        S = 31.
    """

    vocabulary: int = 3
    horizon: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.vocabulary >= 2, "vocabulary", self.vocabulary, "must be >= 2: the end token and another")
        require(self.horizon >= 1, "horizon", self.horizon, "must be >= 1")

    @cached_property
    def completions(self) -> list[tuple[int, ...]]:
        """The S completions as token ids; all [S] tensors have this order."""
        ended = [(*prefix, STOP) for prefix in self.prefixes]
        return ended + list(product(range(1, self.vocabulary), repeat=self.horizon))

    @cached_property
    def prefixes(self) -> dict[tuple[int, ...], int]:
        """The prefixes that a token may follow, with their rows in the policy."""
        words = range(1, self.vocabulary)
        return {p: i for i, p in enumerate(p for t in range(self.horizon) for p in product(words, repeat=t))}

    @cached_property
    def depth(self) -> Tensor:
        """[P] int64, the length of each prefix."""
        return torch.tensor([len(prefix) for prefix in self.prefixes])

    @cached_property
    def row(self) -> Tensor:
        """[N] int64, the row of the prefix before each token, over all completions in order."""
        return torch.tensor([self.prefixes[y[:t]] for y in self.completions for t in range(len(y))])

    @cached_property
    def token(self) -> Tensor:
        """[N] int64, the tokens of all completions in order."""
        return torch.tensor([token for y in self.completions for token in y])

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[S+1] int64, the boundaries of the completions."""
        return torch.tensor([0, *(len(y) for y in self.completions)]).cumsum(0)

    @cached_property
    def reward(self) -> Tensor:
        """[S] float64 in [-1, 1], the reward of each completion."""
        return 2 * torch.rand(len(self.completions), generator=self._generator(0), dtype=torch.float64) - 1

    def policy(self, index: int, spread: float = 1.0) -> Tensor:
        """[P, V] logits of one of many random policies, normal with standard deviation `spread`."""
        size = (len(self.prefixes), self.vocabulary)
        return spread * torch.randn(size, generator=self._generator(1 + index), dtype=torch.float64)

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.seed + stream)

    def log_prob(self, policy: Tensor) -> Tensor:
        """[N] nats, of each token of all completions."""
        return policy.log_softmax(-1)[self.row, self.token]

    def top_k(self, policy: Tensor, behavior: Tensor, k: int) -> dict[str, Tensor]:
        """The fields of a batch, [N, k], with the behavior policy's k most probable tokens at each position; `policy`
        and `behavior` are logits."""
        current, sampled_from = (logits.log_softmax(-1)[self.row] for logits in (policy, behavior.detach()))
        top = sampled_from.topk(k, dim=-1)
        fields = {"top_k": top.indices, "behavior_top_k_log_prob": top.values}
        return fields | {"top_k_log_prob": current.gather(1, top.indices)}

    def mixed_log_prob(self, versions: Sequence[Tensor], switches: Sequence[int]) -> Tensor:
        """[N] nats, where version i + 1 takes over at position `switches[i]`, as after a weight update in flight."""
        position = self.depth[self.row]
        version = torch.stack([position >= switch for switch in switches]).sum(0)
        return torch.stack([self.log_prob(policy) for policy in versions]).gather(0, version[None])[0]

    def probability(self, log_prob: Tensor) -> Tensor:
        """[S] the probability of each completion, from the log-probs [N] of its tokens."""
        return segment_sum(log_prob, self.cu_seqlens).exp()

    def value(self, policy: Tensor) -> Tensor:
        """J(π), [] reward units."""
        return (self.probability(self.log_prob(policy)) * self.reward).sum()

    def gradient(self, policy: Tensor) -> Tensor:
        """∇J with respect to the logits, [P, V]."""
        policy = policy.detach().requires_grad_()
        return torch.autograd.grad(self.value(policy), policy)[0]

    def token_advantage(self, advantage: Callable[[Any], Tensor], chosen: Tensor, own: PolicyBatch) -> Tensor:
        """[n] the advantages of the tokens of a group's completions: `chosen` [G] indexes them, `own` is their
        batch."""
        o = Outcomes.of(self.reward[chosen], torch.zeros(len(chosen), dtype=torch.long))
        per_sequence = advantage(replace(o, length=own.lengths))
        return per_sequence[own.sequence_index]

    def moments(
        self,
        policy: Tensor,
        behavior_log_prob: Tensor,
        loss: BatchLoss,
        *,
        advantage: Callable[[Any], Tensor],
        group_size: int = 1,
        of_policy: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
        **log_probs: Tensor,
    ) -> GradientMoments:
        """The moments of −∇loss over all batches of one group, each weighted by its probability under the behavior
        policy.

        Args:
            policy: [P, V], the current policy's logits.
            behavior_log_prob: [N] nats, the policy that sampled the tokens; see `mixed_log_prob`.
            loss: batch → [] loss, for example `lambda b: policy_loss(b, surrogate=…, aggregate=…).value`.
            advantage: outcomes of the group → [G]; for a world of turns see `TurnWorld`.
            group_size: G, the number of completions in a batch, drawn independently.
            of_policy: the current policy's logits → further fields of the batch by name, with gradient; see `top_k`.
            log_probs: further fields of the batch by name, such as `proximal_log_prob`; [N] nats.
        """
        policy = policy.detach().requires_grad_()
        whole = PolicyBatch(
            log_prob=self.log_prob(policy),
            loss_mask=torch.ones(len(self.row), dtype=torch.bool),
            cu_seqlens=self.cu_seqlens,
            behavior_log_prob=behavior_log_prob.detach(),
            **{name: value.detach() for name, value in log_probs.items()},
            **({} if of_policy is None else of_policy(policy)),
        )
        likelihood = self.probability(behavior_log_prob.detach())
        mean, square = torch.zeros_like(policy), 0.0
        # the order of a batch changes no loss: each batch once, as often as it has orders
        for group in combinations_with_replacement(range(len(self.completions)), group_size):
            orders = factorial(group_size) // prod(map(factorial, Counter(group).values()))
            chosen = torch.tensor(group)
            weight = orders * float(likelihood[chosen].prod())
            own = whole.take(chosen)
            batch = replace(own, advantage=self.token_advantage(advantage, chosen, own))
            gradient = -torch.autograd.grad(loss(batch), policy, retain_graph=True)[0]
            mean = mean + weight * gradient
            square += weight * float(gradient.square().sum())
        mean = mean.detach()
        return GradientMoments(mean, max(square - float(mean.square().sum()), 0.0) ** 0.5)


@dataclass(frozen=True)
class ImprovementBound:
    """Bounds on the error of the surrogate objective: |J(π) − J(μ) − L| ≤ each of the bounds.

        L = E_μ Σ_t (r_t − 1) R                          the objective that -A r descends
        residual = J(π) − J(μ) − L = Σ_t (E_{s∼π} − E_{s∼μ}) Σ_a (π − μ)(a|s) Q(s, a)
        uniform = 2 ξ T (T − 1) D²                       D = max over prefixes of TV(π, μ), ξ = max |R|
        prefix = 4 ξ Σ_t D_t min(1, Σ_{j<t} E_μ D_j)     D_t = max over prefixes of length t

    The first is DPPO's (arXiv 2602.04879); the second keeps what the first rounds up: the drift that a prefix has
    accumulated so far, which is what CPPO (arXiv 2606.10968) budgets.
    """

    improvement: float
    surrogate: float
    uniform: float
    prefix: float

    @property
    def residual(self) -> float:
        return self.improvement - self.surrogate

    @classmethod
    def of(cls, world: EnumerableWorld, policy: Tensor, behavior: Tensor) -> "ImprovementBound":
        """The bounds between two policies, [P, V] logits each."""
        log_prob, behavior_log_prob = world.log_prob(policy), world.log_prob(behavior)
        likelihood = world.probability(behavior_log_prob)
        surplus = segment_sum((log_prob - behavior_log_prob).exp() - 1, world.cu_seqlens)
        divergence = 0.5 * (policy.softmax(-1) - behavior.softmax(-1)).abs().sum(-1)
        largest = torch.zeros(world.horizon, dtype=torch.float64)
        largest = largest.scatter_reduce(0, world.depth, divergence, "amax")
        expected = torch.zeros_like(largest).index_add(0, world.depth, divergence * visits(world, behavior_log_prob))
        drift = (expected.cumsum(0) - expected).clamp(max=1)
        scale, horizon = float(world.reward.abs().max()), world.horizon
        return cls(
            improvement=float(world.value(policy) - world.value(behavior)),
            surrogate=float((likelihood * surplus * world.reward).sum()),
            uniform=2 * scale * horizon * (horizon - 1) * float(divergence.max()) ** 2,
            prefix=4 * scale * float((largest * drift).sum()),
        )


def visits(world: EnumerableWorld, behavior_log_prob: Tensor) -> Tensor:
    """[P] the probability that a completion reaches each prefix."""
    likelihood = world.probability(behavior_log_prob).repeat_interleave(world.cu_seqlens.diff())
    return torch.zeros(len(world.prefixes), dtype=torch.float64).index_add(0, world.row, likelihood)


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
