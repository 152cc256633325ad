"""TRL's advantages: of GRPOTrainer, RLOOTrainer, and TRL 1.3's PPOTrainer with its rewards."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.conformance.by_hand import as_tensor
from proxima.core.advantage import Gae, Gdpo, Grpo, Rloo, TokenRewards, whiten
from proxima.core.advantage.token import place_scores
from proxima.core.penalty import K1, K3
from proxima.data import Outcomes
from proxima.peers.verify.record import Attempt, Record


def trl_advantages(record: Record) -> Iterator[Attempt]:
    """GRPOTrainer's advantage block."""
    p = record.params
    parts = as_tensor(record.inputs["rewards_per_func"])
    weights = tuple(p.get("reward_weights") or [1.0] * parts.shape[1])
    group = torch.arange(len(parts)) // p["num_generations"]
    known = parts.isfinite()
    reward = (torch.where(known, parts, 0.0) * torch.tensor(weights, dtype=torch.float64)).sum(1)
    base = Outcomes.of(reward, group, known.any(1))
    scale = p.get("scale_rewards", "group")
    named: Any = {True: "group", False: "none"}.get(scale, scale)
    spec: Any = Grpo(named, 1e-4)
    size = len(reward) if named == "batch" else p["num_generations"]  # `none` still looks at its groups
    kind = p.get("multi_objective_aggregation", "sum_then_normalize")
    if {"sum_then_normalize": False, "normalize_then_sum": True}[kind]:
        spec = Gdpo(weights, "group", 1e-4, "completions")
        base = replace(base, parts=parts)
        reward, size = _normalised_sum(parts, weights, p["num_generations"]), len(reward)
    reward = torch.where(known.any(1), reward, torch.nan)
    std = _spread(reward, size)
    numbers = {"advantages": spec(base), "rewards": reward, "std_rewards": std, "is_std_zero": std.abs() <= 1e-8}
    # TRL's Bessel factor n / (n - 1) is float32.
    loose = {"rtol": 2e-5, "atol": 2e-5} if record.single else {"rtol": 1e-7, "atol": 1e-9}
    yield None, [record.expect(name, ours, **loose) for name, ours in numbers.items() if name in record.expected]


def _spread(values: Tensor, size: int) -> Tensor:
    """The sample standard deviation of each `size` values, without NaNs, at all of them; NaN below two (T10)."""
    if size == 1:
        return torch.zeros_like(values)
    known = [row[row.isfinite()] for row in values.view(-1, size)]
    std = torch.stack([row.std() if len(row) > 1 else row.new_full((), torch.nan) for row in known])
    return std.repeat_interleave(size)


def _normalised_sum(parts: Tensor, weights: tuple[float, ...], size: int) -> Tensor:
    """Each reward function's column standardised within its group, then summed with the weights."""
    total = parts.new_zeros(len(parts))
    for column, weight in zip(parts.unbind(1), weights, strict=True):
        mean = torch.stack([row[row.isfinite()].mean() for row in column.view(-1, size)]).repeat_interleave(size)
        total = total + weight * ((column - mean) / (_spread(column, size) + 1e-4)).nan_to_num(nan=0.0)
    return total


def rloo_advantages(record: Record) -> Iterator[Attempt]:
    """RLOOTrainer's advantage block."""
    p = record.params
    reward = as_tensor(record.inputs["rewards"])
    group = torch.arange(len(reward)) // p["num_generations"]
    o = Outcomes.of(reward, group, reward.isfinite())
    yield None, [record.expect("advantages", Rloo(bool(p.get("normalize_advantages", False)))(o), 1e-7, 1e-9)]


def ppo_rewards(record: Record) -> Iterator[Attempt]:
    """TRL 1.3 PPOTrainer: KL in the reward, score on the token after the last, GAE, whitening (T20)."""
    p = record.params
    mask = record.mask
    rows, width = mask.shape
    last = torch.tensor(record.inputs["last_token_index"])
    # The end token after the last one is a step of its own where it fits; its value counts.
    steps = torch.arange(width) <= (last + 1)[:, None]
    gap = record.tensor("logp") - record.tensor("reference_logp")
    kl = (K1(1.0) if p.get("kl_estimator", "k1") == "k1" else K3(1.0)).estimate(gap)
    scores = place_scores(record.tensor("scores"), steps.flatten(), torch.arange(rows + 1) * width).view(rows, width)
    rewards = torch.where(mask, -p.get("kl_coef", 0.05) * kl, 0.0) + scores
    if p.get("whiten_rewards", False):
        rewards = whiten(rewards.flatten(), steps.flatten(), shift=False).view(rows, width)
    packed = TokenRewards(
        reward=rewards.flatten(),
        value=torch.where(steps, record.tensor("values"), 0.0).flatten(),
        # its recursion runs over padding, where rewards and values are 0
        loss_mask=torch.ones(rows * width, dtype=torch.bool),
        cu_seqlens=torch.arange(rows + 1) * width,
    )
    gae = Gae(p.get("gamma", 1.0), p.get("lam", 0.95), whiten=False)
    raw = gae(packed)
    advantage = whiten(raw, mask.flatten()).view(rows, width)
    returns = raw.view(rows, width) + torch.where(steps, record.tensor("values"), 0.0)
    numbers = {"rewards": rewards, "advantages": advantage, "returns": returns}
    yield None, [record.expect(name, ours, 1e-7, 1e-8) for name, ours in numbers.items()]
