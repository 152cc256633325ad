"""Segmented sums, prefix sums and quantiles against a loop over the sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.core.segment import clamped_quantile, exclusive_cumsum, segment_count, segment_mean, segment_quantile, segment_sum


def cut(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()])


def test_by_hand() -> None:
    values, edges = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), cut([2, 0, 3])
    mask = torch.tensor([True, False, True, True, True])
    assert segment_count(mask, edges).tolist() == [1, 0, 3]
    assert segment_sum(values, edges).tolist() == [3.0, 0.0, 12.0]
    assert segment_mean(values, mask, edges).tolist() == [1.0, 0.0, 4.0]
    assert exclusive_cumsum(values, edges).tolist() == [0.0, 1.0, 0.0, 3.0, 7.0]
    assert segment_quantile(values, mask, edges, 0.75).tolist()[2] == 4.5
    assert segment_quantile(values, mask, edges, 0.5).isnan().tolist() == [False, True, False]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=8), seed=st.integers(0, 10**6), q=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_quantiles_equal_torch_quantile_on_each_sequence(lengths: list[int], seed: int, q: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.rand(sum(lengths), generator=draw) * 0.1
    values = values.round(decimals=3) if seed % 2 else values  # with ties
    mask = torch.rand(sum(lengths), generator=draw) < 0.8
    got = segment_quantile(values, mask, cut(lengths), q)
    clamped = clamped_quantile(values, mask, cut(lengths), q, 0.02, 0.04)
    for v, m, x, c in zip(values.split(lengths), mask.split(lengths), got, clamped, strict=True):
        if not bool(m.any()):
            assert bool(x.isnan()) and float(c) == pytest.approx(0.02)
            continue
        torch.testing.assert_close(x, torch.quantile(v[m], q), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(c, torch.quantile(v[m], q).clamp(0.02, 0.04), rtol=1e-6, atol=1e-8)


def test_prefix_sums_do_not_lose_digits_behind_millions_of_tokens() -> None:
    lengths = [3_000_000, 3]
    values = torch.cat([torch.full((3_000_000,), 0.7), torch.tensor([1e-6, 2e-6, 3e-6])])
    tail = exclusive_cumsum(values, cut(lengths))[-3:]
    torch.testing.assert_close(tail, torch.tensor([0, 1e-6, 3e-6], dtype=torch.float64), rtol=1e-3, atol=0)


def test_a_sum_does_not_depend_on_its_neighbours_and_is_differentiable() -> None:
    values = torch.randn(1000, requires_grad=True)
    edges = cut([300, 400, 300])
    alone = segment_sum(values[300:700], cut([400]))
    assert torch.equal(segment_sum(values, edges)[1:2], alone)
    (grad,) = torch.autograd.grad(segment_sum(values, edges) @ torch.tensor([1.0, 2.0, 3.0]), values)
    assert grad.tolist() == [1.0] * 300 + [2.0] * 400 + [3.0] * 300
