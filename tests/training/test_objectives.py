"""The objectives of the training stack: loss, gradient and metrics of an update are those of plain forwards, however it
is split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.core import AGGREGATES, PENALTIES, SURROGATES, PpoClip, PreferencePairs, RewardLoss, TokenMean, policy_loss
from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.preference.protocol import wpo_weight
from proxima.data.packed_batch import pack
from proxima.data.trajectory import PreferencePair, Trajectory
from proxima.model.policy import Policy
from proxima.model.scalar_model import ScalarModel, load_scalar_model
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.objectives.preference_objective import KtoObjective, PreferenceObjective
from proxima.training.objectives.protocol import Objective
from proxima.training.offline.reward_method import RewardObjective
from proxima.training.offline.sft_method import SftObjective
from tests.campaigns import campaign
from tests.model.rows import assert_close, loaded, plain_log_prob, plain_logits
from tests.tiny import KINDS, tiny
from tests.training.helpers import completions, labeled, pairs, plain_batch, recorded, reward_pairs, trajectories

Plain = tuple[Tensor, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective on items of an update, and loss and metrics by plain forwards of a model.

    Args:
        kind: of the tiny model; `scalar`: of one that gives scores.
        tolerance: of gradients, as a part of the largest.
    """

    objective: Objective[Any]
    items: Sequence[Any]
    plain: Callable[[Any], Plain]
    kind: str = "llama"
    scalar: bool = False
    share_prompt: bool = True
    tolerance: float = 5e-5


def sft(kind: str) -> Case:
    """transformers' own loss: one padded batch, labels of -100 where nothing is learnt."""
    draw, items = np.random.default_rng(2), []
    for group, (before, after) in enumerate(((6, 5), (2, 30), (11, 1), (3, 17), (9, 9))):
        prompt, tokens = (draw.integers(3, 259, n).astype(np.int32) for n in (before, after))
        mask = np.arange(after) % 4 != 1  # holes
        items.append(Trajectory(group=group, prompt_tokens=prompt, tokens=tokens, loss_mask=mask))

    def plain(model: Any) -> Plain:
        tokens, labels, seen = (torch.full((len(items), max(map(len, items))), fill) for fill in (0, -100, 0))
        for i, item in enumerate(items):
            n = len(item.prompt_tokens)
            tokens[i, : len(item)] = torch.tensor([*item.prompt_tokens, *item.tokens])
            labels[i, n : len(item)] = torch.where(torch.from_numpy(item.loss_mask), tokens[i, n : len(item)], -100)
            seen[i, : len(item)] = 1
        return model(input_ids=tokens, labels=labels, attention_mask=seen).loss, {}

    return Case(objective=SftObjective(), items=items, plain=plain, kind=kind, tolerance=2e-5)


def plain_pairs(model, items, *, mean=False, reference=True, alpha=1.0) -> PreferencePairs:
    """`alpha`: weight of the tokens beyond the shorter completion."""

    def reduced(log_prob: Tensor, item: PreferencePair) -> Tensor:
        shared = min(len(item.chosen.tokens), len(item.rejected.tokens))
        weighted = log_prob * torch.where(torch.arange(len(log_prob)) < shared, 1.0, alpha)
        return weighted.mean() if mean else weighted.sum()

    columns = {}
    for name in ("chosen", "rejected"):
        rows = [getattr(item, name) for item in items]
        own = [reduced(plain_log_prob(model, row), item) for row, item in zip(rows, items, strict=True)]
        frozen = [
            torch.from_numpy(row.reference_log_prob) if reference else torch.zeros(len(row.tokens)) for row in rows
        ]
        columns[name] = torch.stack(own)
        columns[f"reference_{name}"] = torch.stack([reduced(x, item) for x, item in zip(frozen, items, strict=True)])
        columns[f"{name}_length"] = torch.tensor([len(row.tokens) for row in rows])
    return PreferencePairs(**columns)


def on_policy_weight(model, row: Trajectory) -> Tensor:
    with torch.no_grad():
        logits, own = plain_logits(model, row), plain_log_prob(model, row)
    squares = logits.softmax(1).square().sum(1).log()
    edges = torch.tensor([0, len(row.tokens)])
    return wpo_weight(own, squares, torch.ones(len(row.tokens), dtype=torch.bool), edges)[0]


def preference(*terms, reference: bool = True, **settings) -> Case:
    """The likelihood of the chosen (`sft`) is a sum, also beside means over tokens; metrics are those of the first."""
    bare = [replace(item, reference_log_prob=None) for item in completions()]

    def plain(model: Any) -> Plain:
        of = partial(plain_pairs, model, pairs(), reference=reference)
        summed = of(alpha=settings.get("ld_alpha", 1.0))
        reduced = of(mean=True) if settings.get("reduce") == "mean" else summed
        weight = torch.ones(5)
        if "on_policy_weights" in settings:
            sides = ([on_policy_weight(model, row) for row in (item.chosen, item.rejected)] for item in pairs())
            weight = torch.stack([chosen * rejected for chosen, rejected in sides])
        given = [summed if type(term) is PREFERENCES["sft"] else reduced for term in terms]
        parts = [(weight * term(own)).mean() for term, own in zip(terms, given, strict=True)]
        loss = sum(w * part for w, part in zip(settings.get("weights", [1.0] * len(parts)), parts, strict=True))
        metrics = {name: metric.value for name, metric in terms[0].metrics(reduced).items()}
        sums = of()
        return loss, metrics | {f"logps/{side}": float(getattr(sums, side).mean()) for side in ("chosen", "rejected")}

    return Case(
        objective=PreferenceObjective(terms=terms, **settings), items=pairs(None if reference else bare), plain=plain
    )


def kto(anchor: str) -> Case:
    """Anchored at the KL of mismatched completions, or at 0."""
    spec, items = Kto(beta=0.3, good_weight=1.5, anchor=anchor), labeled()

    def plain(model: Any) -> Plain:
        def gaps(rows: Sequence[Trajectory]) -> Tensor:
            return torch.stack([plain_log_prob(model, row).sum() - float(row.reference_log_prob.sum()) for row in rows])

        ours, good = gaps([item.completion for item in items]), torch.tensor([item.good for item in items])
        kl = gaps([item.mismatched for item in items]).mean().detach()
        metrics = {"rewards/chosen": 0.3 * float(ours[good].mean())} | ({"kl": float(kl)} if anchor == "kl" else {})
        return spec(ours, torch.zeros(10), good, kl).mean(), metrics

    return Case(objective=KtoObjective(spec=spec), items=items, plain=plain)


def reward(margins: tuple[float | None, ...], share_prompt: bool) -> Case:
    items = reward_pairs(margins)

    def plain(model: Any) -> Plain:
        def score(row: Trajectory) -> Tensor:
            return model(input_ids=torch.tensor([[*row.prompt_tokens, *row.tokens]])).logits[0, 0]

        chosen, rejected = (
            torch.stack([score(getattr(item, name)) for item in items]) for name in ("chosen", "rejected")
        )
        margin = torch.tensor([0.25 if m is None else m for m in margins])
        loss = (-logsigmoid(chosen - rejected - margin) + 0.1 * (chosen + rejected) ** 2).mean()
        return loss, {"accuracy": float((chosen > rejected).float().mean())}

    objective = RewardObjective(loss=RewardLoss(center=0.1), margin=0.25, pad=1)
    return Case(objective=objective, items=items, plain=plain, scalar=True, share_prompt=share_prompt, tolerance=3e-5)


def policy(kind: str = "llama", *, share_prompt: bool = True, **settings) -> Case:
    items = trajectories(kind)
    chosen = {"surrogate": PpoClip(), "aggregate": TokenMean()} | settings

    def plain(model: Any) -> Plain:
        spec = {name: value for name, value in chosen.items() if name in ("surrogate", "aggregate")}
        penalty = chosen["penalties"][0] if "penalties" in chosen else None
        return policy_loss(plain_batch(model, items), **spec, penalty=penalty).value, {}

    objective = PolicyObjective(**chosen)
    assert objective.skips_zero_advantage is not ("penalties" in chosen or "skip_zero_advantage" in chosen)
    return Case(objective=objective, items=items, plain=plain, kind=kind, share_prompt=share_prompt, tolerance=3e-5)


SIGMOID = PREFERENCES["sigmoid"]()
SMALL = ("sigmoid", "ipo", "sft", "aot", "aot_unpaired")  # of each way to reduce a batch
CASES: dict[str, Callable[[], Case]] = {f"sft of {kind}": partial(sft, kind) for kind in KINDS}
CASES |= {kind: partial(preference, PREFERENCES[kind]()) for kind in sorted(PREFERENCES)}
CASES |= {f"policy of {kind}": partial(policy, kind) for kind in KINDS}
CASES |= {f"policy of {kind} apart": partial(policy, kind, share_prompt=False) for kind in ("llama", "gpt2")}
CASES |= {
    f"aggregate {name}": partial(policy, surrogate=SURROGATES["cppo"](), aggregate=aggregate())
    for name, aggregate in AGGREGATES.items()
}
CASES["policy without a skip"] = partial(policy, skip_zero_advantage=False)
CASES["policy with a penalty"] = partial(policy, penalties=[PENALTIES["k3"](coefficient=0.3)])
MIXTURE = [PREFERENCES[kind](beta=0.2) for kind in ("sigmoid", "sft", "aot")]
CASES |= {
    "mixture": partial(preference, *MIXTURE, weights=(1.0, 0.3, 0.5)),
    "mean": partial(preference, PREFERENCES["sigmoid"](beta=2.0), PREFERENCES["sft"](), reduce="mean"),
    "no reference": partial(preference, PREFERENCES["hinge"](), reference=False),
    "ld_alpha": partial(preference, SIGMOID, ld_alpha=0.25),
    "on_policy_weights": partial(preference, SIGMOID, on_policy_weights=True),
    "kto": partial(kto, "kl"),
    "kto without an anchor": partial(kto, "zero"),
    "reward": partial(reward, (0.5, -1.0, 2.0), True),
    "reward of the same margin": partial(reward, (None, None, None), False),
}
BROAD = [kind for kind in sorted(PREFERENCES) if kind not in SMALL]
TEST = "tests/training/test_objectives.py::test_no_split_changes_loss_gradient_or_metrics[sigmoid]"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in CASES if name not in BROAD), *campaign(TEST, BROAD)])
def test_no_split_changes_loss_gradient_or_metrics(name, tiny_model):
    case = CASES[name]()

    def scalar():
        return load_scalar_model(str(tiny_model(case.kind)), device="cpu", new_head=0.3)

    plain = scalar().model if case.scalar else tiny(case.kind)
    loss, metrics = case.plain(plain)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for budget in (1, 40, 10_000):
        made = (ScalarModel, scalar()) if case.scalar else (Policy, loaded(case.kind))
        model = made[0](made[1], share_prompt=case.share_prompt)
        gradient, result = recorded(case.objective, case.items, budget, model=model)
        assert_close(gradient, expected, case.tolerance)
        assert result.metrics["loss"] == pytest.approx(float(loss), rel=2e-6, abs=5e-7)  # float32 sums
        for key, value in metrics.items():
            assert result.metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key


def test_kto_without_a_mismatched_completion_is_refused():
    items = [replace(item, mismatched=None) for item in labeled()]
    with pytest.raises(ValueError, match="KTO needs a mismatched completion in every item; row 0 lacks it"):
        recorded(KtoObjective(spec=Kto()), items)


def test_a_pair_shares_its_prompt():
    assert len(pack(RewardObjective().sequences(reward_pairs()[0])).tokens) == 4 + 3 + 6
