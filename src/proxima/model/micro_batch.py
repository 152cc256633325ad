"""Splits an update into micro-batches by a token budget, so that memory is bounded whatever the lengths are."""

from collections.abc import Sequence

from proxima.data import Trajectory


def micro_batches(items: Sequence[Sequence[Trajectory]], budget: int, *, share_prompt: bool = True) -> list[list[int]]:
    """Indices of `items`, in order, split where the next item would exceed the budget.

    Args:
        items: the sequences of each item; they stay together.
        budget: tokens of one forward pass. A shared prompt counts once for its neighbours; a single item above the
            budget is a micro-batch of its own.
    """
    out: list[list[int]] = []
    used = 0
    for i, item in enumerate(items):
        cost = tokens_fed([item], share_prompt=share_prompt, before=items[i - 1][-1].group if i else None)
        if not out or used + cost > budget:
            out.append([])
            used, cost = 0, tokens_fed([item], share_prompt=share_prompt)
        out[-1].append(i)
        used += cost
    return out


def tokens_fed(items: Sequence[Sequence[Trajectory]], *, share_prompt: bool = True, before: int | None = None) -> int:
    """Tokens that a micro-batch of these feeds the model: the length of its packed axis, without packing it. The last
    token of a response is not fed: it predicts nothing. `before` is the group of the sequence in front of them."""
    total, group = 0, before
    for trajectory in (trajectory for item in items for trajectory in item):
        shared = share_prompt and group == trajectory.group
        total += max(0, len(trajectory.tokens) - 1) + (0 if shared else len(trajectory.prompt_tokens))
        group = trajectory.group
    return total
