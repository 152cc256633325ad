"""KTO; the rest is in the records of TRL, whose weights are 1."""

import pytest
import torch

from proxima.core.preference.kto import Kto


def test_each_kind_has_its_weight() -> None:
    x, good = torch.tensor([1.0, 1.0]).double(), torch.tensor([True, False])
    plain, weighted = (Kto(**weights)(x, 0 * x, good) for weights in ({}, {"good_weight": 2.0, "bad_weight": 3.0}))
    assert weighted.tolist() == pytest.approx([2 * float(plain[0]), 3 * float(plain[1])])
