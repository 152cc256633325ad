"""Random packed batches for the conformance tests: odd lengths, holes, tool tokens, and garbage wherever the contract
allows it."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from proxima.data import PolicyBatch

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)


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
    """A batch with every optional field. `proximal`: behavior (bypass), recompute (another policy near both), or
    loglinear (half-way)."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=draw, dtype=torch.float64)

    def near(x: Tensor, scale: float) -> Tensor:
        return (x + scale * normal()).clamp(max=-1e-3)

    behavior = -0.02 - 2.5 * torch.rand(tokens, generator=draw, dtype=torch.float64)
    log_prob = near(behavior, spread)
    centre = {
        "behavior": behavior,
        "recompute": near(behavior, spread / 3),
        "loglinear": 0.5 * behavior + 0.5 * log_prob,
    }[proximal]
    sampled = torch.rand(tokens, generator=draw) >= not_sampled
    loss_mask = sampled & (torch.rand(tokens, generator=draw) >= out_of_loss)
    advantage = normal().round(decimals=1)
    fields = {"behavior_log_prob": behavior, "proximal_log_prob": centre, "next_log_prob": near(behavior, spread / 3)}
    fields |= {"log_prob": log_prob, "reference_log_prob": near(behavior, 0.5), "entropy": normal().abs()}
    if garbage:
        junk = torch.tensor(GARBAGE, dtype=torch.float64)[torch.randint(len(GARBAGE), (tokens,), generator=draw)]
        fields = {name: torch.where(sampled, value, junk) for name, value in fields.items()}
        advantage = torch.where(loss_mask, advantage, junk)
    share = torch.tensor(
        [0.5, 0.3, 0.1], dtype=torch.float64
    )  # top-K tokens take most of what the sampled token leaves
    for name, source in (("behavior_top_k_log_prob", behavior), ("top_k_log_prob", log_prob)):
        top = (
            (1 - source.exp())[:, None] * (share + 0.03 * torch.rand(tokens, 3, generator=draw, dtype=torch.float64))
        ).log()
        fields[name] = torch.where(sampled[:, None], top, float("nan")) if garbage else top
    cut = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) if lengths else torch.zeros(1, dtype=torch.long)
    versions = torch.randint(0, 3, (tokens,), generator=draw)
    b = PolicyBatch(
        loss_mask=loss_mask,
        sampled=sampled,
        cu_seqlens=cut,
        advantage=advantage.to(dtype),
        policy_version=versions,
        group=torch.arange(len(lengths)) // 2,
        **{name: value.to(dtype) for name, value in fields.items()},
    )
    return replace(b, log_prob=b.log_prob.requires_grad_())


@st.composite
def policy_batches(draw: st.DrawFn, min_sequences: int = 1) -> PolicyBatch:
    """Batches of up to six sequences of 0 to 9 tokens."""
    return make_batch(
        draw(st.lists(st.integers(0, 9), min_size=min_sequences, max_size=6)),
        seed=draw(st.integers(0, 2**31)),
        spread=draw(st.sampled_from([0.0, 0.05, 0.3, 2.0])),
        out_of_loss=draw(st.sampled_from([0.0, 0.3, 1.0])),
        not_sampled=draw(st.sampled_from([0.0, 0.2])),
        proximal=draw(st.sampled_from(["behavior", "recompute", "loglinear"])),
    )


def fresh(b: PolicyBatch, **changes: Tensor) -> PolicyBatch:
    """The same batch with a log_prob leaf of its own, to be differentiated alone."""
    return replace(
        replace(b, **changes), log_prob=changes.get("log_prob", b.log_prob).detach().clone().requires_grad_()
    )
