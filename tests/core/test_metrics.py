"""Statistics over micro-batches."""

import pytest
import torch

from proxima.core.metrics import Peak, SumCount


def test_statistics_merge() -> None:
    values, mask = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False])
    assert (SumCount.over(values, mask) + SumCount.over(values[:1], mask[:1])).value == pytest.approx(4 / 3)
    assert (
        SumCount.over(values[:0], mask[:0]).value != SumCount.over(values[:0], mask[:0]).value
    )  # NaN: nothing was measured
    assert (Peak.over(values, mask) + Peak.over(values[:1], mask[:1])).value == 2
    assert (Peak.over(values, mask, largest=False) + Peak.over(values[:0], mask[:0], largest=False)).value == 1
    assert Peak.over(values[:0], mask[:0]).value != 0
