"""Which tokens and which heads of a batch each rank has."""

import pytest
import torch

from proxima.model.parallel.context import _deal, part_of
from tests.model.parallel.context_passes import masked
from tests.model.rows import MIXED, forked, opened, policy, rows


@pytest.mark.slow
@pytest.mark.parametrize("items", [rows(*MIXED), forked(), opened(forked())])
@pytest.mark.parametrize("size", [2, 7, 200])
def test_parts_hold_each_token_and_each_response_token_once(size, items):
    batch = policy("llama").pack(masked(items))
    parts = [part_of(batch, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([part.tokens for part in parts])[: len(batch.tokens)], batch.tokens)
    assert len({len(part.tokens) for part in parts}) == 1
    order = torch.cat([part.rows for part in parts])
    assert torch.equal(order.sort().values, torch.arange(len(batch.target)))
    width = len(parts[0].tokens)
    for rank, part in enumerate(parts):
        rows_ = part.rows
        assert torch.equal(part.predict + rank * width, batch.predict[rows_])
        for name in ("target", "temperature", "top_k", "bucket_token"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[rows_])
        assert part.sampling_mask_cu.tolist() == list(part.sampling_mask_edges)
        for row, n in enumerate(rows_.tolist()):
            kept = slice(*part.sampling_mask_edges[row : row + 2])
            assert (
                part.sampling_mask[kept].tolist()
                == batch.sampling_mask[slice(*batch.sampling_mask_edges[n : n + 2])].tolist()
            )


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "expected"),
    [
        (4, 2, 2, ([2, 2], [1, 1])),
        (4, 2, 4, ([1] * 4, [1] * 4)),  # a key head goes to two ranks
        (32, 8, 4, ([8] * 4, [2] * 4)),
        (6, 2, 4, ([1, 2, 1, 2], [1] * 4)),
        (12, 4, 5, ([2, 2, 3, 2, 3], [1, 2, 3, 1, 1])),  # of 3 query heads that read two key heads, one key head each
        (6, 3, 1, ([6], [3])),
    ],
)
def test_every_rank_gets_the_key_heads_that_its_query_heads_read(heads, key_heads, ranks, expected):
    order, queries, keys = _deal(ranks, heads, key_heads, torch.device("cpu"))
    assert (queries, keys) == expected
    dealt = []
    for own, read in zip(queries, keys, strict=True):
        (q, k, v), order = order[: own + 2 * read].split([own, read, read]), order[own + 2 * read :]
        dealt += q.tolist()
        group = heads // key_heads
        assert [int(k[i // (own // read)]) for i in range(own)] == [heads + int(h) // group for h in q]
        assert torch.equal(v, k + key_heads)
    assert dealt == list(range(heads)) and not len(order)
