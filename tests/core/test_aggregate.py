"""Aggregations by hand: two sequences of two and one loss tokens, one with none."""

import pytest
import torch

from proxima.core import AGGREGATE_ALIASES, AGGREGATES
from proxima.core.metrics import Peak, SumCount

MASK = torch.tensor([True, False, True, True, False])
LOSS = torch.tensor([1.0, float("nan"), 3.0, 5.0, float("inf")], dtype=torch.float64)


def test_every_alias_leads_to_an_aggregation() -> None:
    assert set(AGGREGATE_ALIASES.values()) <= set(AGGREGATES)


def test_statistics_merge() -> None:
    values, mask = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False])
    assert (SumCount.over(values, mask) + SumCount.over(values[:1], mask[:1])).value == pytest.approx(4 / 3)
    assert (
        SumCount.over(values[:0], mask[:0]).value != SumCount.over(values[:0], mask[:0]).value
    )  # NaN: nothing was measured
    assert (Peak.over(values, mask) + Peak.over(values[:1], mask[:1])).value == 2
    assert (Peak.over(values, mask, largest=False) + Peak.over(values[:0], mask[:0], largest=False)).value == 1
    assert Peak.over(values[:0], mask[:0]).value != 0
