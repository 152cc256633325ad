"""KTO."""

import math

import pytest
import torch

from proxima.core.preference.kto import Kto


def test_kto_by_hand() -> None:
    x, zero = torch.tensor([1.0, 1.0]).double(), torch.zeros(2).double()
    good = torch.tensor([True, False])
    spec = Kto(beta=0.5, good_weight=2.0)
    sigmoid = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    assert spec(x, zero, good, kl=-3.0).tolist() == pytest.approx(
        [2 * (1 - sigmoid(0.5)), 1 - sigmoid(-0.5)]
    )  # z is clamped at 0
    assert Kto(beta=0.5, anchor="zero")(x, zero, good, kl=9.0).tolist() == pytest.approx(
        [1 - sigmoid(0.5), sigmoid(0.5)]
    )
