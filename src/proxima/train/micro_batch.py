"""Cut an update's trajectories into micro-batches by tokens, so that memory is bounded whatever the lengths are."""

from collections.abc import Sequence

from proxima.data import Trajectory


def micro_batches(trajectories: Sequence[Trajectory], budget: int, *, share_prompt: bool = True) -> list[list[int]]:
    """Indices of `trajectories`, in order, cut where the next one would exceed the budget.

    Args:
        budget: tokens forwarded at once. A shared prompt counts once for its neighbours; a single trajectory above the budget goes alone.

    The split changes neither loss nor gradient: both are divided by the denominator of the whole update.
    """
    out: list[list[int]] = []
    used = 0
    for i, item in enumerate(trajectories):
        shared = share_prompt and out and out[-1] and trajectories[out[-1][-1]].group == item.group
        # the last response token is not fed: it predicts nothing
        response = max(0, len(item.tokens) - 1)
        cost = response if shared else response + len(item.prompt_tokens)
        if not out or used + cost > budget:
            out.append([])
            used = 0
            cost = response + len(item.prompt_tokens)
        out[-1].append(i)
        used += cost
    return out
