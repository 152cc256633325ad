"""Losses of each side."""

import math

import pytest

from proxima.core.preference import PREFERENCES
from tests.core.preference.pairs import pairs


def test_bco_compares_both_rewards_with_the_shift() -> None:
    loss = PREFERENCES["bco_pair"](beta=0.5, shift=0.3)(pairs([-1.0], [-3.0]))
    assert float(loss) == pytest.approx(math.log1p(math.exp(0.5 + 0.3)) + math.log1p(math.exp(-(0.3 + 1.5))))
