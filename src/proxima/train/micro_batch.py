"""Cut an update's trajectories into micro-batches by tokens, so that memory is bounded whatever the lengths are."""

from collections.abc import Sequence

from proxima.data import Trajectory


def micro_batches(trajectories: Sequence[Trajectory], budget: int, *, share_prompt: bool = True) -> list[list[int]]:
    """Indices of `trajectories`, in order, cut where the next one would exceed the budget.

    Args:
        budget: tokens forwarded at once. A shared prompt counts once for its neighbours; a single trajectory above the
            budget goes alone.

    The split changes neither loss nor gradient: both are divided by the denominator of the whole update.
    """
    out: list[list[int]] = []
    used = 0
    for i, item in enumerate(trajectories):
        cost = _fed(item, trajectories[i - 1] if out and share_prompt else None)
        if not out or used + cost > budget:
            out.append([])
            used = 0
            cost = _fed(item, None)
        out[-1].append(i)
        used += cost
    return out


def tokens_fed(trajectories: Sequence[Trajectory], *, share_prompt: bool = True) -> int:
    """How many tokens a micro-batch of these feeds the model: the length of its packed axis, without packing it."""
    before = [None, *trajectories[:-1]] if share_prompt else [None] * len(trajectories)
    return sum(_fed(item, neighbour) for item, neighbour in zip(trajectories, before, strict=True))


def _fed(item: Trajectory, neighbour: Trajectory | None) -> int:
    """Tokens that one trajectory adds behind its neighbour. The last of a response is not fed: it predicts nothing."""
    response = max(0, len(item.tokens) - 1)
    return response if neighbour is not None and neighbour.group == item.group else response + len(item.prompt_tokens)
