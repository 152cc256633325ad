"""Our specs with a single change each, which reproduces a peculiarity of a peer without excusing anything else."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from proxima.core import ratio
from proxima.core.loss import Corrected, PolicyLoss, TokenLoss, policy_loss
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_log_ratio
from proxima.core.segment import segment_mean
from proxima.core.surrogate import weight
from proxima.core.surrogate.clip import Gspo
from proxima.core.surrogate.cppo import Cppo, Dppo
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch


class Changed(partial[Any]):
    """A spec that is a function of a batch: the function, then its arguments before the batch."""

    needs: frozenset[str] = frozenset()
    rejected = "count"

    def loss_term(self, *_: Any) -> None:
        """As a correction: it adds no term to the loss."""


def given_weights(weight: Tensor, b: PolicyBatch) -> Corrected:
    """A correction with the given weights [N]."""
    return Corrected(weight, b.loss_mask & (weight > 0), {})


def reasons(first: str | None = None, /, **causes: Any) -> str | None:
    """Join `first` and the ids of the peculiarities that apply; None, our own definition, if there are none."""
    names = [name for name, applies in causes.items() if applies]
    if first:
        names.insert(0, first)
    return ", ".join(names) or None


def loss_of(
    b: PolicyBatch, spec: Any, aggregate: Any, correction: Any = None, penalty: Any = None, *, bounded: bool = True
) -> PolicyLoss:
    """`policy_loss` of a record's batch; without our bound on log-ratios unless `bounded`."""
    blocks: dict[str, Any] = {"aggregate": aggregate, "correction": correction, "penalty": penalty}
    if bounded:
        return policy_loss(b, surrogate=spec, **blocks, check=False)
    with unclamped():
        return policy_loss(b, surrogate=spec, **blocks, check=False)


@contextmanager
def unclamped() -> Iterator[None]:
    """Remove our bound of ±20 on log-ratios from the surrogates; most peers have none."""
    modules = (ratio, weight)
    for module in modules:
        vars(module)["LOG_RATIO_LIMIT"] = math.inf
    try:
        yield
    finally:
        for module in modules:
            vars(module)["LOG_RATIO_LIMIT"] = LOG_RATIO_LIMIT


def beyond_limit(log_ratio: Tensor) -> bool:
    """Return True if our surrogates clamp some log-ratio."""
    return bool((log_ratio.detach().abs() > LOG_RATIO_LIMIT).any())


def in_groups_of_one(group: Tensor) -> Tensor:
    """[S] bool, the members of groups of one."""
    return (group[:, None] == group[None]).sum(1) == 1


def with_partners(o: Outcomes, rewards: Literal["standard", "zero"], length: Literal["none", "own"]) -> Outcomes:
    """`o`, followed by partners that make the advantage of a completion in a group of one its raw reward (P16).

    Args:
        rewards: `standard`: m partners of −r / m ± d, so that the group's mean is 0 and its deviation 1 (ddof = 1), in
            each part of the reward too. `zero`: one partner of 0, for a baseline that is the mean of the others.
        length: length of the partners; `none` keeps them out of statistics over tokens.
    """
    single = in_groups_of_one(o.group)
    if o.parts is None:
        columns = o.reward[:, None]
    else:
        columns = torch.cat([o.reward[:, None], o.parts], 1)
    alone = columns[single]
    if rewards == "zero":
        made = torch.zeros_like(alone)[None]
    else:
        m = 2 * math.ceil((float(alone.square().max()) + 1) / 2)
        apart = ((m - alone.square() - alone.square() / m) / m).sqrt()
        sign = torch.tensor([1.0, -1.0]).repeat(m // 2)[:, None, None]
        made = -alone / m + sign * apart
    count = len(made)
    if length == "own":
        size = o.length[single].repeat(count)
    else:
        size = torch.zeros(count * int(single.sum())).long()
    both = torch.cat([columns, made.flatten(0, 1)])
    group = torch.cat([o.group, o.group[single].repeat(count)])
    parts = None if o.parts is None else both[:, 1:]
    return replace(Outcomes.of(both[:, 0], group), length=torch.cat([o.length, size]), parts=parts)


def masked(spec: Cppo | Dppo, keep: Tensor, b: PolicyBatch) -> TokenLoss:
    """The loss of a surrogate that drops tokens, with the mask `keep` [N] in place of its own bounds."""
    free: Any = replace(spec, delta=math.inf)
    if isinstance(free, Cppo):
        free = replace(free, delta_b=math.inf)
    else:
        free = replace(free, delta_low=None)
    out: TokenLoss = free(b)
    return replace(out, loss=torch.where(keep, out.loss, torch.zeros_like(out.loss)), keep=keep)


def beyond_ten(b: PolicyBatch) -> bool:
    """Return True if some sequence's log-ratio is above 10, or beyond our bound."""
    mean = segment_mean(masked_log_ratio(b).detach(), b.loss_mask, b.cu_seqlens)
    return bool((mean > 10).any()) or beyond_limit(mean)


def clamped_at_ten(spec: Gspo, b: PolicyBatch) -> TokenLoss:
    """The sequence's log-ratio clamped at 10 only from above, without gradient beyond it (P5, U6). Use it with
    `bounded=False`."""
    mean = segment_mean(masked_log_ratio(b), b.loss_mask, b.cu_seqlens)[b.sequence_index]
    at_ten = (b.log_prob - mean + 10.0).detach()
    return spec(replace(b, log_prob=torch.where(mean > 10, at_ten, b.log_prob)))
