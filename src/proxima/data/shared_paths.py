"""Common beginnings of episode paths and of prompts: a packed batch stores them once for neighbours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.trajectory import Trajectory

LEAST_SHARED = 16  # with fewer shared tokens, a path is fed from its prompt on
LEAST_OPENING = 64  # with fewer shared tokens, a prompt is fed whole


def common_beginning(before: Trajectory, item: Trajectory) -> int:
    """Count the leading tokens that two responses share and send to the same experts; 0 if fewer than `LEAST_SHARED`,
    or if they are not paths of episodes. The last token of a response, which is not fed, is not counted."""
    if before.sampled is None or item.sampled is None:
        return 0
    length = max(0, min(len(before.tokens), len(item.tokens)) - 1)
    same = before.tokens[:length] == item.tokens[:length]
    count = _agreeing(same, before.routed_experts, item.routed_experts, 1)
    return count if count >= LEAST_SHARED else 0


def common_opening(before: Trajectory, item: Trajectory) -> int:
    """Count the leading tokens that two prompts share and send to the same experts, usually a system prompt or
    examples; 0 if fewer than `LEAST_OPENING`. The last token of a prompt, which predicts the first of its response, is
    not counted."""
    length = max(0, min(len(before.prompt_tokens), len(item.prompt_tokens) - 1))
    if length < LEAST_OPENING:
        return 0
    same = before.prompt_tokens[:length] == item.prompt_tokens[:length]
    count = _agreeing(same, before.prompt_routed_experts, item.prompt_routed_experts, 0)
    return count if count >= LEAST_OPENING else 0


def _agreeing(same: NDArray[np.bool_], routes: NDArray[Any] | None, others: NDArray[Any] | None, first: int) -> int:
    """Count the leading tokens that are the `same` and go to the same experts, whose rows start at `first`."""
    if (routes is None) != (others is None):
        return 0
    if routes is not None and others is not None:
        span = slice(first, first + len(same))
        same &= (routes[span] == others[span]).all((1, 2))
    return len(same) if same.all() else int(same.argmin())


def packing_order(items: Sequence[Sequence[Trajectory]]) -> Sequence[int]:
    """The order in which items of these sequences are packed: unchanged, except for paths of episodes. Those with the
    longest common beginnings become neighbours: by group, in order of first appearance, then by tokens."""
    if all(sequence.sampled is None for sequence, *_ in items):
        return range(len(items))
    place: dict[int, int] = {}
    keys = [(place.setdefault(path.group, i), path.tokens.tobytes()) for i, (path, *_) in enumerate(items)]
    return sorted(range(len(items)), key=keys.__getitem__)
