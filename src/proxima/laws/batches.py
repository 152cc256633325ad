"""Random packed batches: odd lengths, holes, tool tokens, and garbage wherever the contract allows it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate, product

import torch
from torch import Tensor

from proxima.core import AGGREGATES
from proxima.data.policy_batch import PolicyBatch
from proxima.data.random import mix, permutation

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)
LENGTHS = ((1,), (2,), (1, 1), (3, 2), (0, 4), (5, 0, 1), (4, 3, 6, 2), (9, 1, 7, 0, 5, 8))
SPREADS = (0.3, 0.05, 2.0, 0.0)
CENTRES = ("recompute", "behavior", "loglinear")


@dataclass(frozen=True)
class BatchCase:
    """A batch, the key of the random choices that a law makes for it (an order, a split), and the kinds of aggregation
    that a law tries."""

    batch: PolicyBatch
    key: int = 0
    aggregates: tuple[str, ...] = tuple(AGGREGATES)

    def order(self) -> list[int]:
        """A permutation of the sequences."""
        return [int(i) for i in permutation(self.batch.sequences, self.key, 1)]

    def parts(self) -> list[list[int]]:
        """The sequences of each of three micro-batches; some may be empty."""
        return [[i for i in range(self.batch.sequences) if mix(self.key, 2, i) % 3 == part] for part in range(3)]


def make_batch(
    lengths: list[int],
    *,
    seed: int = 0,
    spread: float = 0.3,
    out_of_loss: float = 0.2,
    not_sampled: float = 0.15,
    proximal: str = "recompute",
    garbage: bool = True,
    dtype: torch.dtype = torch.float64,
) -> PolicyBatch:
    """A batch with every optional field except those that hold results computed from the others.

    Args:
        lengths: the number of tokens of each sequence; 0 is allowed.
        seed: the seed of all draws.
        spread: how far the current policy is from behavior, nats.
        out_of_loss, not_sampled: the shares of such tokens.
        proximal: `behavior` (bypass), `recompute` (another policy near both), or `loglinear` (half-way).
        garbage: put NaN, infinities and huge numbers where no policy sampled a token.
        dtype: float32 or float64.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=draw, dtype=torch.float64)

    def near(x: Tensor, scale: float) -> Tensor:
        return (x + scale * normal()).clamp(max=-1e-3)

    behavior = -0.02 - 2.5 * uniform(tokens)
    log_prob = near(behavior, spread)
    between = 0.5 * behavior + 0.5 * log_prob
    centre = {"behavior": behavior, "recompute": near(behavior, spread / 3), "loglinear": between}[proximal]
    sampled = torch.rand(tokens, generator=draw) >= not_sampled
    loss_mask = sampled & (torch.rand(tokens, generator=draw) >= out_of_loss)
    advantage = normal().round(decimals=1)
    fields = {"behavior_log_prob": behavior, "proximal_log_prob": centre, "next_log_prob": near(behavior, spread / 3)}
    fields |= {"log_prob": log_prob, "reference_log_prob": near(behavior, 0.5), "entropy": normal().abs()}
    if garbage:
        junk = torch.tensor(GARBAGE, dtype=torch.float64)[torch.randint(len(GARBAGE), (tokens,), generator=draw)]
        fields = {name: torch.where(sampled, value, junk) for name, value in fields.items()}
        advantage = torch.where(loss_mask, advantage, junk)
    share = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64)  # of the probability not taken by the sampled token
    token = torch.arange(tokens) % 4
    top_k = torch.arange(3).expand(tokens, 3)  # three of the four tokens are in the top K
    columns = _of_a_teacher(behavior, share, seed)
    for name, source in (("behavior_top_k_log_prob", behavior), ("top_k_log_prob", log_prob)):
        top = ((1 - source.exp())[:, None] * (share + 0.03 * uniform(tokens, 3))).log()
        columns[name] = torch.where(top_k == token[:, None], source[:, None], top)
    for name, values in columns.items():
        if garbage:
            valid = sampled if values.dim() == 1 else sampled[:, None]
            values = torch.where(valid, values, torch.nan)
        fields[name] = values
    batch = PolicyBatch(
        loss_mask=loss_mask,
        sampled=sampled,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)]),
        advantage=advantage.to(dtype),
        policy_version=torch.randint(0, 3, (tokens,), generator=draw),
        token=token,
        top_k=top_k,
        group=torch.arange(len(lengths)) // 2,
        **{name: value.to(dtype) for name, value in fields.items()},
    )
    return replace(batch, log_prob=batch.log_prob.requires_grad_())


def _of_a_teacher(behavior: Tensor, share: Tensor, seed: int) -> dict[str, Tensor]:
    """The columns that a distillation reads, with three buckets of about `share` and a remainder."""
    draw = torch.Generator().manual_seed(seed + 1)
    columns = {"teacher_log_prob": behavior - torch.rand(len(behavior), generator=draw, dtype=torch.float64)}
    for name in ("bucket_log_prob", "teacher_bucket_log_prob"):
        student_share = 0.9 * share - 0.05 * torch.rand(len(behavior), 3, generator=draw, dtype=torch.float64)
        columns[name] = student_share.log()
    return columns


def with_new_leaf(b: PolicyBatch, **changes: Tensor) -> PolicyBatch:
    """The batch with changed fields and its own `log_prob` leaf."""
    leaf = changes.pop("log_prob", b.log_prob).detach().clone().requires_grad_()
    return replace(b, **changes, log_prob=leaf)


def batch_cases() -> Iterator[BatchCase]:
    """Cases of growing size with varying seed, spread and proximal policy. Tensors are copied for each call, so that a
    spec that modifies them does not spoil the cases of other laws."""
    return map(copied, drawn_cases())


def copied(case: BatchCase) -> BatchCase:
    """The case with its own tensors, in a third of the time of `deepcopy`."""
    named = {f.name: getattr(case.batch, f.name) for f in fields(case.batch) if f.name != "log_prob"}
    clones = {name: value.clone() for name, value in named.items() if isinstance(value, Tensor)}
    return replace(case, batch=with_new_leaf(case.batch, **clones))


@cache
def drawn_cases() -> tuple[BatchCase, ...]:
    """The cases that `batch_cases` copies."""
    cases: list[BatchCase] = []
    aggregates = tuple(AGGREGATES)
    for (size, lengths), (repeat, spread) in product(enumerate(LENGTHS), enumerate(SPREADS)):
        key = mix(size, repeat)
        out_of_loss = 0.0
        if repeat > 0:
            out_of_loss = (0.0, 0.3, 1.0)[key % 3]
        batch = make_batch(
            list(lengths),
            seed=key % 2**31,
            spread=spread,
            out_of_loss=out_of_loss,
            not_sampled=0.2 * (repeat % 2),
            proximal=CENTRES[repeat % len(CENTRES)],
        )
        aggregate = aggregates[(size + repeat) % len(aggregates)]
        cases.append(BatchCase(batch, key, (aggregate,)))
    return tuple(cases)


def smaller_batches(case: BatchCase) -> Iterator[BatchCase]:
    """The case without one of its sequences, or without one of its tokens."""
    b = case.batch
    if b.sequences > 1:
        for sequence in range(b.sequences):
            rest = b.take([i for i in range(b.sequences) if i != sequence])
            yield replace(case, batch=with_new_leaf(rest))
    if len(b) > 1:
        for token in range(len(b)):
            yield replace(case, batch=without_token(b, token))


def without_token(b: PolicyBatch, token: int) -> PolicyBatch:
    """The batch without one token."""
    keep = torch.arange(len(b)) != token
    edges = b.cu_seqlens - (b.cu_seqlens > token).to(b.cu_seqlens.dtype)
    fields = {name: value.detach()[keep] for name, value in b.token_fields().items()}
    return with_new_leaf(replace(b, **fields, cu_seqlens=edges))


def show_batch(case: BatchCase) -> str:
    """`lengths [2], log_prob [-0.1, -0.3], …`: the fields that most methods read."""
    b = case.batch

    def numbers(values: Tensor) -> str:
        shown = [f"{value:.4g}" for value in values.detach().tolist()[:8]]
        if len(values) > 8:
            shown.append("…")
        return f"[{', '.join(shown)}]"

    parts = [f"lengths {b.lengths.tolist()}"]
    for name in ("log_prob", "proximal_log_prob", "behavior_log_prob", "advantage"):
        value = getattr(b, name)
        if value is not None and len(b):
            parts.append(f"{name} {numbers(value)}")
    if not bool(b.loss_mask.all()):
        parts.append(f"loss_mask {b.loss_mask.int().tolist()[:8]}")
    return ", ".join(parts)


def with_entropy_leaf(b: PolicyBatch) -> PolicyBatch:
    """The batch with an entropy that requires a gradient, if it has an entropy."""
    if b.entropy is None:
        return b
    return replace(b, entropy=b.entropy.detach().clone().requires_grad_())


BATCHES = (batch_cases, smaller_batches, show_batch)  # arguments of a `Law`: cases, shrink, show
