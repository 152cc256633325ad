"""The experts that each token of a mixture was sent to: columns of [tokens, mixtures, experts per token]."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_expert_ids(ids: Any, rows: int | None, name: str) -> None:
    """Raise ValueError unless `ids` are [rows, layers, K], int8 or int16; `rows` None: any number of rows."""
    kind, shape = getattr(ids, "dtype", type(ids).__name__), list(np.shape(ids))
    if kind not in (np.int8, np.int16) or len(shape) != 3 or (rows is not None and shape[0] != rows):
        count = "rows" if rows is None else rows
        raise ValueError(f"{name}: {kind} of shape {shape}, expected int8 or int16 of [{count}, layers, K].")


def packed_experts(
    trajectories: Sequence[Any], opens: NDArray[Any], opened: NDArray[Any], shared: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """The `routed_experts` column of `pack`: the experts of every token that is fed, -1 for trajectories without
    experts. Trajectories marked in `opens` [S] bool lay out their prompt without its first `opened` [S] tokens; all lay
    out their response without its first `shared` [S]. A response token is fed where the next one is predicted."""
    routed = [item.routed_experts for item in trajectories if item.routed_experts is not None]
    if not routed:
        return {}
    dtype = np.result_type(*routed)
    pieces: list[NDArray[Any]] = []
    for item, own_prompt, begin, start in zip(trajectories, opens, opened, shared, strict=True):
        ids, n = item.prompt_routed_experts, len(item.prompt_tokens)
        parts = [(None if ids is None else ids[begin:], n - begin)] if own_prompt else []
        parts += [(None if (own := item.routed_experts) is None else own[start + 1 :], len(item.tokens[start:-1]))]
        pieces += [np.full((n, *routed[0].shape[1:]), -1, dtype) if ids is None else ids for ids, n in parts]
    return {"routed_experts": np.concatenate(pieces)}
