"""KTO in the training stack: its gradient is that of one unsplit batch, however it is split."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core.preference.kto import Kto
from proxima.data import LabeledCompletion
from proxima.train.objectives.kto_objective import KtoObjective
from tests.model.rows import assert_close, plain_log_prob
from tests.tiny import tiny
from tests.train.helpers import recorded, unsplit
from tests.train.test_preference_objective import BUDGETS, completions


def labeled(items=None):
    items = items or completions()
    return [
        LabeledCompletion(
            row=i,
            completion=items[i],
            good=i % 3 != 1,
            mismatched=replace(items[(i + 3) % 10], prompt_tokens=items[i].prompt_tokens, group=items[i].group),
        )
        for i in range(10)
    ]


@pytest.mark.parametrize(("anchor", "budget"), [("kl", BUDGETS[0]), ("kl", BUDGETS[-1]), ("zero", BUDGETS[0])])
def test_kto_anchors_at_the_kl_of_mismatched_completions(anchor, budget):
    spec, items = Kto(beta=0.3, good_weight=1.5, anchor=anchor), labeled()

    def gap(model, row):
        return plain_log_prob(model, row).sum() - float(row.reference_log_prob.sum())

    def kl(model):
        with torch.no_grad():
            return torch.stack([gap(model, item.mismatched) for item in items]).mean()

    def loss(model):
        ours = torch.stack([gap(model, item.completion) for item in items])
        good = torch.tensor([item.good for item in items])
        return spec(ours, torch.zeros(10), good, kl(model)).mean()

    actual, result = recorded(KtoObjective(spec=spec), items, budget)
    wanted, value = unsplit(loss)
    assert_close(actual, wanted, 5e-5)
    assert result.metrics["loss"] == pytest.approx(value, rel=2e-5)
    if anchor == "kl":
        assert result.metrics["kl"] == pytest.approx(float(kl(tiny("llama"))), rel=1e-4)
    with torch.no_grad():
        rewards = [0.3 * float(gap(tiny("llama"), item.completion)) for item in items if item.good]
    assert result.metrics["rewards/chosen"] == pytest.approx(np.mean(rewards), rel=1e-4)


def test_kto_without_a_mismatched_completion_is_refused():
    items = [replace(item, mismatched=None) for item in labeled()]
    with pytest.raises(ValueError, match="KTO needs a mismatched completion in every item; row 0 lacks it"):
        recorded(KtoObjective(spec=Kto()), items)
