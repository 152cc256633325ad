"""From rewards to advantages of tokens, with a critic or without; and the KL in the reward, of tokens or of answers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.protocol import TokenRewards
from proxima.core.advantage.token import Gae, ReinforcePp, place_scores, reward_to_go, whiten
from proxima.core.reward_kl import RewardKl, ShapedReward
from proxima_peers.shadow.advantage_choices import COUNT, COUNTS, EPSILON, PLACE, PLACES
from proxima_peers.shadow.choices import ESTIMATES, Convention, TriedConvention
from proxima_peers.shadow.dump import Dump

ESTIMATE = "estimate"
DISCOUNT = "γ and λ"
STANDARD = "standardised"
KL_REWARD = "KL in the reward"
KL_POLICY = "KL of"
SCORED = "tokens with a reward"
GAE = "GAE"
TO_GO = "the reward to go"
STANDARDS = {False: "no", True: "over the tokens in the loss"}
POLICIES = {"old": "the policy before the update", "rollout": "the engine's policy"}
TOKENS = {"loss": "those in the loss", "mask": "all of the answers"}
EPSILONS = (1e-8, 1e-5, 0.0)


@dataclass(frozen=True)
class Shaped:
    """Rewards under a convention of the KL in them: `reward` [B * T] of tokens, `total` [B] of answers; `mask` [B, T]
    bool, the tokens that have one."""

    convention: Convention
    reward: Tensor
    total: Tensor
    mask: Tensor


def shaped_rewards(dump: Dump) -> Iterator[Shaped]:
    """The rewards of the dump under all conventions, the stated one first; there is one if no KL is stated and the
    answers have no rejected tokens."""
    masks = {"loss": dump.loss_mask, "mask": dump["mask"]}
    if bool((masks["loss"] == masks["mask"]).all()):
        del masks["mask"]
    edges = torch.arange(len(dump.loss_mask) + 1) * dump.shape[1]
    given = dump.settings.reward_kl
    score = dump["reward"]
    for name, mask in masks.items():
        begun: Convention = {}
        if len(masks) > 1:
            begun[SCORED] = TOKENS[name]
        if given is not None and "reference_log_prob" in dump:
            for chosen, made in _with_kl_in_reward(dump, given, mask):
                yield Shaped(begun | chosen, made.reward, made.total, mask)
        if given is not None:
            begun[KL_REWARD] = "none"
        plain = place_scores(score, mask.flatten(), edges)
        yield Shaped(begun, plain, score, mask)


def _with_kl_in_reward(dump: Dump, given: RewardKl, mask: Tensor) -> Iterator[tuple[Convention, ShapedReward]]:
    """The rewards with a KL in them, the stated estimator first, of each policy in the dump."""
    edges = torch.arange(len(mask) + 1) * dump.shape[1]
    stated = stated_kl(given)
    policies = [policy for policy in POLICIES if f"{policy}_log_prob" in dump]
    for said in sorted(ESTIMATES, key=lambda said: said != stated):
        kind, more = ESTIMATES[said]
        fields: dict[str, Any] = {"estimator": kind, "limit": float("inf")} | more
        spec = replace(given, adaptive=None, **fields)
        for policy in policies:
            log_prob = dump[f"{policy}_log_prob"].flatten()
            reference = dump["reference_log_prob"].flatten()
            made = spec(dump["reward"], log_prob, reference, mask.flatten(), edges)
            yield {KL_REWARD: said, KL_POLICY: POLICIES[policy]}, made


def stated_kl(spec: Any) -> str:
    """The name of the stated estimator."""
    name = {"abs": "|k1|"}.get(spec.estimator, spec.estimator)
    if name == "k3" and spec.limit == 10.0:
        return "k3 up to 10"
    return str(name)


def stated_rewards(dump: Dump) -> Convention:
    """What the settings say on the axes of the rewards."""
    given = dump.settings.reward_kl
    estimator = "none" if given is None else stated_kl(given)
    policy = "old" if "old_log_prob" in dump else "rollout"
    return {SCORED: TOKENS["loss"], KL_REWARD: estimator, KL_POLICY: POLICIES[policy]}


def stated_token_advantage(spec: Any) -> Convention:
    """What a spec says on the axes of an estimate; empty for one that they can't express."""
    if isinstance(spec, Gae):
        estimate = GAE
        discount = f"{spec.gamma:g} and {spec.lam:g}"
        standard = spec.whiten
        sample = spec.whiten_ddof == 1
        inside = spec.whiten_epsilon == "inside"
    elif isinstance(spec, ReinforcePp):
        estimate = TO_GO
        discount = f"{spec.gamma:g} and 1"
        standard = True
        sample = True
        inside = True
    else:
        return {}
    count = "sample" if sample else "population"
    place = "variance" if inside else "deviation"
    return {
        ESTIMATE: estimate,
        DISCOUNT: discount,
        STANDARD: STANDARDS[standard],
        COUNT: COUNTS[count],
        EPSILON: "1e-08",
        PLACE: PLACES[place],
    }


def rewards_of_tokens(dump: Dump, shaped: Shaped) -> TokenRewards:
    """The input of a token advantage."""
    edges = torch.arange(len(dump.loss_mask) + 1) * dump.shape[1]
    value = dump["value"].flatten() if "value" in dump else None
    group = dump.get("group")
    return TokenRewards(
        reward=shaped.reward, loss_mask=shaped.mask.flatten(), cu_seqlens=edges, value=value, group=group
    )


def token_advantage_candidates(dump: Dump, spec: Any) -> Iterator[TriedConvention]:
    """All conventions, with the advantages of the tokens in the loss. GAE needs the critic's values in the dump."""
    discounts = dict.fromkeys([(getattr(spec, "gamma", 1.0), getattr(spec, "lam", 1.0)), (1.0, 1.0), (1.0, 0.95)])
    inside = dump.loss_mask.flatten()
    for shaped in shaped_rewards(dump):
        rewards = rewards_of_tokens(dump, shaped)
        raw: dict[tuple[str, str], Tensor] = {}
        for gamma, lam in discounts:
            raw[TO_GO, f"{gamma:g} and 1"] = reward_to_go(rewards, gamma)
            if rewards.value is not None:
                raw[GAE, f"{gamma:g} and {lam:g}"] = Gae(gamma, lam, whiten=False)(rewards)
        for (estimate, discount), plain in raw.items():
            begun = shaped.convention | {ESTIMATE: estimate, DISCOUNT: discount}
            size = plain[inside].abs().max() + shaped.total.abs().max()
            tokens = int(inside.sum())
            yield TriedConvention(begun | {STANDARD: STANDARDS[False]}, plain[inside], size.expand(tokens))
            spread = size
            if tokens > 1:
                spread = plain[inside].std().clamp(min=1e-12)
            for chosen, value in _standardised(plain, inside):
                yield TriedConvention(begun | chosen, value, (size / spread).expand(tokens))


def _standardised(plain: Tensor, inside: Tensor) -> Iterator[tuple[Convention, Tensor]]:
    """The ways to standardise advantages [N] over the tokens in the loss, with the result for these."""
    for count, ddof in (("sample", 1), ("population", 0)):
        for epsilon in EPSILONS:
            said = {STANDARD: STANDARDS[True], COUNT: COUNTS[count], EPSILON: f"{epsilon:g}"}
            outside = whiten(plain, inside, epsilon=epsilon, ddof=ddof, place="outside")[inside]
            if not epsilon:
                yield said, outside
                continue
            yield said | {PLACE: PLACES["deviation"]}, outside
            under_root = whiten(plain, inside, epsilon=epsilon, ddof=ddof, place="inside")[inside]
            yield said | {PLACE: PLACES["variance"]}, under_root
