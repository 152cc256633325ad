"""The surrogates that only a comparison needs, against those that they vary."""

import torch

from evidence.controls import ReversedCppo
from proxima.core import SURROGATES
from proxima.laws.batches import make_batch


def test_without_weights_it_is_cppo():
    batch = make_batch([1, 7, 30, 0, 12], seed=3)
    for budget in ("dynamic", "static"):
        fields = {"delta": 0.05, "w_min": 1.0, "delta_b": 0.01, "budget": budget}
        ours, cppo = ReversedCppo(**fields)(batch), SURROGATES["cppo"](**fields)(batch)
        assert torch.equal(ours.keep, cppo.keep)
        assert ours.keep.sum() < batch.loss_mask.sum()


def test_without_bounds_nothing_is_dropped():
    batch = make_batch([1, 7, 30], seed=3)
    loss = ReversedCppo(delta=float("inf"), delta_b=float("inf"), budget="static")(batch)
    assert torch.equal(loss.keep, batch.loss_mask)


def test_the_last_token_has_the_whole_weight():
    batch = make_batch([9], seed=1, not_sampled=0.0)
    reversed_, cppo = ReversedCppo(w_min=0.5).threshold(batch)[0], SURROGATES["cppo"](w_min=0.5).threshold(batch)[0]
    weight = torch.linspace(0.5, 1, 9, dtype=cppo.dtype)
    torch.testing.assert_close(reversed_[batch.sampled] / weight, cppo[batch.sampled] / weight.flip(0))
