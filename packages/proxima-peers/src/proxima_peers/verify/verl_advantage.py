"""verl's advantage estimators."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.group import Gdpo, Gpg, Grpo, GrpoPassk, Opo, ReinforcePpBaseline, Remax, Rloo
from proxima.core.advantage.protocol import TokenRewards
from proxima.core.advantage.token import Gae, OptimalTokenBaseline, ReinforcePp, reward_to_go
from proxima.data.outcomes import Outcomes
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Check, Record, Tracked
from proxima_peers.verify.variants import in_groups_of_one, with_partners


def estimator(record: Record) -> str:
    """The name of the estimator (grpo, gae …), from the function named in `source`."""
    name = record.source.split("core_algos.compute_")[1].split(" ")[0]
    for ending in ("_advantage_return", "_outcome_advantage", "_advantage"):
        name = name.removesuffix(ending)
    return name


def group_spec(name: str, p: Tracked) -> Any:
    """Our spec for a verl estimator of whole completions; None if there is none."""
    scale: Any = "group" if p.get("norm_adv_by_std_in_grpo", True) else "none"
    epsilon = p.get("epsilon", 1e-6)  # accepted by all estimators, used by the variants of GRPO
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
    if name not in makers:
        return None
    return makers[name]()


def _weights(p: Tracked) -> tuple[float, ...] | None:
    given = p.get("gdpo_reward_weights")
    if given is None:
        return None
    if isinstance(given, dict):
        given = [given[key] for key in p["gdpo_reward_keys"]]
    return tuple(given)


def verl_advantages(record: Record) -> Iterator[Attempt]:
    """core_algos.compute_*_advantage"""
    name = estimator(record)
    spec = group_spec(name, record.params)
    if spec is not None:
        yield from _by_group(record, name, spec)
    else:
        yield from _by_token(record, name)


def _by_group(record: Record, name: str, spec: Any) -> Iterator[Attempt]:
    mask = record.mask
    loose = (1e-9, 1e-11)
    if name in ("grpo_vectorized", "gdpo"):  # float32 inside
        loose = (1e-5, 1e-6)
    elif name.startswith("reinforce"):
        loose = (1e-7, 1e-8)
    elif name == "gpg":  # alpha is a quotient of integers in float32
        loose = (2e-7, 1e-8)
    group = torch.tensor(record.inputs["group_ids"])
    parts = None
    if record.has("rewards"):
        names = record.params.get("gdpo_reward_keys") or list(record.inputs.section("rewards"))
        parts = torch.stack([as_tensor(record.inputs.section("rewards")[key]) for key in names], 1)
        reward = parts.sum(1)
    else:
        record.params.mark_irrelevant("gdpo_reward_keys", "gdpo_reward_weights")
        reward = as_tensor(record.inputs["token_level_rewards"]).sum(1)  # over all positions, masked or not (P15)
    o = replace(Outcomes.of(reward, group), length=mask.sum(1), parts=parts)
    names = [name for name in ("advantages", "returns") if name in record.expected]

    def checks(advantage: Tensor, rtol: float, atol: float) -> list[Check]:
        ours = torch.where(mask, advantage[:, None], 0.0)  # verl's returns of these estimators are the advantages
        scale = float(reward.abs().max()) if rtol < 1e-6 else 0.0  # of the values from which the mean is subtracted
        return [record.expect(name, ours, rtol, atol, scale=scale) for name in names]

    yield None, checks(spec(o), *loose)
    if bool(in_groups_of_one(group).any()):  # a mean and a deviation of float32: 1 + 1e-6 is 2e-8 off
        yield "P16", checks(_with_raw_singles(spec, o), max(loose[0], 2e-7), max(loose[1], 1e-8))


def _with_raw_singles(spec: Any, o: Outcomes) -> Tensor:
    """The advantages if a group of one has mean 0 and deviation 1, before any whitening, as in verl (P16)."""
    if isinstance(spec, Rloo):
        more = with_partners(o, "zero", "none")
    elif isinstance(spec, Opo):
        more = with_partners(o, "standard", "own")
    else:
        more = with_partners(o, "standard", "none")
    if isinstance(spec, Gpg):  # partners would count as completions with a reward
        share = (o.reward != 0).double().mean()
        of_all = (more.reward != 0).double().mean()
        spec = replace(spec, f_norm=float(spec.f_norm * share / of_all))
    out: Tensor = spec(more)[: len(o)]
    return out


def _by_token(record: Record, name: str) -> Iterator[Attempt]:
    p = record.params
    mask = record.mask
    # every position is a token; the mask says which are in the loss
    edges = torch.arange(len(mask) + 1) * mask.shape[1]
    keys = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared")
    flat = {key: record.tensor(key).flatten() for key in keys if record.has(key)}
    energy = None
    if "sum_pi_squared" in flat:
        energy = 1 - 2 * flat["old_log_probs"].exp() + flat["sum_pi_squared"]
        if record.has("rollout_is_weights"):
            energy = energy * record.tensor("rollout_is_weights").flatten().square()
    group = None
    if record.has("group_ids"):
        group = torch.tensor(record.inputs["group_ids"])
    more = {"value": flat.get("values"), "group": group, "score_variance": energy}
    rewards = TokenRewards(reward=flat["token_level_rewards"], loss_mask=mask.flatten(), cu_seqlens=edges, **more)

    def checks(advantage: Tensor, returns: Tensor) -> list[Check]:
        numbers = {"advantages": advantage.view(mask.shape), "returns": returns.view(mask.shape)}
        return record.checks(numbers, "", 1e-7, 1e-8, where=mask)  # beyond the mask verl leaves garbage (P18)

    if name == "gae":
        gae = Gae(p["gamma"], p["lam"])
        yield None, checks(gae(rewards), gae.returns(rewards))
        return
    if name == "reinforce_plus_plus":
        returns = reward_to_go(rewards, p["gamma"])
        yield None, checks(ReinforcePp(p["gamma"])(rewards), returns)
        return
    returns = reward_to_go(rewards, 1.0)
    if name == "remax":  # a reward-to-go is the reward of the rest of the completion
        left = Outcomes.of(returns, torch.arange(len(returns)))
        baseline = record.tensor("reward_baselines").repeat_interleave(mask.shape[1])
        yield None, checks(Remax()(replace(left, baseline=baseline)), returns)
    elif name in ("optimal_token_baseline", "multi_turn_optimal_token_baseline"):
        spec = OptimalTokenBaseline(p.get("epsilon", 1e-8), p.get("handle_zero_tail", True))
        for reason, advantage in _token_baselines(rewards, spec, mask, packed=name.startswith("multi")):
            yield reason, checks(advantage, returns)


def _token_baselines(
    rewards: TokenRewards, spec: OptimalTokenBaseline, mask: Tensor, *, packed: bool
) -> Iterator[tuple[str | None, Tensor]]:
    """Our advantages; those with raw returns for a group of one (P16); those with positions as columns (P21), unless
    `packed`."""
    yield None, spec(rewards)
    assert rewards.group is not None
    single = in_groups_of_one(rewards.group)
    if packed:  # verl's packed version has no rows without a token in its groups
        some = mask.any(1)
        single = some & ((rewards.group[:, None] == rewards.group[some][None]).sum(1) == 1)
    holes = not packed and bool((mask[:, 1:] & ~mask[:, :-1]).any())
    alone = bool(single.any())
    positions = len(rewards.reward)
    if alone:
        yield "P16", spec(_mirrored(rewards, single))[:positions]
    if holes:
        yield "P21", _by_column(rewards, spec, mask.shape[1])
    if alone and holes:
        yield "P16, P21", _by_column(_mirrored(rewards, single), spec, mask.shape[1])[:positions]


def _mirrored(rewards: TokenRewards, single: Tensor) -> TokenRewards:
    """The rewards with a partner of the opposite reward for each row in `single`, whose baseline is then 0 (P16)."""
    rows = len(rewards.cu_seqlens) - 1

    def joined(values: Tensor | None, sign: float = 1.0) -> Tensor:
        assert values is not None
        table = values.view(rows, -1)
        partners = table[single]
        if sign < 0:
            partners = -partners
        return torch.cat([table, partners]).flatten()

    assert rewards.group is not None
    count = rows + int(single.sum())
    width = len(rewards.reward) // rows
    own = torch.where(single, torch.arange(rows) - rows - int(rewards.group.abs().max()), rewards.group)
    return TokenRewards(
        reward=joined(rewards.reward, -1.0),
        loss_mask=joined(rewards.loss_mask),
        cu_seqlens=torch.arange(count + 1) * width,
        group=torch.cat([own, own[single]]),
        score_variance=joined(rewards.score_variance),
    )


def _by_column(rewards: TokenRewards, spec: OptimalTokenBaseline, width: int) -> Tensor:
    """The advantages if positions are columns and a hole is a token without weight; lengths for the zero tail are still
    token counts (P21)."""
    assert rewards.score_variance is not None and rewards.group is not None
    mask = rewards.loss_mask.view(-1, width)
    total = torch.where(mask, rewards.score_variance.view(mask.shape), 0.0).cumsum(1) * mask  # 0 in a hole
    filled = replace(
        rewards,
        reward=torch.where(rewards.loss_mask, rewards.reward, 0.0),
        loss_mask=mask.flip(1).cummax(1).values.flip(1).flatten(),
        score_variance=total.diff(dim=1, prepend=torch.zeros(len(mask), 1, dtype=total.dtype)).flatten(),
    )
    out = torch.where(mask, replace(spec, zero_tail=False)(filled).view(mask.shape), 0.0)
    if spec.zero_tail:
        returns = reward_to_go(rewards).view(mask.shape)
        for label in rewards.group.unique():
            rows = (rewards.group == label).nonzero().flatten()
            counts = mask[rows].sum(1).sort(descending=True)
            if len(rows) > 1 and counts.values[0] > counts.values[1]:
                longest = rows[counts.indices[0]]
                beyond = int(counts.values[1])
                out[longest, beyond:] = returns[longest, beyond:]
    return out.flatten()
