"""Log-probs of policies between the one that sampled a token and the current one: interpolated, of the version right
after the sampling one, or reached from it step by step."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxima.data import require
from proxima.data.policy_batch import finite_log_prob


def interpolated_proximal(
    behavior_log_prob: Tensor,
    log_prob: Tensor,
    policy_version: Tensor,
    current_version: int,
    kind: Literal["loglinear", "linear"] = "loglinear",
    *,
    check: bool = True,
) -> Tensor:
    """[N] log-probs, detached, of a proximal policy between the one that sampled a token and the current one.

        a = (v_prox - v) / (v_now - v), v_prox = v_now - 1
        loglinear: log mu + a (log pi - log mu)        linear: log(mu + a (pi - mu))

    Args:
        behavior_log_prob, log_prob: [N] float, nats.
        policy_version: [N] int, the version that sampled the token; negative: unknown. current_version: of `log_prob`.
        kind: interpolate log-probs (`loglinear`) or probabilities (`linear`).
        check: refuse a later version; costs one device sync.
    Returns: [N] in the dtype of `log_prob`.
    Raises: ValueError for an unknown kind, or a version later than the current one.
    Edge cases: a token of the current, the previous or an unknown version has a = 0: its proximal policy is its
        behavior policy.
    Source: AReaL `prox_logp_method: loglinear`. Differs: AReaL computes a in float32, whatever the dtype of the
        log-probs.
    """
    require(kind in ("loglinear", "linear"), "kind", kind, "must be loglinear or linear")
    age = current_version - policy_version
    if check and bool((age < 0).any()):
        latest = f"policy_version {int(policy_version.max())}"
        raise ValueError(f"interpolated_proximal: {latest} is later than current_version {current_version}.")
    precise = torch.promote_types(log_prob.dtype, torch.float32)  # a quotient of integers is float32
    between = (age - 1).to(precise) / age.clamp(min=1)
    share = torch.where((age > 0) & (policy_version >= 0), between, 0.0).to(log_prob.dtype)
    behavior = finite_log_prob(behavior_log_prob.detach())
    current = finite_log_prob(log_prob.detach())
    if kind == "loglinear":
        return behavior + share * (current - behavior)
    return torch.lerp(behavior.exp(), current.exp(), share).log()


def segment_wise_log_prob(
    behavior_log_prob: Tensor,
    proximal_log_prob: Tensor,
    cached_log_prob: Tensor,
    policy_version: Tensor,
    current_version: int,
    *,
    check: bool = True,
) -> Tensor:
    """[N] log-probs, detached, under the version right after the one that sampled each token: `next_log_prob`.

        log pi_min(v + 1, V):    v = V: log mu    v = V - 1: log pi_prox    v <= V - 2: cached

    V is the version whose log-probs are the proximal ones, v the version that sampled the token. The weights of a
    correction with `towards: next` thus span a single version, however old the token is. For v <= V - 2, weight times
    ratio leaves out the changes of versions v + 2 to V: it is biased by design, with the variance of a single version.

    Args:
        behavior_log_prob, proximal_log_prob: [N] float, nats. cached_log_prob: [N] float, nats, under version v + 1,
            evaluated when that was the newest; NaN where it was not.
        policy_version: [N] int, v; negative: unknown. current_version: V.
        check: refuse a later version; costs one device sync.
    Returns: [N] in the dtype of `proximal_log_prob`; NaN where the cached one is needed and missing.
    Raises: ValueError for a version later than the current one.
    Edge cases: cached values of tokens of versions V and V - 1 are not read. A token of unknown version gives NaN.
    Source: segment-wise decoupled PPO (AReaL `enable_segment_wise_ppo`); decoupled PPO, arXiv 2505.24298.
    """
    age = current_version - policy_version
    if check and bool((age < 0).any()):
        latest = f"policy_version {int(policy_version.max())}"
        raise ValueError(f"segment_wise_log_prob: {latest} is later than current_version {current_version}.")
    proximal = proximal_log_prob.detach()
    older = torch.where(age == 1, proximal, cached_log_prob.detach().to(proximal.dtype))
    return torch.where(
        policy_version < 0, torch.nan, torch.where(age == 0, behavior_log_prob.detach().to(proximal.dtype), older)
    )


@dataclass(frozen=True, kw_only=True)
class VersionChain:
    """Weigh a token over all versions since it was sampled, with a bound on each step.

        w = prod_k min(pi_{k+1} / pi_k, cap)        k = v, ..., V - 1        pi_v = mu, pi_V = pi_prox

    v is the version that sampled the token, V the newest. A segment-wise weight has the first of these factors alone,
    a decoupled one has bound(pi_prox / mu): one bound for the way from v to V.

    Args:
        cap: the largest ratio of one step, > 1; inf: the product is pi_prox / mu, without a bound.
        versions: the versions after its own, >= 0, under which a token's log-prob is computed; the way from the last of
            them to pi_prox is one step. null: all versions; 0: one step, the decoupled weight. Each version costs a
            forward pass of the completions that are waiting.
    Raises: ValueError naming field, value and bound, at construction.
    Edge cases: a version under which a log-prob is missing is left out: the step passes over it, and has one bound. A
        token of the newest version has weight 1. Steps down are not bounded, as in truncated importance sampling: the
        weight of a token that the policy has left goes to 0.
    Source: ours. Truncated importance sampling, Ionides 2008, at each step of segment-wise decoupled PPO (AReaL).
    """

    cap: float = 2.0
    versions: int | None = None

    def __post_init__(self) -> None:
        require(self.cap > 1, "cap", self.cap, "must be > 1: a smaller bound would shrink weights that are right")
        require(self.versions is None or self.versions >= 0, "versions", self.versions, "must be >= 0, or none")

    def step(self, later: Tensor, earlier: Tensor) -> Tensor:
        """log min(ratio, cap) of log-probs, nats, [N] each, detached."""
        change = finite_log_prob(later.detach()) - finite_log_prob(earlier.detach())
        return change.clamp(max=math.log(self.cap))


def chained_log_prob(
    behavior_log_prob: Tensor,
    proximal_log_prob: Tensor,
    cached_log_prob: Tensor,
    chained_log_ratio: Tensor,
    policy_version: Tensor,
    current_version: int,
    chain: VersionChain,
    *,
    check: bool = True,
) -> Tensor:
    """[N] log-probs, detached, whose distance from the behavior policy's is the log of a chain's weight.

        log mu + chained + log min(pi_prox / cached, cap)        of a token of version V: log mu

    Args:
        behavior_log_prob, proximal_log_prob: [N] float, nats.
        cached_log_prob: [N] float, nats, under the newest version for which one was computed; NaN where none was.
        chained_log_ratio: [N] float, nats, the bounded steps from mu to that version; not read where there is none.
        policy_version: [N] int; negative: unknown, which is treated as old. current_version: V.
        chain: the bound.
        check: refuse a later version; costs one device sync.
    Returns: [N] in the dtype of `proximal_log_prob`.
    Raises: ValueError for a version later than the current one.
    """
    if check and bool((policy_version > current_version).any()):
        latest = f"policy_version {int(policy_version.max())}"
        raise ValueError(f"chained_log_prob: {latest} is later than current_version {current_version}.")
    proximal = proximal_log_prob.detach()
    behavior = behavior_log_prob.detach().to(proximal.dtype)
    cached = cached_log_prob.detach().to(proximal.dtype)
    chained = chained_log_ratio.detach().to(proximal.dtype)
    known = ~cached.isnan()
    last = chain.step(proximal, torch.where(known, cached, behavior))
    log_weight = torch.where(known, chained, 0.0) + last
    return torch.where(policy_version == current_version, behavior, behavior + log_weight)
