"""Batches of a few tokens by hand; and random packed batches of `proxima.laws`, drawn by hypothesis or from a seed."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from proxima.core import AGGREGATES
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import CENTRES, BatchCase, make_batch
from proxima.laws.spec_check import variants_of

SPREADS, OUT_OF_LOSS, NOT_SAMPLED = (0.0, 0.05, 0.3, 2.0), (0.0, 0.3, 1.0), (0.0, 0.2)


def packed(lengths: Sequence[int] | None = None, **columns: Any) -> PolicyBatch:
    """Sequences of these lengths, or one; every token is in the loss unless `loss_mask` says otherwise."""
    count = len(columns["log_prob"])
    edges = torch.tensor([0, *accumulate([count] if lengths is None else lengths)])
    return PolicyBatch(**{"loss_mask": torch.ones(count, dtype=torch.bool), "cu_seqlens": edges, **columns})


def of_probabilities(
    pi: Sequence[float], mu: Sequence[float], advantage: float | Sequence[float] = 1.0, **columns: Any
) -> PolicyBatch:
    """One sequence of tokens with these probabilities under the current and the behavior policy, in float64."""
    log_prob, behavior = (torch.tensor(p, dtype=torch.float64).log() for p in (pi, mu))
    advantages = torch.tensor(advantage, dtype=torch.float64).expand(len(pi))
    return packed(log_prob=log_prob, behavior_log_prob=behavior, advantage=advantages, **columns)


def variants(table: Mapping[str, type]) -> dict[str, Any]:
    """`cppo`, `cppo/kl` …: the defaults of every kind and its test fields."""
    specs = {}
    for kind, cls in sorted(table.items()):
        specs |= {f"{kind}/{name}" if name else kind: spec for name, spec in variants_of(cls()).items()}
    return specs


def seeded_cases(count: int, seed: int = 0) -> list[BatchCase]:
    """An empty sequence, a single token, and `count` cases from the choices of `batch_cases`; made once, they serve
    every law. Each has one kind of aggregation."""
    draw, kinds = Random(seed), sorted(AGGREGATES)
    smallest = (make_batch([0]), make_batch([1], out_of_loss=0.0, not_sampled=0.0))
    cases = [BatchCase(batch, aggregates=("token_mean",)) for batch in smallest]
    for i in range(count):
        batch = make_batch(
            [draw.randint(0, 9) for _ in range(draw.randint(1, 6))],
            seed=draw.randrange(2**31),
            spread=draw.choice(SPREADS),
            out_of_loss=draw.choice(OUT_OF_LOSS),
            not_sampled=draw.choice(NOT_SAMPLED),
            proximal=draw.choice(CENTRES),
        )
        cases.append(BatchCase(batch, draw.randrange(2**31), (kinds[i % len(kinds)],)))
    return cases


@st.composite
def batch_cases(draw: st.DrawFn, min_sequences: int = 1) -> BatchCase:
    """Batches of up to six sequences of 0 to 9 tokens, with a key for a law's own choices."""
    batch = make_batch(
        draw(st.lists(st.integers(0, 9), min_size=min_sequences, max_size=6)),
        seed=draw(st.integers(0, 2**31)),
        spread=draw(st.sampled_from(SPREADS)),
        out_of_loss=draw(st.sampled_from(OUT_OF_LOSS)),
        not_sampled=draw(st.sampled_from(NOT_SAMPLED)),
        proximal=draw(st.sampled_from(CENTRES)),
    )
    return BatchCase(batch, draw(st.integers(0, 2**31)))
