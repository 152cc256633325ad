"""Segmented sums, prefix sums and quantiles against a loop over the sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.core import segment
from proxima.core.segment import SequenceRows, segment_count, segment_mean, segment_sum


def cut(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()])


def test_by_hand() -> None:
    values, edges = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), cut([2, 0, 3])
    mask = torch.tensor([True, False, True, True, True])
    assert segment_count(mask, edges).tolist() == [1, 0, 3]
    assert segment_sum(values, edges).tolist() == [3.0, 0.0, 12.0]
    assert segment_mean(values, mask, edges).tolist() == [1.0, 0.0, 4.0]


def rows_of(lengths: list[int], loss: torch.Tensor | None = None) -> SequenceRows:
    mask = torch.ones(sum(lengths), dtype=torch.bool) if loss is None else loss
    return SequenceRows.of(mask, cut(lengths), lengths if loss is None else None)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=8) | st.integers(1, 30).map(lambda n: [n] * 5),
    seed=st.integers(0, 10**6),
    q=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_quantiles_equal_torch_quantile_on_each_sequence(lengths: list[int], seed: int, q: float) -> None:
    values = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) * 0.1
    values = values.round(decimals=2) if seed % 2 else values  # with ties and 0
    ours = rows_of(lengths).quantile(values, q).tolist()
    want = [float(torch.quantile(part.double(), q)) if len(part) else None for part in values.split(lengths)]
    assert [x for x, size in zip(ours, lengths, strict=True) if size] == pytest.approx(
        [x for x in want if x is not None]
    )


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=9), seed=st.integers(0, 10**6))
def test_rows_hold_the_tokens_of_the_mask(lengths: list[int], seed: int) -> None:
    mask = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) > 0.3
    values, rows = torch.arange(1.0, sum(lengths) + 1), rows_of(lengths, mask)
    kept = [part[inside] for part, inside in zip(values.split(lengths), mask.split(lengths), strict=True)]
    assert [part.tolist() for part in values[rows.tokens].split(rows.count.tolist())] == [x.tolist() for x in kept]
    sums = torch.zeros_like(values).masked_scatter(mask, torch.cat([x.cumsum(0) for x in kept] or [values]))
    assert torch.equal(rows.packed(rows.prefix_sums(values[rows.tokens]), values), sums)


@pytest.mark.slow
def test_a_long_row_does_not_pad_the_others() -> None:
    assert rows_of([100] * 255 + [16384]).sizes == [(1, 16384), (255, 100)]
    mixed = rows_of([2**k for k in range(15) for _ in range(100)])
    assert sum(rows * width for rows, width in mixed.sizes) < 4 * len(mixed.tokens)


RAGGED = st.lists(st.sampled_from([0, 1, 2, 3, 9, 40, 70, 300]), max_size=12)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 10**6))
def test_several_tables_give_the_bits_of_one(lengths: list[int], seed: int) -> None:
    values = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed))
    results = []
    for spared in (1, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segment, "SPARED", spared)
            rows = rows_of(lengths)
        quantile = rows.quantile(values, 0.9)[rows.count > 0]
        results.append((rows.prefix_sums(values), rows.suffix_sums(values), quantile))
    assert len(rows.sizes) == 1
    for several, one in zip(*results, strict=True):
        assert torch.equal(several, one)


@pytest.mark.slow
def test_prefix_sums_do_not_lose_digits_behind_millions_of_tokens() -> None:
    """A cumulative sum over the whole axis in float32 would leave nothing of the last sequence's."""
    values = torch.cat([torch.full((3_000_000,), 0.7), torch.tensor([1e-6, 2e-6, 3e-6])])
    sums = rows_of([3_000_000, 3]).prefix_sums(values)
    assert sums[-3:].tolist() == pytest.approx([1e-6, 3e-6, 6e-6], rel=1e-5)


def test_a_sum_does_not_depend_on_its_neighbours_and_is_differentiable() -> None:
    values = torch.randn(1000, requires_grad=True)
    edges = cut([300, 400, 300])
    alone = segment_sum(values[300:700], cut([400]))
    assert torch.equal(segment_sum(values, edges)[1:2], alone)
    (grad,) = torch.autograd.grad(segment_sum(values, edges) @ torch.tensor([1.0, 2.0, 3.0]), values)
    assert grad.tolist() == [1.0] * 300 + [2.0] * 400 + [3.0] * 300
