"""A proximal policy without a forward pass: interpolated between behavior and current policy."""

from typing import Literal

import torch
from torch import Tensor

from proxima.data import require


def interpolated_proximal(
    behavior_log_prob: Tensor,
    log_prob: Tensor,
    policy_version: Tensor,
    current_version: int,
    kind: Literal["loglinear", "linear"] = "loglinear",
) -> Tensor:
    """[N] log-probs, detached, of a proximal policy between the one that sampled a token and the current one.

        a = (v_prox - v) / (v_now - v), v_prox = v_now - 1
        loglinear: log mu + a (log pi - log mu)        linear: log(mu + a (pi - mu))

    Args:
        behavior_log_prob, log_prob: [N] float, nats.
        policy_version: [N] int, the version that sampled the token; negative: unknown. current_version: of `log_prob`.
        kind: interpolate log-probs (`loglinear`) or probabilities (`linear`).
    Returns: [N] in the dtype of `log_prob`.
    Raises: ValueError for an unknown kind, or a version later than the current one.
    Edge cases: a token of the current, the previous or an unknown version has a = 0: its proximal policy is its
        behavior policy.
    Source: AReaL `prox_logp_method: loglinear`. Differs: AReaL computes a in float32.
    """
    require(kind in ("loglinear", "linear"), "kind", kind, "must be loglinear or linear")
    age = current_version - policy_version
    if bool((age < 0).any()):
        latest = f"policy_version {int(policy_version.max())}"
        raise ValueError(f"interpolated_proximal: {latest} is later than current_version {current_version}.")
    share = torch.where((age > 0) & (policy_version >= 0), (age - 1) / age.clamp(min=1), 0.0).to(log_prob.dtype)
    behavior, current = behavior_log_prob.detach(), log_prob.detach()
    if kind == "loglinear":
        return behavior + share * (current - behavior)
    return torch.lerp(behavior.exp(), current.exp(), share).log()
