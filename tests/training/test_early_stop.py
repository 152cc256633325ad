"""Epochs that end once the policy has moved far enough: where they stop, and what the schedule counts."""

import pytest
import torch

from proxima.core.metrics import SumCount
from proxima.training.learner import EarlyStop
from proxima.training.optimizer import AdamW
from tests.model.rows import same
from tests.training.helpers import trainer, trajectories, weights

EPOCH = [list(range(7)), list(range(7, 13))]


def kl(value, tokens):
    return {"approx_kl": SumCount(torch.tensor(value * tokens), torch.tensor(float(tokens)))}


def test_an_epoch_is_judged_as_a_whole():
    """The first update alone is far above the limit, the second brings the mean over the tokens below it."""
    stop = EarlyStop(limit=0.1, items=5)
    assert stop([0, 1], kl(0.3, 10)) and stop([2, 3, 4], kl(0.0, 40))
    assert (stop.epochs, stop.kl) == (1, pytest.approx(0.06))
    assert stop([3, 0, 1], kl(0.1, 10)) and not stop([2, 4], kl(0.2, 10))
    figures = {"early_stop/epochs": 2, "early_stop/kl": pytest.approx(0.15)}
    assert stop.figures(planned=2) == figures | {"early_stop/stopped": 0}
    assert stop.figures(planned=3) == figures | {"early_stop/stopped": 1}


def test_an_epoch_without_a_loss_token_stops_nothing():
    stop = EarlyStop(limit=0.1, items=1)
    assert stop([0], {}) and stop([0], kl(0.0, 0)) and stop.epochs == 2


@pytest.mark.slow
def test_what_was_done_stays_done():
    """Three epochs of which the second is too far: the weights of two, and a schedule that counts three."""
    items, settings = trajectories(spread=0.0), {"optimizer": AdamW(lr=3e-2), "schedule": "linear", "total_updates": 12}

    def made(epochs, limit):
        t, stop = trainer(**settings), EarlyStop(limit=limit, items=13)
        return t, stop, t.update(EPOCH * epochs, items, planned=6, should_continue=stop)

    (_, first, _), (two, second, expected) = made(1, 1e9), made(2, 1e9)
    assert 0 < first.kl < second.kl
    stopped, stop, result = made(3, (first.kl + second.kl) / 2)
    assert (stop.epochs, stop.kl, result.updates, stopped.updates) == (2, second.kl, 4, 6)
    assert same(weights(two), weights(stopped))
    names = ("loss", "grad_norm", "lr", "approx_kl", "masked_fraction")
    assert all(result.metrics[name] == expected.metrics[name] for name in names) and result.skipped == expected.skipped
    assert result.metrics["approx_kl_k1"] != result.metrics["approx_kl"]
