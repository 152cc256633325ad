"""The columns of the policies between the one that sampled a token and the current one: the centre of
`proximal: loglinear`, and `next_log_prob` of `proximal: next`."""

import torch
from torch import Tensor

from proxima.core.loss import NextMissing
from proxima.core.proximal import interpolated_proximal, segment_wise_log_prob
from proxima.core.segment import segment_count, segment_index
from proxima.data.packed_batch import PackedBatch


def loglinear_proximal(batch: PackedBatch, log_prob: Tensor, current_version: int) -> Tensor:
    """[N] nats, between the behavior policy and the current one, `log_prob`, by the age of each token."""
    if batch.behavior_log_prob is None or batch.policy_version is None:
        raise ValueError("proximal=loglinear needs behavior_log_prob and policy_version in every trajectory.")
    _require_past(batch, current_version)
    return interpolated_proximal(batch.behavior_log_prob, log_prob, batch.policy_version, current_version, check=False)


def next_log_prob(batch: PackedBatch, missing: NextMissing, current_version: int) -> Tensor:
    """[N] nats, NaN where a token is to be dropped."""
    behavior, proximal, cached, version = (
        _required(batch, name) for name in ("behavior_log_prob", "proximal_log_prob", "next_log_prob", "policy_version")
    )
    _require_past(batch, current_version)
    found = segment_wise_log_prob(behavior, proximal, cached, version, current_version, check=False)
    lacking = batch.loss_mask & found.isnan()
    if missing == "decoupled":
        return torch.where(lacking, proximal, found)
    if missing == "drop_token":
        return found
    dropped = segment_count(lacking, batch.cu_seqlens) > 0
    return torch.where(dropped[segment_index(batch.cu_seqlens, len(found))], torch.nan, found)


def _require_past(batch: PackedBatch, current_version: int) -> None:
    """Make the check of `core.proximal` without waiting for the device."""
    if batch.newest_version > current_version:
        latest = f"policy_version {batch.newest_version}"
        raise ValueError(f"proximal: {latest} is later than current_version {current_version}.")


def _required(batch: PackedBatch, name: str) -> Tensor:
    if (value := getattr(batch, name)) is None:
        raise ValueError(f"proximal=next needs {name} in every trajectory.")
    tensor: Tensor = value
    return tensor
