"""DPO's family in the training stack: their gradients are those of one unsplit batch, however it is split."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from proxima.core.preference import PREFERENCES, PreferencePairs, wpo_weight
from proxima.data import PreferencePair
from proxima.model import Policy
from proxima.train import PreferenceObjective, TrainStack
from tests.model.rows import loaded, plain_log_prob, rows
from tests.tiny import tiny
from tests.train.helpers import assert_close

BUDGETS = (1, 40, 10_000)


def completions():
    """Ten trajectories of five prompts, each with the log-probs of a reference that is a little off."""
    plain = rows((6, (5, 1)), (2, (3, 7)), (11, (4, 12)), (3, (2, 8)), (4, (6, 6)))
    draw = np.random.default_rng(3)
    model = tiny("llama")
    with torch.no_grad():
        own = [plain_log_prob(model, row).numpy() for row in plain]
    moved = [x + draw.normal(0, 0.4, len(x)).astype(np.float32) for x in own]
    return [replace(row, reference_log_prob=x) for row, x in zip(plain, moved, strict=True)]


def pairs():
    items = completions()
    return [PreferencePair(row=i, chosen=items[2 * i], rejected=items[2 * i + 1]) for i in range(5)]


def gradients(objective, items, budget):
    stack = TrainStack(Policy(loaded("llama")), max_grad_norm=0.0, tokens_per_micro_batch=budget)
    gradient = {}
    names = dict(stack.model.model.named_parameters())
    stack.optimizer.step = lambda: gradient.update({name: p.grad.clone() for name, p in names.items()})
    return gradient, stack.update(objective, [items])


def expected(loss_of):
    """Gradient and value of `loss_of(model)`: plain forward passes, one backward pass."""
    model = tiny("llama")
    loss = loss_of(model)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(loss.detach())


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
    return expected(lambda model: PREFERENCES[kind]()(plain_pairs(model, whole_pairs()[0])).mean())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", sorted(PREFERENCES))
def test_no_split_changes_the_gradient_of_a_preference_loss(kind, budget):
    spec, (items, whole) = PREFERENCES[kind](), whole_pairs()
    actual, result = gradients(PreferenceObjective(terms=[spec]), items, budget)
    wanted, value = gradient_of(kind)
    assert_close(actual, wanted, 5e-5)
    assert result.metrics["loss"] == pytest.approx(value, rel=2e-5)
    for name, metric in spec.metrics(whole).items():
        assert result.metrics[name] == pytest.approx(metric.value, rel=1e-4, abs=1e-6)
    assert result.metrics["logps/chosen"] == pytest.approx(float(whole.chosen.mean()), rel=1e-5)
    assert result.metrics["logps/rejected"] == pytest.approx(float(whole.rejected.mean()), rel=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_mixture_is_a_weighted_sum_with_the_metrics_of_its_first(budget):
    kinds, weights, items = ("sigmoid", "sft", "aot"), (1.0, 0.3, 0.5), pairs()
    specs = [PREFERENCES[kind](beta=0.2) for kind in kinds]
    actual, result = gradients(PreferenceObjective(terms=specs, weights=weights), items, budget)
    wanted, value = expected(
        lambda model: sum(w * spec(plain_pairs(model, items)).mean() for w, spec in zip(weights, specs, strict=True))
    )
    assert_close(actual, wanted, 5e-5)
    assert result.metrics["loss"] == pytest.approx(value, rel=2e-5)
    with torch.no_grad():
        margins = specs[0].metrics(plain_pairs(tiny("llama"), items))["rewards/margins"].value
    assert result.metrics["rewards/margins"] == pytest.approx(margins, rel=1e-4)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_mean_over_tokens(budget):
    spec, items = PREFERENCES["sigmoid"](beta=2.0), pairs()
    actual, _ = gradients(PreferenceObjective(terms=[spec], reduce="mean"), items, budget)
    wanted, _ = expected(lambda model: spec(plain_pairs(model, items, mean=True)).mean())
    assert_close(actual, wanted, 5e-5)


def test_the_likelihood_of_the_chosen_is_summed_under_either_convention():
    items = pairs()
    terms = [PREFERENCES["sigmoid"](), PREFERENCES["sft"]()]
    actual, _ = gradients(PreferenceObjective(terms=terms, reduce="mean"), items, 40)
    wanted, _ = expected(
        lambda model: terms[0](plain_pairs(model, items, mean=True)).mean() + terms[1](plain_pairs(model, items)).mean()
    )
    assert_close(actual, wanted, 5e-5)


def test_without_reference_log_probs_the_reference_is_uniform():
    items, spec = pairs(), PREFERENCES["hinge"]()
    free = [
        replace(
            item,
            chosen=replace(item.chosen, reference_log_prob=None),
            rejected=replace(item.rejected, reference_log_prob=None),
        )
        for item in items
    ]
    actual, _ = gradients(PreferenceObjective(terms=[spec]), free, 40)
    wanted, _ = expected(lambda model: spec(plain_pairs(model, items, reference=False)).mean())
    assert_close(actual, wanted, 5e-5)


def test_tokens_beyond_the_shorter_completion_weigh_less():
    items, spec = pairs(), PREFERENCES["sigmoid"]()

    def cut(model, item, side, alpha):
        row = getattr(item, side)
        shared = min(len(item.chosen.tokens), len(item.rejected.tokens))
        weight = torch.where(torch.arange(len(row.tokens)) < shared, 1.0, alpha)
        frozen = torch.from_numpy(row.reference_log_prob)
        return ((plain_log_prob(model, row) - frozen) * weight).sum()

    def loss(model):
        gap = [cut(model, item, "chosen", 0.25) - cut(model, item, "rejected", 0.25) for item in items]
        return -torch.nn.functional.logsigmoid(0.1 * torch.stack(gap)).mean()

    actual, _ = gradients(PreferenceObjective(terms=[spec], ld_alpha=0.25), items, 40)
    assert_close(actual, expected(loss)[0], 5e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_pairs_weighted_by_how_on_policy_they_are(budget):
    items, spec = pairs(), PREFERENCES["sigmoid"]()

    def weight(model, row):
        tokens = torch.tensor([*row.prompt_tokens, *row.tokens])
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(row.prompt_tokens) - 1 : -1]
            own = plain_log_prob(model, row)
        squares = logits.softmax(1).square().sum(1).log()
        edges = torch.tensor([0, len(row.tokens)])
        return wpo_weight(own, squares, torch.ones(len(row.tokens), dtype=torch.bool), edges)[0]

    def loss(model):
        weights = torch.stack([weight(model, item.chosen) * weight(model, item.rejected) for item in items])
        return (weights * spec(plain_pairs(model, items))).mean()

    actual, _ = gradients(PreferenceObjective(terms=[spec], on_policy_weights=True), items, budget)
    assert_close(actual, expected(loss)[0], 5e-5)


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
