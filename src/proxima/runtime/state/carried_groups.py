"""Scored groups in a file: what a checkpoint keeps of a batch that is not consumed yet. Parquet, one row a completion,
exact to the bit."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from proxima.data import Completion, Group, Prompt, Score, UserError
from proxima.data.jsonl import dumps, utf8
from proxima.runtime.state.list_columns import MASK_COLUMNS, list_of, mask_columns, numpy_columns, read_mask, write_rows

CARRIED_GROUPS = "carried_groups.parquet"
DELETE = "delete this checkpoint to use the one before"

_INTS, _FLOATS = list_of(pa.int32()), list_of(pa.float32())
_JSON = {"doc": "JSON"}
_GROUP = [  # in the first row of a group, null in its others
    pa.field("messages", pa.string(), metadata=_JSON),
    pa.field("prompt_tokens", _INTS),
    pa.field("answer", pa.string(), metadata=_JSON),
    pa.field("metadata", pa.string(), metadata=_JSON),
    pa.field("chat", pa.bool_()),
    pa.field("baseline", pa.float64()),
]
_COMPLETION = [
    pa.field("sample", pa.int32()),
    pa.field("turn", pa.int32()),
    pa.field("tokens", _INTS),
    pa.field("text", pa.string()),
    pa.field("sampled_log_prob", _FLOATS),
    pa.field("untruncated_log_prob", _FLOATS),
    pa.field("policy_version", _INTS),
    pa.field("finish_reason", pa.string()),
    pa.field("temperature", pa.float64()),
    pa.field("top_k", _INTS, metadata={"doc": "[T, k] flattened"}),
    pa.field("top_k_log_prob", _FLOATS, metadata={"doc": "[T, k] flattened"}),
    pa.field("k", pa.int32()),
    *(pa.field(name, _INTS) for name in MASK_COLUMNS),
]
_SCORE = [
    pa.field("value", pa.float64()),
    pa.field("valid", pa.bool_()),
    pa.field("parts", pa.string(), metadata=_JSON),
    pa.field("error", pa.string()),
    pa.field("correct", pa.bool_()),
]
SCHEMA = pa.schema([pa.field("uid", pa.int64()), *_GROUP, *_COMPLETION, *_SCORE], metadata={"proxima": "groups 4"})


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write the groups; `read_groups` gives them back equal. What no file can hold becomes what the rollouts hold of
    it."""
    with path.open("wb") as file:
        write_rows(file, SCHEMA, [row for group in groups for row in _rows(group)])


def read_groups(path: Path, uids: Sequence[int]) -> list[Group]:
    """The groups of a file, of the prompts `uids`, in order; without any, the file may be missing.

    Raises:
        UserError: the file is missing, torn, or holds other groups; names it and the remedy.
    """
    if not uids and not path.is_file():
        return []
    groups = [_group(list(members)) for _, members in groupby(read_snapshot(path), key=itemgetter("uid"))]
    if [group.prompt.uid for group in groups] != list(uids):
        raise UserError(f"{path} holds other groups than state.json says", remedy=DELETE)
    return groups


def read_snapshot(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file in a checkpoint; lists are arrays.

    Raises:
        UserError: the file is missing or torn; names it and the remedy.
    """
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} is no whole Parquet file ({error})", remedy=DELETE) from error
    columns = {
        field.name: (numpy_columns if pa.types.is_list(field.type) else pa.ChunkedArray.to_pylist)(table[field.name])
        for field in table.schema
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    first: dict[str, Any] = {
        "messages": dumps(prompt.messages),
        "prompt_tokens": prompt.tokens,
        "answer": dumps(prompt.answer),
        "metadata": dumps(prompt.metadata),
        "chat": prompt.chat,
        "baseline": group.baseline,
    }
    for completion, score in zip(group.completions, group.scores, strict=True):
        texts = {
            "text": utf8(completion.text),
            "parts": dumps(score.parts),
            "error": None if score.error is None else utf8(score.error),
        }
        k = None if completion.top_k is None else completion.top_k.shape[-1]
        mask = mask_columns(completion.sampling_mask)
        yield first | vars(completion) | vars(score) | texts | mask | {"uid": prompt.uid, "k": k}
        first = {}


def _group(rows: Sequence[dict[str, Any]]) -> Group:
    first = rows[0]
    prompt = Prompt(
        uid=first["uid"],
        messages=tuple(json.loads(first["messages"])),
        tokens=first["prompt_tokens"],
        answer=json.loads(first["answer"]),
        metadata=json.loads(first["metadata"]),
        chat=bool(first.get("chat")),  # earlier files have no such column
    )
    completions = []
    for row in rows:
        facts = {field.name: row[field.name] for field in _COMPLETION if field.name not in ("k", *MASK_COLUMNS)}
        shaped = {name: row[name].reshape(-1, row["k"]) for name in ("top_k", "top_k_log_prob") if row["k"]}
        completions.append(Completion(prompt_uid=prompt.uid, sampling_mask=read_mask(row), **(facts | shaped)))
    scores = [
        Score(**{field.name: row[field.name] for field in _SCORE} | {"parts": json.loads(row["parts"])}) for row in rows
    ]
    return Group(prompt=prompt, completions=tuple(completions), scores=tuple(scores), baseline=first["baseline"])
