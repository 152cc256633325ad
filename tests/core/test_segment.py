"""Segmented sums, prefix sums and quantiles against a loop over the sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.core.padded_blocks import PaddedBlock, blocks, clamped_quantile, map_padded, sorted_quantile
from proxima.core.segment import segment_count, segment_mean, segment_sum


def cut(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()])


def test_by_hand() -> None:
    values, edges = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), cut([2, 0, 3])
    mask = torch.tensor([True, False, True, True, True])
    assert segment_count(mask, edges).tolist() == [1, 0, 3]
    assert segment_sum(values, edges).tolist() == [3.0, 0.0, 12.0]
    assert segment_mean(values, mask, edges).tolist() == [1.0, 0.0, 4.0]


def quantiles(values: torch.Tensor, lengths: list[int], q: float, low: float, high: float, size: int) -> list[float]:
    """One number a sequence, taken from the first token of each row."""
    rows = map_padded(
        lambda block, v: clamped_quantile(masked(block, v), block, q, low, high)[:, None].expand(v.shape),
        cut(lengths),
        lengths,
        values,
        dtype=values.dtype,
        tokens_in_block=size,
    )
    return [float(part[0]) for part in rows.split(lengths) if len(part)]


def masked(block: PaddedBlock, rows: torch.Tensor) -> torch.Tensor:
    return rows if block.inside is None else torch.where(block.inside, rows, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=8) | st.integers(1, 30).map(lambda n: [n] * 5),
    seed=st.integers(0, 10**6),
    q=st.sampled_from([0.1, 0.5, 0.9]),
    bounds=st.sampled_from([(0.02, 0.04), (0.0, 1.0), (0.0, 0.0), (0.05, 0.06)]),
    size=st.sampled_from([1, 64, 1 << 17]),
)
def test_quantiles_equal_torch_quantile_on_each_sequence(
    lengths: list[int], seed: int, q: float, bounds: tuple[float, float], size: int
) -> None:
    values = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) * 0.1
    values = values.round(decimals=2) if seed % 2 else values  # with ties, 0 and values on the bounds
    want = [float(torch.quantile(part, q).clamp(*bounds)) for part in values.split(lengths) if len(part)]
    assert quantiles(values, lengths, q, *bounds, size) == pytest.approx(want, rel=1e-6, abs=1e-8)
    for block in blocks(cut(lengths), lengths, size):  # as on a GPU
        position = q * (block.count - 1).double()
        quantile = sorted_quantile(block.rows(values), block, position.floor().long(), position).clamp(*bounds)
        counted = clamped_quantile(masked(block, block.rows(values)), block, q, *bounds)
        assert quantile.tolist() == pytest.approx(counted.tolist(), rel=1e-6, abs=1e-8)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=9), size=st.sampled_from([1, 8, 100]))
def test_blocks_visit_every_token_once(lengths: list[int], size: int) -> None:
    values = torch.arange(sum(lengths), dtype=torch.float64)
    assert torch.equal(
        map_padded(lambda block, v: 2 * v, cut(lengths), lengths, values, dtype=torch.float64, tokens_in_block=size),
        2 * values,
    )
    assert sum(int(block.count.sum()) for block in blocks(cut(lengths), lengths, size)) == sum(lengths)


def test_prefix_sums_do_not_lose_digits_behind_millions_of_tokens() -> None:
    """A cumulative sum over the whole axis in float32 would leave nothing of the last sequence's."""
    values = torch.cat([torch.full((3_000_000,), 0.7), torch.tensor([1e-6, 2e-6, 3e-6])])
    lengths = [3_000_000, 3]
    sums = map_padded(lambda _, v: v.cumsum(1), cut(lengths), lengths, values, dtype=torch.float32)
    assert sums[-3:].tolist() == pytest.approx([1e-6, 3e-6, 6e-6], rel=1e-5)


def test_a_sum_does_not_depend_on_its_neighbours_and_is_differentiable() -> None:
    values = torch.randn(1000, requires_grad=True)
    edges = cut([300, 400, 300])
    alone = segment_sum(values[300:700], cut([400]))
    assert torch.equal(segment_sum(values, edges)[1:2], alone)
    (grad,) = torch.autograd.grad(segment_sum(values, edges) @ torch.tensor([1.0, 2.0, 3.0]), values)
    assert grad.tolist() == [1.0] * 300 + [2.0] * 400 + [3.0] * 300
