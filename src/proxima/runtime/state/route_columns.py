"""Storage of the experts of each token: columns of bytes, in the files of the few runs that have them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from proxima.data import Completion

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "routed_experts": (pa.binary(), "[T, layers, per token] int8 or int16, experts of each token; null: not asked for"),
    "prompt_routed_experts": (pa.binary(), "[P, layers, per token], of each token of the prompt"),
    "routed_layers": (pa.int32(), "mixtures of experts of the model"),
    "routed_per_token": (pa.int32(), "experts of each token in each"),
}


def route_columns(completion: Completion) -> dict[str, Any]:
    routes, of_prompt = completion.routed_experts, completion.prompt_routed_experts
    if routes is None or not len(routes):  # without a token nothing is trained
        return dict.fromkeys(COLUMNS)
    prompt = None if of_prompt is None else of_prompt.astype(routes.dtype).tobytes()
    return dict(zip(COLUMNS, (routes.tobytes(), prompt, *routes.shape[1:]), strict=True))


def stored_routes(row: Mapping[str, Any]) -> dict[str, Any]:
    each = (row["routed_layers"], row["routed_per_token"])
    size = len(row["routed_experts"]) // (len(row["tokens"]) * each[0] * each[1])
    given = {name: row[name] for name in ("routed_experts", "prompt_routed_experts") if row[name] is not None}
    return {name: np.frombuffer(ids, f"int{8 * size}").reshape(-1, *each) for name, ids in given.items()}
