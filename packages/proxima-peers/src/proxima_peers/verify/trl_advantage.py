"""TRL's advantages: GRPOTrainer, RLOOTrainer, and TRL 1.3's PPOTrainer with its rewards."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.group import Gdpo, Grpo, Rloo
from proxima.core.advantage.protocol import TokenRewards
from proxima.core.advantage.token import Gae, place_scores, whiten
from proxima.core.penalty import K1, K3
from proxima.data.outcomes import Outcomes
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Record


def trl_advantages(record: Record) -> Iterator[Attempt]:
    """GRPOTrainer's advantage block."""
    p = record.params
    parts = as_tensor(record.inputs["rewards_per_func"])
    given = p.get("reward_weights")
    weights = tuple(given) if given else (1.0,) * parts.shape[1]
    group = torch.arange(len(parts)) // p["num_generations"]
    scored = parts.isfinite()
    reward = (torch.where(scored, parts, 0.0) * torch.tensor(weights, dtype=torch.float64)).sum(1)
    base = Outcomes.of(reward, group, scored.any(1))
    scale = p.get("scale_rewards", "group")
    named: Any = {True: "group", False: "none"}.get(scale, scale)
    spec: Any = Grpo(named, 1e-4)
    kind = p.get("multi_objective_aggregation", "sum_then_normalize")
    each = {"sum_then_normalize": False, "normalize_then_sum": True}[kind]
    if each:
        spec = Gdpo(weights, "group", 1e-4, "completions")
        base = replace(base, parts=parts)
    exact, theirs = (
        _advantage_block(parts, weights, p["num_generations"], named, each, precision=precision)
        for precision in (EXACT, _precision(record))
    )
    ours = spec(base)
    numbers = {name: (exact[name], theirs[name]) for name in exact}
    numbers["advantages"] = (ours, ours + (theirs["advantages"] - exact["advantages"]))
    # The mean of equal rewards is rounded, and what remains is divided by a deviation of 0, plus 1e-4.
    rounding = 4e4 * torch.finfo(torch.float64).eps * float(parts.abs().nan_to_num().max())
    atol = max(1e-11, rounding)
    yield None, [record.expect(name, both, atol=atol) for name, both in numbers.items() if name in record.expected]


# The dtype of the numbers, and that of the rewards' weights and of the factor n / (n - 1) of a variance.
Precision = tuple[torch.dtype, torch.dtype]
EXACT: Precision = (torch.float64, torch.float64)


def _precision(record: Record) -> Precision:
    """TRL's precision: the quotient of two counts is float32, whatever the record's dtype."""
    if record.single:
        return torch.float32, torch.float32
    return torch.float64, torch.float32


def _advantage_block(
    parts: Tensor, weights: tuple[float, ...], size: int, scale: str, each: bool, *, precision: Precision
) -> dict[str, Tensor]:
    """The results of TRL's block in a given precision; their difference from those in `EXACT` is TRL's own rounding.

    Args:
        each: standardise every reward function within its groups of `size`, and then their sum over the batch.
    """
    values, factor = precision
    rewards = parts.to(values)
    unknown = parts.isnan().all(1)
    if each:
        rows = rewards.view(-1, size, rewards.shape[1])
        rewards = ((rows - rows.nanmean(1, keepdim=True)) / (_deviation(rows, factor) + 1e-4)).view(rewards.shape)
    reward = (rewards * torch.tensor(weights, dtype=torch.float64).to(factor)).nansum(1)
    reward = torch.where(unknown, torch.nan, reward)
    if each:
        centred = reward.view(1, -1)
    else:
        centred = reward.view(-1, size)
    # `none` still looks at it
    if each or scale == "batch":
        spread = reward.view(1, -1)
    else:
        spread = reward.view(-1, size)
    std = _deviation(spread, factor).expand_as(spread).reshape(-1)
    advantage = (centred - centred.nanmean(1, keepdim=True)).reshape(-1)
    if each or scale != "none":
        advantage = advantage / (std + 1e-4)
    zero = torch.isclose(std, torch.zeros_like(std)).double()
    return {"advantages": advantage.nan_to_num(), "rewards": reward, "std_rewards": std, "is_std_zero": zero}


def _deviation(rows: Tensor, factor: torch.dtype) -> Tensor:
    """The sample standard deviation along dimension 1, which is kept, ignoring NaNs. NaN for a single number (T10), but
    0 in rows of length 1."""
    if rows.shape[1] == 1:
        return torch.zeros_like(rows)
    count = rows.isfinite().sum(1, keepdim=True).double()
    variance = (rows - rows.nanmean(1, keepdim=True)).square().nanmean(1, keepdim=True)
    return (variance * (count / (count - 1)).to(factor)).sqrt()


def rloo_advantages(record: Record) -> Iterator[Attempt]:
    """RLOOTrainer's advantage block."""
    size = record.params["num_generations"]
    normalised = bool(record.params.get("normalize_advantages", False))
    reward = as_tensor(record.inputs["rewards"])
    o = Outcomes.of(reward, torch.arange(len(reward)) // size, reward.isfinite())
    exact, theirs = (
        _left_out(reward, size, normalised, precision=precision) for precision in (EXACT, _precision(record))
    )
    ours = Rloo(normalised)(o)
    yield None, [record.expect("advantages", (ours, ours + (theirs - exact)))]


def _left_out(reward: Tensor, size: int, normalised: bool, *, precision: Precision) -> Tensor:
    """The reward minus the mean of the others in its group, in a given precision."""
    values, factor = precision
    rows = reward.to(values).view(-1, size)
    others = rows.isfinite().sum(1, keepdim=True) - 1
    advantage = (rows - (rows.nansum(1, keepdim=True) - rows) / others).view(1, -1)
    if normalised:
        advantage = (advantage - advantage.nanmean()) / (_deviation(advantage, factor) + 1e-4)
    return advantage.view(-1).nan_to_num()


def ppo_rewards(record: Record) -> Iterator[Attempt]:
    """TRL 1.3 PPOTrainer: KL in the reward, score on the token after the last, GAE, whitening (T20)."""
    p = record.params
    mask = record.mask
    rows, width = mask.shape
    last = torch.tensor(record.inputs["last_token_index"])
    # The end token after the last one is a separate step where it fits; its value counts.
    steps = torch.arange(width) <= (last + 1)[:, None]
    gap = record.tensor("logp") - record.tensor("reference_logp")
    estimator: Any = K1(1.0) if p.get("kl_estimator", "k1") == "k1" else K3(1.0)
    kl = estimator.estimate(gap)
    scores = place_scores(record.tensor("scores"), steps.flatten(), torch.arange(rows + 1) * width).view(rows, width)
    rewards = torch.where(mask, -p.get("kl_coef", 0.05) * kl, 0.0) + scores
    ends = torch.arange(rows + 1) * width
    values = torch.where(steps, record.tensor("values"), 0.0).flatten()
    gae = Gae(p.get("gamma", 1.0), p.get("lam", 0.95), whiten=False)

    def numbers(factor: torch.dtype) -> dict[str, Tensor]:
        reward = rewards.flatten()
        if p.get("whiten_rewards", False):
            reward = _whitened(reward, steps.flatten(), factor, shift=False)
        # TRL's recursion runs over padding, where rewards and values are 0
        every = torch.ones(rows * width, dtype=torch.bool)
        raw = gae(TokenRewards(reward=reward, value=values, loss_mask=every, cu_seqlens=ends))
        advantage = _whitened(raw, mask.flatten(), factor)
        return {"rewards": reward, "advantages": advantage, "returns": raw + values}

    exact = numbers(torch.float64)
    theirs = numbers(torch.float32)
    both = {name: (exact[name].view(mask.shape), theirs[name].view(mask.shape)) for name in exact}
    yield None, [record.expect(name, either) for name, either in both.items()]


def _whitened(values: Tensor, mask: Tensor, factor: torch.dtype, *, shift: bool = True) -> Tensor:
    """`whiten`, with the variance's n / (n - 1) in the dtype `factor`."""
    n = mask.sum().double()
    rounded = 1.0
    if n > 1:
        rounded = float((n / (n - 1)).to(factor).double() / (n / (n - 1)))
    mean = 0.0 if shift else values[mask].mean()
    ours = whiten(values, mask, epsilon=1e-8 / rounded) / rounded**0.5 + mean
    return torch.where(mask, ours, 0.0)
