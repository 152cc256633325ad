"""What the paths of episodes begin with: a packed batch has it once where they are neighbours."""

from collections.abc import Sequence

from proxima.data.trajectory import Trajectory

LEAST_SHARED = 16  # tokens below which a path is fed from its prompt on


def common_beginning(before: Trajectory, item: Trajectory) -> int:
    """How many tokens two responses begin with and send to the same experts; 0 for fewer than `LEAST_SHARED`. The last
    token of a response, which is not fed, is not counted."""
    length = max(0, min(len(before.tokens), len(item.tokens)) - 1)
    same = before.tokens[:length] == item.tokens[:length]
    routes, others = item.routed_experts, before.routed_experts
    if (routes is None) != (others is None):
        return 0
    if routes is not None and others is not None:
        same &= (routes[1 : length + 1] == others[1 : length + 1]).all((1, 2))
    count = length if same.all() else int(same.argmin())
    return count if count >= LEAST_SHARED else 0


def sharing_order(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices that make neighbours of the paths that share most: by group, in the order of their first, and by their
    tokens in it."""
    place: dict[int, int] = {}
    keys = [(place.setdefault(item.group, i), item.tokens.tobytes()) for i, item in enumerate(trajectories)]
    return sorted(range(len(trajectories)), key=keys.__getitem__)
