"""Scored groups in a file: what a checkpoint keeps of a batch that is not consumed yet. Parquet, one row a group, exact
to the bit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from proxima.data import Completion, Group, Prompt, Score, UserError
from proxima.data.jsonl import dumps, utf8

PENDING = "pending.parquet"

_TOKENS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
_COMPLETION = pa.struct(
    [
        pa.field("sample", pa.int32()),
        pa.field("turn", pa.int32()),
        pa.field("tokens", _TOKENS),
        pa.field("text", pa.string()),
        pa.field("sampled_log_prob", _NUMBERS),
        pa.field("untruncated_log_prob", _NUMBERS),
        pa.field("policy_version", _TOKENS),
        pa.field("finish_reason", pa.string()),
        pa.field("temperature", pa.float64()),
        pa.field("top_k", pa.list_(_TOKENS)),
        pa.field("top_k_log_prob", pa.list_(_NUMBERS)),
    ]
)
_SCORE = pa.struct(
    [
        pa.field("value", pa.float64()),
        pa.field("valid", pa.bool_()),
        pa.field("parts", pa.string(), metadata={"doc": "JSON"}),
        pa.field("error", pa.string()),
        pa.field("correct", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("uid", pa.int64()),
        pa.field("messages", pa.string(), metadata={"doc": "JSON"}),
        pa.field("prompt_tokens", _TOKENS),
        pa.field("answer", pa.string(), metadata={"doc": "JSON"}),
        pa.field("metadata", pa.string(), metadata={"doc": "JSON"}),
        pa.field("completions", pa.list_(_COMPLETION)),
        pa.field("scores", pa.list_(_SCORE)),
        pa.field("baseline", pa.float64()),
    ],
    metadata={"proxima": "pending 2"},
)


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write the groups; `read_groups` gives them back equal. What no file can hold becomes what the rollouts hold of
    it."""
    pq.write_table(pa.Table.from_pylist([_row(group) for group in groups], schema=SCHEMA), path, compression="zstd")


def read_groups(path: Path, uids: Sequence[int]) -> list[Group]:
    """The groups of a file; `uids` are those that it must hold, and where there are none there need be no file.

    Raises:
        ValueError: the file is missing, torn, or holds other groups; names it and the remedy.
    """
    if not uids and not path.is_file():
        return []
    try:
        rows = pq.read_table(path, partitioning=None).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path} is no whole Parquet file ({error}); delete this checkpoint to use the one before"
        ) from error
    if [row["uid"] for row in rows] != list(uids):
        raise UserError(f"{path} holds other groups than state.json says; delete this checkpoint to use the one before")
    return [_group(row) for row in rows]


def _row(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "uid": prompt.uid,
        "messages": dumps(prompt.messages),
        "prompt_tokens": prompt.tokens,
        "answer": dumps(prompt.answer),
        "metadata": dumps(prompt.metadata),
        "completions": [
            {name: value for name, value in c.to_json().items() if name != "prompt_uid"} | {"text": utf8(c.text)}
            for c in group.completions
        ],
        "scores": [
            asdict(score) | {"parts": dumps(score.parts), "error": None if score.error is None else utf8(score.error)}
            for score in group.scores
        ],
        "baseline": group.baseline,
    }


def _group(row: Mapping[str, Any]) -> Group:
    prompt = Prompt(
        uid=row["uid"],
        messages=tuple(json.loads(row["messages"])),
        tokens=row["prompt_tokens"],
        answer=json.loads(row["answer"]),
        metadata=json.loads(row["metadata"]),
    )
    completions = tuple(Completion(prompt_uid=prompt.uid, **c) for c in row["completions"])
    scores = tuple(Score(**{**s, "parts": json.loads(s["parts"])}) for s in row["scores"])
    return Group(prompt=prompt, completions=completions, scores=scores, baseline=row["baseline"])
