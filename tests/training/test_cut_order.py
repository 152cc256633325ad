"""No order of micro-batches changes a result: what is decided of a whole update belongs to items, not to places."""

import numpy as np
import pytest
import torch

from proxima.core import Importance, TokenMean
from proxima.core.correction.rejection import TopEntropy
from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.surrogate import SURROGATES
from proxima.core.surrogate.whole_batch import ClipCov
from proxima.model.micro_batch import micro_batches
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.objectives.preference_objective import KtoObjective, PreferenceObjective
from tests.model.rows import assert_close, rows
from tests.training.helpers import labeled, near, pairs, recorded


def shuffled(items, budget, *, share_prompt=True):
    """The cuts and what they hold in an order of their own, another one at each call."""
    order = shuffled.draw.permutation(len(items)).tolist()
    cuts = micro_batches([items[i] for i in order], budget, share_prompt=share_prompt)
    return [[order[i] for i in cut] for cut in cuts]


def completions(lengths):
    """Ten trajectories of five prompts with advantages, and log-probs of an engine and a reference."""
    plain = rows(*((4 + i, pair) for i, pair in enumerate(lengths)))
    return near(plain, [torch.full((len(row.tokens),), -2.0) for row in plain])


def policy(surrogate=None, *corrections, **settings):
    surrogate = surrogate or ClipCov(share=0.3, low=-9, high=9)
    return PolicyObjective(surrogate=surrogate, aggregate=TokenMean(), corrections=corrections, **settings)


CASES = {
    "clip_cov": (policy(), list),
    "loglinear": (policy(proximal="loglinear"), list),
    "kl_cov": (policy(SURROGATES["kl_cov"](share=0.3)), list),
    "top_entropy": (policy(SURROGATES["reinforce"](), TopEntropy(0.4)), list),
    "normalised weights": (policy(SURROGATES["reinforce"](), Importance(normalise=True)), list),
    "aot": (PreferenceObjective(terms=[PREFERENCES["aot"]()]), pairs),
    "kto": (KtoObjective(spec=Kto()), labeled),
}


UNEQUAL = ((5, 1), (3, 7), (4, 12), (2, 8), (6, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lengths"),
    [*((case, UNEQUAL) for case in CASES), *((case, ((6, 6),) * 5) for case in ("clip_cov", "aot"))],
)
def test_no_cuts_and_no_order_of_them_change_anything(case, lengths, monkeypatch):
    objective, items_of = CASES[case]
    assert objective.has_batch_statistics
    items = items_of(completions(lengths))
    if items_of is not list:  # an item may stand twice, if it is no trajectory
        items = [*items, items[3]]
    expected, plain = recorded(objective, items)
    shuffled.draw = np.random.default_rng(0)
    monkeypatch.setattr("proxima.training.shared_update.micro_batches", shuffled)
    monkeypatch.setattr("proxima.training.dealing.micro_batches", shuffled)
    gradient, result = recorded(objective, items, budget=12)
    assert_close(gradient, expected, 3e-5 if case in ("clip_cov", "loglinear", "top_entropy") else 5e-5)
    for name, value in plain.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6, nan_ok=True), name
    assert result.token_statistics.keys() == plain.token_statistics.keys()
    for key, statistics in plain.token_statistics.items():
        torch.testing.assert_close(result.token_statistics[key].log_prob, statistics.log_prob, rtol=0, atol=1e-5)
        assert (result.token_statistics[key].keep == statistics.keep).all()
