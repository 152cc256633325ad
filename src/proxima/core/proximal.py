"""Log-probs of policies between the one that sampled a token and the current one: interpolated, or of the version right
after the sampling one."""

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
    behavior, current = finite_log_prob(behavior_log_prob.detach()), finite_log_prob(log_prob.detach())
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
