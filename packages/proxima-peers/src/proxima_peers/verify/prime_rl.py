"""prime-rl's losses of RL: a band of probabilities, or DPPO, with the squared log-ratio to the engine's policy."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from proxima.core import TokenSum
from proxima.core.metrics import k3
from proxima.core.penalty import LogRatioSq
from proxima.core.surrogate.cppo import Dppo, TvBand
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Record
from proxima_peers.verify.unirl import concatenated
from proxima_peers.verify.variants import loss_of


def policy_losses(record: Record) -> Iterator[Attempt]:
    """compute_loss with ipo_loss_fn (`tv_band`) or default_loss_fn (`dppo`): a sum over the tokens, divided by
    `rl_scale`; `adv_tau` is a factor of the advantages."""
    p = record.params
    band = "ipo_loss_fn" in record.source
    spec: Any
    if band:
        spec = TvBand(p["eps"])
    else:
        spec = Dppo(delta=p["dppo_mask_high"], delta_low=p["dppo_mask_low"])
    rows = record.inputs["trainer_logprobs"]
    leaf = concatenated(rows).requires_grad_()
    b = PolicyBatch(
        log_prob=leaf,
        behavior_log_prob=concatenated(record.inputs["inference_logprobs"]),
        advantage=p["adv_tau"] * concatenated(record.inputs["advantages"]),
        loss_mask=concatenated(record.inputs["loss_mask"]) != 0,
        cu_seqlens=torch.tensor([0, *map(len, rows)]).cumsum(0),
    )
    tau = p["kl_tau"]
    penalty = LogRatioSq(tau, towards="behavior") if tau else None
    loss = loss_of(b, spec, TokenSum(), penalty=penalty)
    theirs = replace(record, expected={**record.expected, "grad_logp": concatenated(record.expected["grad_logp"])})
    checks = theirs.loss_checks(loss.numerator / float(as_tensor(record.inputs["rl_scale"])), leaf)
    yield None, [*checks, *record.checks(_numbers(b, loss.keep, signed=not band))]


@torch.no_grad()
def _numbers(b: PolicyBatch, keep: Tensor, *, signed: bool) -> dict[str, list[float]]:
    """Each metric's values, one per sequence, 0 where there is no such token."""
    assert b.behavior_log_prob is not None and b.advantage is not None
    far = k3(b.log_prob - b.behavior_log_prob)
    dropped = b.loss_mask & ~keep
    raised = b.advantage > 0
    lowered = b.advantage < 0
    means = {
        "masked_mismatch_kl": (far, dropped),
        "unmasked_mismatch_kl": (far, keep),
        "is_masked": (dropped, b.loss_mask),
    }
    if signed:
        means |= {"is_masked_high": (dropped & raised, b.loss_mask), "is_masked_low": (dropped & lowered, b.loss_mask)}
        means |= {"masked_advantage_positive": (raised, dropped), "masked_advantage_negative": (lowered, dropped)}
    edges = b.cu_seqlens.tolist()
    spans = [slice(a, z) for a, z in pairwise(edges)]
    return {
        name: [float(values[span][mask[span]].double().sum() / max(int(mask[span].sum()), 1)) for span in spans]
        for name, (values, mask) in means.items()
    }
