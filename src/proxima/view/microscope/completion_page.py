"""A completion down to its tokens: what is stored, what follows from it, and the words for one token."""

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.core.token_reasons import TokenReasons
from proxima.data import UserError
from proxima.data.flow import Key
from proxima.lab.stored_tokens import LossSpecs, StoredTokens
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
DERIVED = {
    "proximal_log_prob": ("nats", "the proximal policy, the centre of the trust region"),
    "loss_weight": ("", "gradient of the token relative to the policy gradient, before aggregation; 0: masked"),
}
POLICIES = {
    "current": "log_prob",
    "behavior": "behavior_log_prob",
    "proximal": "proximal_log_prob",
    "reference": "reference_log_prob",
    "sampled": "sampled_log_prob",
    "next": "next_log_prob",
}
MISSING = {
    "current": "the trainer made no forward of the completion",
    "proximal": "not stored; --recompute computes it from the checkpoint of the step before",
    "reference": "not stored",
}


def completion_page(run: ViewedRun, file: StepFile, key: Key, text: TokenText) -> dict[str, Any]:
    """Everything of a completion but the words of its tokens."""
    (row,) = file.read([file.row_of(key)])
    stored = stored_tokens(run, file, row)
    reasons = stored.reasons()
    columns = stored_columns(row) | derived_columns(stored, reasons)
    band = None if reasons is None else reasons.band
    names = [] if band is None else [*band.drawn()]
    return {
        "uid": key[0],
        "sample": key[1],
        "turn": key[2],
        "prompt": {"ids": row["prompt_tokens"].tolist(), "text": text.each(row["prompt_tokens"].tolist())},
        "tokens": {"ids": row["tokens"].tolist(), "text": text.each(row["tokens"].tolist())},
        **{name: row.get(name) for name in FACTS},
        "columns": {name: packed(values) for name, values in columns.items() if values is not None},
        "reasons_available": reasons is not None,
        "problem": stored.problem(),
        "band": None
        if band is None
        else {"kind": run.surrogate, "title": band.title, "names": names, "note": band.note},
        "columns_doc": {name: {"unit": unit, "doc": doc} for name, (unit, doc) in (COLUMNS | DERIVED).items()},
        "episode": None,
        "versions": sorted(set(row["policy_version"].tolist())),
    }


def stored_tokens(run: ViewedRun, file: StepFile, row: Mapping[str, Any]) -> StoredTokens:
    """The completion with what the run's recipe says of its loss."""
    return StoredTokens(row=row, specs=LossSpecs.of(run.recipe), step=int(file.path.stem), recomputed={})


def derived_columns(stored: StoredTokens, reasons: TokenReasons | None) -> dict[str, NDArray[Any] | None]:
    """[T] each: what the algorithm made of what is stored."""
    proximal = stored.proximal_log_prob
    columns = {"proximal_log_prob": None if proximal is None else proximal.numpy()}
    if reasons is None:
        return columns
    columns["loss_weight"] = reasons.weight.numpy()
    drawn = {} if reasons.band is None else reasons.band.drawn()
    return columns | {name: values.detach().numpy() for name, values in drawn.items()}


def token_page(run: ViewedRun, file: StepFile, key: Key, token: int, text: TokenText) -> dict[str, Any]:
    """A token in figures and in words."""
    (row,) = file.read([file.row_of(key)])
    if not 0 <= token < len(row["tokens"]):
        raise UserError(f"the completion has tokens 0 to {len(row['tokens']) - 1}")
    stored = stored_tokens(run, file, row)
    reasons = stored.reasons()
    columns = stored_columns(row) | derived_columns(stored, reasons)
    at = {name: None if values is None else values[token].item() for name, values in columns.items()}
    log_probs = {name: at.get(column) for name, column in POLICIES.items()}
    id = int(row["tokens"][token])
    return {
        "token": token,
        "id": id,
        "text": text.each([id])[0],
        "log_probs": log_probs,
        "probabilities": {name: None if value is None else math.exp(value) for name, value in log_probs.items()},
        "missing": {name: MISSING[name] for name, value in log_probs.items() if value is None and name in MISSING},
        "ratio": None if at["log_ratio"] is None else math.exp(min(at["log_ratio"], 700.0)),
        "advantage": at["advantage"],
        "gradient_weight": at.get("loss_weight"),
        "kept": at["keep"],
        "reason": stored.problem() if reasons is None else reasons.reason(token),
        "band": {} if reasons is None or reasons.band is None else {name: at[name] for name in reasons.band.drawn()},
        "entropy": at["entropy"],
        "top_k": top_k(row, token, text),
        "version": at["policy_version"],
    }


def top_k(row: Mapping[str, Any], token: int, text: TokenText) -> list[dict[str, Any]] | None:
    """The engine's most probable tokens there; None where they are not stored."""
    if row.get("top_k") is None or not len(row["tokens"]):
        return None
    k = len(row["top_k"]) // len(row["tokens"])
    ids, log_probs = (row[name][token * k : (token + 1) * k].tolist() for name in ("top_k", "top_k_log_prob"))
    return [
        {"id": id, "text": piece, "log_prob": value}
        for id, piece, value in zip(ids, text.each(ids), log_probs, strict=True)
    ]


def stored_columns(row: Mapping[str, Any]) -> dict[str, NDArray[Any] | None]:
    """[T] each: what the row has of a token, and what follows from two of its columns."""
    columns = {name: row.get(name) for name in COLUMNS}
    current, behavior = row.get("log_prob"), row.get("behavior_log_prob")
    if current is not None and behavior is not None:
        columns["log_ratio"] = current - behavior
        columns["mismatch"] = np.abs(current - behavior)
        columns["divergence"] = np.abs(np.exp(current) - np.exp(behavior))
    columns["advantage"] = row.get("token_advantage")
    if columns["advantage"] is None and row.get("advantage") is not None:
        columns["advantage"] = np.full(len(row["tokens"]), row["advantage"], np.float32)
    return columns


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
