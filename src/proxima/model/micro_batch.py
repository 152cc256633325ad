"""Splits an update into micro-batches by a token budget, so that memory is bounded whatever the lengths are."""

from collections.abc import Sequence
from itertools import chain

from proxima.data.packed_batch import common_prompt_prefix, common_response_prefix
from proxima.data.trajectory import Trajectory

Items = Sequence[Sequence[Trajectory]]


def micro_batches(items: Items, budget: int, *, share_prompt: bool = True) -> list[list[int]]:
    """Indices of `items`, in order, split where the next item would exceed the budget.

    Args:
        items: the sequences of each item; they stay together.
        budget: tokens of one forward pass; a single item above it gets a separate micro-batch. The prompt of a group
            counts once. A common beginning of prompts of several groups, or of paths of an episode, is run once but
            counts each time: attention lays out its keys and values for each, so that a budget of the tokens run would
            not bound the memory.
    """
    out: list[list[int]] = []
    used = 0
    for i, item in enumerate(items):
        group = items[i - 1][-1].group if i else None
        cost = tokens_laid_out(item, share_prompt, group)
        if not out or used + cost > budget:
            out.append([])
            used = 0
            cost = tokens_laid_out(item, share_prompt)
        out[-1].append(i)
        used += cost
    return out


def tokens_laid_out(item: Sequence[Trajectory], share_prompt: bool, group: int | None = None) -> int:
    """The tokens of an item that count towards the budget, after a sequence of `group`."""
    total = 0
    for trajectory in item:
        total += max(0, len(trajectory.tokens) - 1)
        shares = share_prompt and trajectory.group == group
        if not shares:
            total += len(trajectory.prompt_tokens)
        group = trajectory.group
    return total


def tokens_fed(items: Items, *, share_prompt: bool = True) -> int:
    """Tokens that a micro-batch of these items feeds to the model: the length of its packed axis, without packing it.
    The last token of a response is not fed: it predicts nothing."""
    total = 0
    opener = None
    before = None
    for trajectory in chain.from_iterable(items):
        total += len(trajectory.prompt_tokens) + max(0, len(trajectory.tokens) - 1)
        if before is None or before.group != trajectory.group:
            if share_prompt and opener is not None:
                total -= common_prompt_prefix(opener, trajectory)
            opener = trajectory
        elif share_prompt:
            total -= len(trajectory.prompt_tokens) + common_response_prefix(before, trajectory)
        before = trajectory
    return total
