"""Completions and groups read back from Parquet, exact to the bit."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data import Completion, Group, Prompt, SamplingMask, Score
from proxima.runtime.state.completion_columns import ABOUT, MASK_COLUMNS, PER_TOKEN, parsed
from proxima.runtime.state.rollouts import OF_ADVANTAGE, OF_RECORD, read_table


def numpy_columns(column: pa.ChunkedArray) -> list[NDArray[Any] | None]:
    """The rows of a list column as arrays; null is None."""
    out: list[NDArray[Any] | None] = []
    for chunk in column.chunks:
        offsets, flat = chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False)
        rows = zip(offsets[:-1], offsets[1:], chunk.is_valid().to_pylist(), strict=True)
        out += [flat[start:end] if valid else None for start, end, valid in rows]
    return out


def array_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table, lists as arrays, what is stored as JSON parsed."""
    columns = {
        field.name: (numpy_columns if pa.types.is_list(field.type) else pa.ChunkedArray.to_pylist)(table[field.name])
        for field in table.schema
    }
    return parsed(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def stored_completion(row: Mapping[str, Any], k: int | None) -> Completion:
    """The completion of a row, exact to the bit, with `k` top tokens at each position."""
    columns = {name: row[name] for name in (*ABOUT, *PER_TOKEN)}
    for name in ("top_k", "top_k_log_prob"):
        if row[name] is not None:
            columns[name] = row[name].reshape(len(row["tokens"]), k)
    ids, counts = (row.get(name) for name in MASK_COLUMNS)  # files of earlier versions have no such columns
    mask = None if ids is None or counts is None else SamplingMask.of_counts(ids, counts)
    if row.get("routed_experts") is not None:
        from proxima.runtime.state.route_columns import stored_routes

        columns |= stored_routes(row)
    if row.get("episode") is not None:
        from proxima.runtime.state.episode_columns import stored_episode

        columns |= stored_episode(row)
    return Completion(**columns, sampling_mask=mask)


def stored_completions(rows: Iterable[Mapping[str, Any]], k: int | None) -> tuple[Completion, ...]:
    """The completions of a prompt's rows, in order; those of an episode, which has a row for each path, as one."""
    completions = tuple(stored_completion(row, row.get("k", k)) for row in rows)
    if all(completion.episode is None for completion in completions):
        return completions
    from proxima.runtime.state.episode_columns import joined_paths

    return joined_paths(completions)


def stored_groups(path: Path) -> tuple[tuple[Group, ...], tuple[tuple[Group, str], ...]]:
    """The groups of a step's file, exact to the bit: those that the step used, and those dropped before, with the
    reason. Of a prompt, the file has its tokens and its question."""
    of_trainer = {*OF_RECORD, *OF_ADVANTAGE}
    rows = array_rows(read_table(path, [name for name in pq.read_schema(path).names if name not in of_trainer]))
    top = [len(row["top_k"]) // len(row["tokens"]) for row in rows if row["top_k"] is not None and len(row["tokens"])]
    k = max(top, default=0)
    used, dropped = [], []
    for uid, members in groupby(rows, key=itemgetter("prompt_uid")):
        rows_of = list(members)
        first = rows_of[0]
        group = Group(
            prompt=Prompt(
                uid=uid,
                messages=({"role": "user", "content": first["question"]},),
                tokens=first["prompt_tokens"],
                answer=first["answer"],
            ),
            completions=stored_completions(rows_of, k),
            scores=tuple(_stored_score(row) for row in {row["sample"]: row for row in rows_of}.values()),
            baseline=first["baseline"],
        )
        if first["used"]:
            used.append(group)
        else:
            dropped.append((group, str(first["outcome"]).removeprefix("dropped_")))
    return tuple(used), tuple(dropped)


def _stored_score(row: Mapping[str, Any]) -> Score:
    facts = {name: row[name] for name in ("valid", "parts", "error", "correct")}
    return Score(value=float("nan") if row["reward"] is None else row["reward"], **facts)
