"""Aggregations by hand: two sequences of two and one loss tokens, one with none."""

import pytest
import torch

from proxima.core import AGGREGATE_ALIASES, AGGREGATES, SequenceMeanTokenSumNorm
from proxima.core.metrics import Peak, SumCount
from proxima.data import PolicyBatch

MASK = torch.tensor([True, False, True, True, False])
LOSS = torch.tensor([1.0, float("nan"), 3.0, 5.0, float("inf")], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "numerator", "denominator"),
    [
        ("token_mean", 9.0, 3.0),
        ("sequence_mean_token_mean", 7.0, 2.0),
        ("sequence_mean_token_sum", 9.0, 2.0),
        ("sequence_mean_token_sum_norm", 9.0 / 16384, 2.0),
        ("token_sum", 9.0, 0.0),
    ],
)
def test_by_hand(kind: str, numerator: float, denominator: float) -> None:
    b = PolicyBatch(log_prob=torch.zeros(5, dtype=torch.float64), loss_mask=MASK, cu_seqlens=torch.tensor([0, 3, 4, 5]))
    spec = AGGREGATES[kind]()
    assert float(spec(LOSS, b)) == pytest.approx(numerator)
    assert (
        float(spec.denominator(MASK, b.cu_seqlens)) == denominator
        and spec.denominator(MASK, b.cu_seqlens).dtype == torch.float64
    )


def test_every_alias_leads_to_an_aggregation() -> None:
    assert set(AGGREGATE_ALIASES.values()) <= set(AGGREGATES)


def test_horizon_must_be_positive() -> None:
    with pytest.raises(ValueError, match="horizon=0 must be > 0 tokens"):
        SequenceMeanTokenSumNorm(horizon=0)


def test_statistics_merge() -> None:
    values, mask = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False])
    assert (SumCount.over(values, mask) + SumCount.over(values[:1], mask[:1])).value == pytest.approx(4 / 3)
    assert (
        SumCount.over(values[:0], mask[:0]).value != SumCount.over(values[:0], mask[:0]).value
    )  # NaN: nothing was measured
    assert (Peak.over(values, mask) + Peak.over(values[:1], mask[:1])).value == 2
    assert (Peak.over(values, mask, largest=False) + Peak.over(values[:0], mask[:0], largest=False)).value == 1
    assert Peak.over(values[:0], mask[:0]).value != 0
    with pytest.raises(ValueError, match="don't merge"):
        Peak.over(values, mask) + Peak.over(values, mask, largest=False)
