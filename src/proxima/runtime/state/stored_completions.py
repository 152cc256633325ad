"""Completions and groups read back from Parquet, exact to the bit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data.columns import SamplingMask
from proxima.data.episode import Episode
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.runtime.state.completion_columns import ABOUT, EXPERT_IDS, STORED, counts_of, parsed, question_weight_of
from proxima.runtime.state.rollouts import OF_ADVANTAGE, OF_RECORD, read_table
from proxima.system.damage import reading


def numpy_columns(column: pa.ChunkedArray) -> list[NDArray[Any] | None]:
    """The rows of a list column as arrays; null is None."""
    out: list[NDArray[Any] | None] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        flat = chunk.values.to_numpy(zero_copy_only=False)
        rows = zip(offsets[:-1], offsets[1:], chunk.is_valid().to_pylist(), strict=True)
        out += [flat[start:end] if valid else None for start, end, valid in rows]
    return out


def array_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table, lists as arrays, what is stored as JSON parsed."""
    columns = dict[str, list[Any]]()
    for field in table.schema:
        column = table[field.name]
        columns[field.name] = numpy_columns(column) if pa.types.is_list(field.type) else column.to_pylist()
    rows = zip(*columns.values(), strict=True)
    return parsed(dict(zip(columns, row, strict=True)) for row in rows)


def stored_routes(row: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a row's tokens, by the name of the column; None where it has none."""
    each = (row["routed_layers"], row["routed_per_token"])
    size = len(row[EXPERT_IDS[0]]) // (len(row["tokens"]) * each[0] * each[1])
    stored = {name: row[name] for name in EXPERT_IDS if row[name] is not None}
    return {name: np.frombuffer(ids, f"int{8 * size}").reshape(-1, *each) for name, ids in stored.items()}


def stored_group(prompt: Prompt, rows: Sequence[Mapping[str, Any]]) -> Group:
    """The group of a prompt's rows, exact to the bit; an episode has a row for each path."""
    every_path = [_completion(prompt.uid, row) for row in rows]
    completions = []
    for _, paths in groupby(every_path, key=attrgetter("sample")):
        *earlier, last = paths
        if earlier:
            last = replace(last, earlier=tuple(earlier))
        completions.append(last)
    last_rows = {row["sample"]: row for row in rows}
    scores = tuple(map(_score, last_rows.values()))
    return Group(prompt=prompt, completions=tuple(completions), scores=scores, baseline=rows[0]["baseline"])


def _completion(uid: int, row: Mapping[str, Any]) -> Completion:
    columns = {name: row[name] for name in ABOUT}
    for column in STORED:
        values = row[column.name] if column.required else row.get(column.name)
        if column.by not in ("engine", "episode") or values is None:
            continue
        if column.ragged:
            columns[column.name] = SamplingMask.of_counts(values, row[counts_of(column.name)])
        elif column.axes == "T K":
            columns[column.name] = values.reshape(len(row["tokens"]), row["k"])
        elif column.dtype != "id":
            columns[column.name] = values
    if row.get(EXPERT_IDS[0]) is not None:
        columns |= stored_routes(row)
    if row.get("episode") is not None:
        columns["episode"] = Episode.from_json(row["episode"])
        if row["opening"] is not None:
            columns["initial_prompt"] = Prompt(uid=uid, messages=(), tokens=row["opening"])
    return Completion(prompt_uid=uid, **columns)


def _score(row: Mapping[str, Any]) -> Score:
    name = "value" if "value" in row else "reward"  # as a checkpoint and the rollouts call it
    facts = {"value": row[name], "players": row.get("players")}
    if facts["value"] is None:
        facts["value"] = float("nan")
    for name in ("valid", "parts", "error", "correct"):
        facts[name] = row[name]
    return Score.of_facts(facts)


def stored_groups(path: Path) -> tuple[tuple[Group, ...], tuple[tuple[Group, str], ...]]:
    """The groups of a step's file: those that the step used, and those dropped before, with the reason. Of a prompt,
    the file has its tokens and its question."""
    of_trainer = {*OF_RECORD, *OF_ADVANTAGE}
    with reading(path):
        names = [name for name in pq.read_schema(path).names if name not in of_trainer]
        table = read_table(path, names)
        return _groups(array_rows(table))


def _groups(rows: Sequence[dict[str, Any]]) -> tuple[tuple[Group, ...], tuple[tuple[Group, str], ...]]:
    k = 0
    for row in rows:
        if row["top_k"] is not None and len(row["tokens"]):
            k = max(k, len(row["top_k"]) // len(row["tokens"]))
    used = []
    dropped = []
    for uid, members in groupby(rows, key=itemgetter("prompt_uid")):
        rows_of = [row | {"k": k} for row in members]
        first = rows_of[0]
        messages = ({"role": "user", "content": first["question"]},)
        prompt = Prompt(
            uid=uid,
            messages=messages,
            tokens=first["prompt_tokens"],
            answer=first["answer"],
            weight=question_weight_of(first),
        )
        group = stored_group(prompt, rows_of)
        if first["used"]:
            used.append(group)
        else:
            dropped.append((group, str(first["outcome"]).removeprefix("dropped_")))
    return tuple(used), tuple(dropped)
