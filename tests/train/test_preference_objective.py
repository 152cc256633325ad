"""DPO's family in the training stack: their gradients are those of one unsplit batch, however it is split."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from proxima.core import PreferencePairs
from proxima.core.preference import PREFERENCES
from proxima.core.preference.summed_log_prob import wpo_weight
from proxima.data import PreferencePair
from proxima.train import PreferenceObjective
from tests.campaigns import campaign
from tests.model.rows import assert_close, plain_log_prob, plain_logits, rows
from tests.tiny import tiny
from tests.train.helpers import recorded, unsplit

BUDGETS = (1, 40, 10_000)


@cache
def completions():
    """Ten trajectories of five prompts, each with the log-probs of a reference that is a little off."""
    plain = rows((6, (5, 1)), (2, (3, 7)), (11, (4, 12)), (3, (2, 8)), (4, (6, 6)))
    draw = np.random.default_rng(3)
    model = tiny("llama")
    with torch.no_grad():
        own = [plain_log_prob(model, row).numpy() for row in plain]
    moved = [x + draw.normal(0, 0.4, len(x)).astype(np.float32) for x in own]
    return tuple(replace(row, reference_log_prob=x) for row, x in zip(plain, moved, strict=True))


def pairs(items=None):
    items = items or completions()
    return [PreferencePair(row=i, chosen=items[2 * i], rejected=items[2 * i + 1]) for i in range(5)]


def plain_pairs(model, items, *, mean=False, reference=True):
    def of(row):
        return plain_log_prob(model, row).mean() if mean else plain_log_prob(model, row).sum()

    def frozen(row):
        x = torch.from_numpy(row.reference_log_prob)
        return (x.mean() if mean else x.sum()) * reference

    sides = {"chosen": [item.chosen for item in items], "rejected": [item.rejected for item in items]}
    return PreferencePairs(
        **{name: torch.stack([of(row) for row in side]) for name, side in sides.items()},
        **{f"reference_{name}": torch.stack([frozen(row) for row in side]) for name, side in sides.items()},
        **{f"{name}_length": torch.tensor([len(row.tokens) for row in side]) for name, side in sides.items()},
    )


@cache
def whole_pairs():
    """Pairs, and what a plain forward of the model says of them."""
    items = pairs()
    with torch.no_grad():
        return items, plain_pairs(tiny("llama"), items)


@cache
def gradient_of(kind):
    return unsplit(lambda model: PREFERENCES[kind]()(plain_pairs(model, whole_pairs()[0])).mean())


SMALL = ("sigmoid", "ipo", "sft", "aot", "aot_unpaired")  # of each way to reduce a batch
SPLITS = [(kind, 1) for kind in SMALL] + [(kind, budget) for kind in ("sigmoid", "aot") for budget in BUDGETS[1:]]
SIGMOID = "tests/train/test_preference_objective.py::test_no_split_changes_the_gradient_of_a_preference_loss[sigmoid-1]"
SPLITS += campaign(SIGMOID, [(kind, 1) for kind in sorted(PREFERENCES) if kind not in SMALL])


@pytest.mark.parametrize(("kind", "budget"), SPLITS)
def test_no_split_changes_the_gradient_of_a_preference_loss(kind, budget):
    spec, (items, whole) = PREFERENCES[kind](), whole_pairs()
    actual, result = recorded(PreferenceObjective(terms=[spec]), items, budget)
    wanted, value = gradient_of(kind)
    assert_close(actual, wanted, 5e-5)
    assert result.metrics["loss"] == pytest.approx(value, rel=2e-5)
    for name, metric in spec.metrics(whole).items():
        assert result.metrics[name] == pytest.approx(metric.value, rel=1e-4, abs=1e-6)
    assert result.metrics["logps/chosen"] == pytest.approx(float(whole.chosen.mean()), rel=1e-5)
    assert result.metrics["logps/rejected"] == pytest.approx(float(whole.rejected.mean()), rel=1e-5)


def same_gradient(objective, loss_of, items=None):
    """Of the split that cuts most, and of none."""
    wanted, value = unsplit(loss_of)
    for budget in (BUDGETS[0], BUDGETS[-1]):
        actual, result = recorded(objective, items or whole_pairs()[0], budget)
        assert_close(actual, wanted, 5e-5)
        assert result.metrics["loss"] == pytest.approx(value, rel=2e-5)
    return result


def test_a_mixture_is_a_weighted_sum_with_the_metrics_of_its_first():
    kinds, weights, (items, whole) = ("sigmoid", "sft", "aot"), (1.0, 0.3, 0.5), whole_pairs()
    specs = [PREFERENCES[kind](beta=0.2) for kind in kinds]
    result = same_gradient(
        PreferenceObjective(terms=specs, weights=weights),
        lambda model: sum(w * spec(plain_pairs(model, items)).mean() for w, spec in zip(weights, specs, strict=True)),
    )
    margins = specs[0].metrics(whole)["rewards/margins"].value
    assert result.metrics["rewards/margins"] == pytest.approx(margins, rel=1e-4)


def test_the_mean_over_tokens_leaves_the_likelihood_of_the_chosen_a_sum():
    items, terms = pairs(), [PREFERENCES["sigmoid"](beta=2.0), PREFERENCES["sft"]()]

    def loss(model):
        means, sums = (plain_pairs(model, items, mean=mean) for mean in (True, False))
        return terms[0](means).mean() + terms[1](sums).mean()

    same_gradient(PreferenceObjective(terms=terms, reduce="mean"), loss)


def test_without_reference_log_probs_the_reference_is_uniform():
    items, spec = pairs(), PREFERENCES["hinge"]()
    free = [replace(item, reference_log_prob=None) for item in completions()]
    same_gradient(
        PreferenceObjective(terms=[spec]),
        lambda model: spec(plain_pairs(model, items, reference=False)).mean(),
        pairs(free),
    )


def test_tokens_beyond_the_shorter_completion_weigh_less():
    items = pairs()

    def cut(model, item, side, alpha):
        row = getattr(item, side)
        shared = min(len(item.chosen.tokens), len(item.rejected.tokens))
        weight = torch.where(torch.arange(len(row.tokens)) < shared, 1.0, alpha)
        frozen = torch.from_numpy(row.reference_log_prob)
        return ((plain_log_prob(model, row) - frozen) * weight).sum()

    def loss(model):
        gap = [cut(model, item, "chosen", 0.25) - cut(model, item, "rejected", 0.25) for item in items]
        return -torch.nn.functional.logsigmoid(0.1 * torch.stack(gap)).mean()

    same_gradient(PreferenceObjective(terms=[PREFERENCES["sigmoid"]()], ld_alpha=0.25), loss)


def test_pairs_weighted_by_how_on_policy_they_are():
    items, spec = pairs(), PREFERENCES["sigmoid"]()

    def weight(model, row):
        with torch.no_grad():
            logits, own = plain_logits(model, row), plain_log_prob(model, row)
        squares = logits.softmax(1).square().sum(1).log()
        edges = torch.tensor([0, len(row.tokens)])
        return wpo_weight(own, squares, torch.ones(len(row.tokens), dtype=torch.bool), edges)[0]

    def loss(model):
        weights = torch.stack([weight(model, item.chosen) * weight(model, item.rejected) for item in items])
        return (weights * spec(plain_pairs(model, items))).mean()

    same_gradient(PreferenceObjective(terms=[spec], on_policy_weights=True), loss)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"terms": []}, "terms=.* must name a loss"),
        ({"weights": (1.0, 2.0)}, r"weights=\(1.0, 2.0\) must be finite numbers >= 0, one for each of the 1 losses"),
        ({"weights": (-1.0,)}, "weights="),
        ({"weights": (0.0,)}, r"weights=\(0.0,\) must not all be 0"),
        ({"ld_alpha": 1.5}, r"ld_alpha=1.5 must be in \[0, 1\]"),
        ({"reduce": "mean", "ld_alpha": 0.5}, "ld_alpha=0.5 must be 1 with reduce=mean"),
        ({"reduce": "mean", "terms": [PREFERENCES["ipo"]()]}, "reduce='mean' must be sum: Ipo takes the mean"),
        ({"on_policy_weights": True, "terms": [PREFERENCES["aot"]()]}, "on_policy_weights=True must be false: .* Aot"),
    ],
)
def test_settings_that_contradict_one_another(fields, message):
    with pytest.raises(ValueError, match=message):
        PreferenceObjective(**({"terms": [PREFERENCES["sigmoid"]()]} | fields))
