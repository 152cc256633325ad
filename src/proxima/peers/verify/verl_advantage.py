"""verl's advantage estimators."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.conformance.by_hand import as_tensor
from proxima.core.advantage import (
    Gae,
    Gdpo,
    Gpg,
    Grpo,
    GrpoPassk,
    Opo,
    OptimalTokenBaseline,
    ReinforcePp,
    ReinforcePpBaseline,
    Rloo,
    TokenRewards,
    whiten,
)
from proxima.core.advantage.group import whitened_over_tokens
from proxima.core.advantage.token import reward_to_go
from proxima.data import Outcomes
from proxima.peers.verify.record import Attempt, Check, Record


def estimator(record: Record) -> str:
    """grpo, gae … from the function named in `source`."""
    name = record.source.split("core_algos.compute_")[1].split(" ")[0]
    for ending in ("_advantage_return", "_outcome_advantage", "_advantage"):
        name = name.removesuffix(ending)
    return name


def group_spec(name: str, p: dict[str, Any]) -> Any:
    """Our spec for one of verl's estimators of whole completions; None when there is none."""
    scale: Any = "group" if p.get("norm_adv_by_std_in_grpo", True) else "none"
    epsilon = p.get("epsilon", 1e-6)
    makers: dict[str, Any] = {
        "grpo": lambda: Grpo(scale, epsilon),
        "grpo_vectorized": lambda: Grpo(scale, epsilon),
        "grpo_passk": lambda: GrpoPassk(scale, epsilon),
        "gdpo": lambda: Gdpo(_weights(p), scale, epsilon),
        "gpg": lambda: Gpg(p.get("f_norm", 1.0)),
        "opo": Opo,
        "reinforce_plus_plus_baseline": ReinforcePpBaseline,
        "rloo": Rloo,
        "rloo_vectorized": Rloo,
    }
    return makers[name]() if name in makers else None


def _weights(p: dict[str, Any]) -> tuple[float, ...] | None:
    given = p.get("gdpo_reward_weights")
    if isinstance(given, dict):
        given = [given[key] for key in p["gdpo_reward_keys"]]
    return None if given is None else tuple(given)


def verl_advantages(record: Record) -> Iterator[Attempt]:
    """core_algos.compute_*_advantage"""
    name = estimator(record)
    mask = record.mask
    if (spec := group_spec(name, record.params)) is not None:
        yield from _by_group(record, name, spec, mask)
    else:
        yield from _by_token(record, name, mask)


def _by_group(record: Record, name: str, spec: Any, mask: Tensor) -> Iterator[Attempt]:
    loose = (1e-9, 1e-11)
    if name in ("grpo_vectorized", "gdpo"):  # float32 inside
        loose = (1e-5, 1e-6)
    elif name.startswith("reinforce"):
        loose = (1e-7, 1e-8)
    group = torch.tensor(record.inputs["group_ids"])
    parts = None
    if "rewards" in record.inputs:
        parts = torch.stack([as_tensor(record.inputs["rewards"][key]) for key in record.params["gdpo_reward_keys"]], 1)
        reward = parts.sum(1)
    else:
        reward = as_tensor(record.inputs["token_level_rewards"]).sum(1)  # over all positions, masked or not (P15)
    o = replace(Outcomes.of(reward, group), length=mask.sum(1), parts=parts)
    alone = (group[:, None] == group[None]).sum(1) == 1
    for reason, advantage in ((None, spec(o)), ("P16", _with_raw_singles(spec, o, alone))):
        ours = torch.where(mask, advantage[:, None], 0.0)  # verl's returns of these estimators are the advantages
        names = [name for name in ("advantages", "returns") if name in record.expected]
        yield reason, [record.expect(name, ours, *loose) for name in names]


def _with_raw_singles(spec: Any, o: Outcomes, alone: Tensor) -> Tensor:
    """verl gives a group of one its own reward (std 1), before whatever whitening follows (P16)."""
    if isinstance(spec, Gdpo):
        parts = o.reward[:, None] if o.parts is None else o.parts
        weights = spec.weights or (1.0,) * parts.shape[1]
        scale = 1 + spec.epsilon if spec.scale == "group" else 1
        pairs = zip(weights, parts.unbind(1), strict=True)
        raw = sum(w * torch.where(alone, r, 0.0) / scale for w, r in pairs)
        return whitened_over_tokens(Gdpo(spec.weights, spec.scale, spec.epsilon, "none")(o) + raw, o)
    if isinstance(spec, ReinforcePpBaseline):
        return whitened_over_tokens(torch.where(alone, o.reward, Grpo()(o)), o)
    factor = torch.ones_like(o.reward)
    if isinstance(spec, Gpg):
        factor = len(o) / (o.reward != 0).sum().clamp(min=1) / spec.f_norm
    if isinstance(spec, Grpo) and spec.scale == "group":
        factor = factor / (1 + spec.epsilon)
    return torch.where(alone, o.reward * factor, spec(o))


def _by_token(record: Record, name: str, mask: Tensor) -> Iterator[Attempt]:
    p, width = record.params, mask.shape[1]
    edges = torch.arange(len(mask) + 1) * width  # every position is a token here; the mask says which are in the loss
    keys = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared")
    flat = {key: record.tensor(key).flatten() for key in keys if record.has(key)}
    energy = None
    if "sum_pi_squared" in flat:
        energy = 1 - 2 * flat["old_log_probs"].exp() + flat["sum_pi_squared"]
        if record.has("rollout_is_weights"):
            energy = energy * record.tensor("rollout_is_weights").flatten().square()
    group = torch.tensor(record.inputs["group_ids"]) if record.has("group_ids") else None
    more = {"value": flat.get("values"), "group": group, "score_variance": energy}
    rewards = TokenRewards(reward=flat["token_level_rewards"], loss_mask=mask.flatten(), cu_seqlens=edges, **more)
    theirs = record.expected
    if name == "gae":
        yield None, _gae_checks(record, Gae(p["gamma"], p["lam"], whiten=False), rewards, mask)
        return
    loose = {"rtol": 1e-7, "atol": 1e-8}
    discounted = reward_to_go(rewards, p["gamma"] if name == "reinforce_plus_plus" else 1.0).view(mask.shape)
    returns = [Check("returns", discounted, theirs["returns"], **loose)] if "returns" in theirs else []
    if name == "reinforce_plus_plus":
        ours = ReinforcePp(p["gamma"])(rewards).view(mask.shape)
        yield None, [Check("advantages", ours, theirs["advantages"], **loose), *returns]
    elif name == "remax":
        ours = torch.where(mask, discounted - record.tensor("reward_baselines")[:, None], 0.0)
        yield None, [Check("advantages", ours, theirs["advantages"]), *returns]
    elif name in ("optimal_token_baseline", "multi_turn_optimal_token_baseline"):
        spec = OptimalTokenBaseline(p["epsilon"], p["handle_zero_tail"])
        yield None, [Check("advantages", spec(rewards).view(mask.shape), theirs["advantages"], **loose), *returns]
        for reason, ours in _token_baselines(rewards, spec, mask, packed=name.startswith("multi")):
            yield reason, [Check("advantages", ours, theirs["advantages"], **loose), *returns]


def _gae_checks(record: Record, gae: Gae, rewards: TokenRewards, mask: Tensor) -> list[Check]:
    """Ours at the loss tokens; elsewhere verl carries the next advantage along, whitens it, adds the value (P18)."""
    raw = carried(gae(rewards).view(mask.shape), mask)
    values = record.tensor("values")
    chosen = raw[mask]
    ours = whiten(chosen, torch.ones_like(chosen, dtype=torch.bool))
    advantages = (raw - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8)
    advantages[mask] = ours
    returns = torch.where(mask, gae.returns(rewards).view(mask.shape), raw + values)
    return [record.expect("advantages", advantages, 1e-7, 1e-8), record.expect("returns", returns, 1e-8, 1e-9)]


def carried(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: at a position outside the mask the value of the next one inside, 0 beyond the last."""
    out, carry = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        carry = torch.where(mask[:, t], values[:, t], carry)
        out[:, t] = carry
    return out


def _token_baselines(
    rewards: TokenRewards, spec: OptimalTokenBaseline, mask: Tensor, *, packed: bool
) -> Iterator[tuple[str, Tensor]]:
    """verl's reading: positions are columns unless packed, zero tail by token counts, raw single returns (P16, P21)."""
    assert rewards.score_variance is not None and rewards.group is not None
    returns = reward_to_go(rewards).view(mask.shape)
    energy = torch.where(mask, rewards.score_variance.view(mask.shape), 0.0).cumsum(1)
    order = (~mask).long().argsort(dim=1, stable=True) if packed else torch.arange(mask.shape[1]).expand(mask.shape)
    own, weight, inside = (x.gather(1, order) for x in (returns, energy, mask.double()))
    baseline = torch.zeros_like(own)
    for label in rewards.group.unique():
        rows = (rewards.group == label).nonzero().flatten()
        if len(rows) == 1:
            continue
        share = (own[rows] * weight[rows] * inside[rows]).sum(0) / ((weight[rows] * inside[rows]).sum(0) + spec.epsilon)
        counts = mask[rows].sum(1)
        longest, second = counts.sort(descending=True).values[:2].tolist()
        baseline[rows] = share
        if spec.zero_tail and longest > second:
            baseline[rows[counts.argmax()], second:] = 0
    advantage = (own - baseline) * inside
    yield "P21", torch.zeros_like(own).scatter(1, order, advantage)
