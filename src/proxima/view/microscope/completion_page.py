"""A completion down to its tokens: what is stored, what follows from it, and the words for one token."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data import UserError
from proxima.data.flow import Key
from proxima.view.microscope.step_file import StepFile
from proxima.view.microscope.token_text import TokenText
from proxima.view.microscope.viewed_run import ViewedRun

FACTS = (
    "reward",
    "parts",
    "advantage",
    "outcome",
    "finish_reason",
    "temperature",
    "text",
    "question",
    "answer",
    "error",
    "correct",
    "used",
)
COLUMNS: dict[str, tuple[str, str]] = {  # name: its unit, and what it is
    "log_prob": ("nats", "the current policy π, in the trainer's first forward of the step"),
    "behavior_log_prob": ("nats", "the behavior policy μ, which sampled the token, as the algorithm takes it"),
    "sampled_log_prob": ("nats", "under the distribution really sampled, temperature and truncation applied"),
    "untruncated_log_prob": ("nats", "the same at the temperature alone"),
    "next_log_prob": ("nats", "under the version after the sampling one, of proximal=next"),
    "entropy": ("nats", "of the policy at the position, first forward"),
    "policy_version": ("", "the version of the weights that sampled the token"),
    "keep": ("", "the token stayed in the trust region at the first update"),
    "advantage": ("reward units", "of the token"),
    "log_ratio": ("nats", "log π - log μ"),
    "mismatch": ("nats", "|log π - log μ| of the trainer's first forward and the engine"),
    "divergence": ("probability", "|π - μ|"),
}


def completion_page(run: ViewedRun, file: StepFile, key: Key, text: TokenText) -> dict[str, Any]:
    """Everything of a completion but the words of its tokens."""
    (row,) = file.read([file.row_of(key)])
    columns = stored_columns(row)
    return {
        "uid": key[0],
        "sample": key[1],
        "turn": key[2],
        "prompt": {"ids": row["prompt_tokens"].tolist(), "text": text.each(row["prompt_tokens"].tolist())},
        "tokens": {"ids": row["tokens"].tolist(), "text": text.each(row["tokens"].tolist())},
        **{name: row.get(name) for name in FACTS},
        "columns": {name: packed(values) for name, values in columns.items() if values is not None},
        "reasons_available": False,
        "band": None,
        "columns_doc": {name: {"unit": unit, "doc": doc} for name, (unit, doc) in COLUMNS.items()},
        "episode": None,
        "versions": sorted(set(row["policy_version"].tolist())),
    }


def stored_columns(row: Mapping[str, Any]) -> dict[str, NDArray[Any] | None]:
    """[T] each: what the row has of a token, and what follows from two of its columns."""
    columns = {name: row.get(name) for name in COLUMNS}
    current, behavior = row.get("log_prob"), row.get("behavior_log_prob")
    if current is not None and behavior is not None:
        columns["log_ratio"] = current - behavior
        columns["mismatch"] = np.abs(current - behavior)
        columns["divergence"] = np.abs(np.exp(current) - np.exp(behavior))
    columns["advantage"] = token_advantage(row)
    return columns


def token_advantage(row: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """[T] reward units."""
    if row.get("token_advantage") is not None:
        return np.asarray(row["token_advantage"], np.float32)
    return None if row.get("advantage") is None else np.full(len(row["tokens"]), row["advantage"], np.float32)


def packed(values: NDArray[Any]) -> dict[str, str]:
    """A column as base64 of its bytes, little-endian, under the name of its type."""
    kind, dtype = {"b": ("u8", "u1"), "i": ("i32", "<i4")}.get(values.dtype.kind, ("f32", "<f4"))
    return {kind: base64.b64encode(np.ascontiguousarray(values, np.dtype(dtype)).tobytes()).decode()}


def compared(file: StepFile, key: Key, other: StepFile) -> dict[str, Any]:
    """The completion of the same prompt and sample elsewhere, and the first token that differs; null where all are the
    same."""
    first, second = (step.read([step.row_of(key)], ("tokens",))[0]["tokens"] for step in (file, other))
    shared = min(len(first), len(second))
    differs = np.flatnonzero(first[:shared] != second[:shared])
    at = int(differs[0]) if len(differs) else None if len(first) == len(second) else shared
    return {"first_difference": at, "lengths": [len(first), len(second)]}


def completion_key(text: str) -> Key:
    """`uid.sample.turn`. Raises: UserError for anything else."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.removeprefix("-").isdecimal() and len(part) < 20 for part in parts):
        raise UserError("a completion is named uid.sample.turn, three numbers")
    uid, sample, turn = map(int, parts)
    return uid, sample, turn
