"""The completions of the policy as Parquet: one file per step, one row per completion. Readable by pandas, DuckDB, the
report, and `read_rows`.

Everything that tells why a token was or was not learnt from stays here: the log-prob it was sampled with, the version
that sampled it, the trainer's own log-prob, and whether the trust region kept it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from proxima.data import UserError
from proxima.data.columns import Floats, filled_by
from proxima.data.flow import Completion, Group, Key, Prompt, Score, prompt_name
from proxima.data.image_tokens import shown_images
from proxima.runtime.state.completion_columns import (
    FIELDS,
    OF_TOKENS,
    completion_row,
    in_file,
    parsed,
    prompt_row,
    schema,
    score_row,
    torn_file,
    write_rows,
)
from proxima.system.atomic_files import atomic_writer
from proxima.system.damage import check_columns, reading
from proxima.system.jsonl import dumps, utf8
from proxima.task.mix import TaskSource, source_of
from proxima.training.batch_builder import CompletionRecord

OF_SCORE = ("correct", "reward", "valid", "error", "parts")
COMMON = ("step", "prompt_uid", "sample", "turn", "question", "answer", "text", "tokens", "finish_reason", *OF_SCORE)
_ENGINE = [column for column in filled_by("engine") if column.name in OF_TOKENS and column.name != "tokens"]
OF_ENGINE = (
    *(column.name for column in _ENGINE if column.required),
    "temperature",
    *(column.name for column in _ENGINE if not column.required),
)
_BATCH = filled_by("batch")
OF_TRAJECTORY = tuple(column.name for column in _BATCH if column.stored == "always")  # one value a token, or null
FEW_OF_TRAJECTORY = tuple(column.name for column in _BATCH if column.stored == "where it occurs")
OF_FORWARD = tuple(column.name for column in filled_by("forward") if column.stored)  # as those
OF_RECORD = (*OF_TRAJECTORY, *OF_FORWARD)
OF_ADVANTAGE = ("advantage", *(column.name for column in filled_by("advantage") if column.stored))
OF_COMPLETION = ("outcome", "used", "updates_before")
TRAINING = ("prompt_tokens", "baseline", *in_file(OF_ENGINE), *OF_COMPLETION, *OF_RECORD, *OF_ADVANTAGE)
DELETE = (
    "delete it to read the others. A resume generates it again if its step is after the last checkpoint; else its "
    "completions are lost, which training does not need"
)
EVAL_SCHEMA = schema("evals 3", COMMON)
ROLLOUT_SCHEMA = schema("rollouts 5", COMMON + TRAINING)


def write_rollouts(path: Path, step: int, groups: Sequence[Group], records: Mapping[Key, CompletionRecord]) -> None:
    """Write a step's completions: to a temporary name, fsynced, renamed. A failure leaves an existing file as it was.

    Args:
        path: the file, `rollouts/000012.parquet`.
        groups: the step's groups, dropped ones too.
        records: one for each completion, and each path of an episode, by its `key`.

    Raises:
        ValueError: a record has another number of values than the completion has tokens.
        OSError: the disk is full or read-only.
    """
    rows: list[dict[str, Any]] = []
    for group, completion, score in _completions(groups):
        for part in completion.paths:
            row = _common(step, group.prompt, part, score)
            rows.append(row | _training(group, part, records[part.key]))
    _write(path, ROLLOUT_SCHEMA, rows)


def write_evals(path: Path, step: int, groups: Sequence[Group], sources: Sequence[TaskSource] = ()) -> None:
    """Write an evaluation's completions, `evals/000040-after.parquet`; as `write_rollouts`. The rows of a mix, whose
    sources these are, name theirs."""
    rows: list[dict[str, Any]] = []
    for group, completion, score in _completions(groups):
        row = _common(step, group.prompt, completion, score)
        rows.append(row | {"source": _source_name(sources, group.prompt)})
    _write(path, EVAL_SCHEMA, rows)


def _source_name(sources: Sequence[TaskSource], prompt: Prompt) -> str | None:
    """The name of the source of a prompt; None if the task is no mix."""
    if sources:
        return source_of(sources, prompt.metadata).name or None
    return None


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The file as an Arrow table, with the columns above or those wanted of them; `untruncated_log_prob` is filled in.

    Raises:
        UserError: the file is damaged, or no Parquet; names it and the remedy.
    """
    sampled = "sampled_log_prob"
    filled = "untruncated_log_prob"
    wanted = None
    if columns is not None:
        wanted = list(columns)
        if filled in columns and sampled not in columns:
            wanted.append(sampled)
    with reading(path, DELETE):
        try:
            table = pq.read_table(path, columns=wanted, partitioning=None)
        except pa.ArrowInvalid as error:
            raise UserError(f"{path} {torn_file(error)}", remedy=DELETE) from error
        check_columns(table, FIELDS)
    if filled in table.column_names:
        whole = pc.coalesce(table[filled], table[sampled])
        place = table.column_names.index(filled)
        table = table.set_column(place, table.schema.field(filled), whole)
    if columns is None:
        return table
    return table.select(columns)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The file as dictionaries; `answer` and `parts` are parsed from their JSON."""
    table = read_table(path, columns)
    with reading(path, DELETE):
        return parsed(table.to_pylist())


def _completions(groups: Sequence[Group]) -> Iterator[tuple[Group, Completion, Score]]:
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            yield group, completion, score


def _common(step: int, prompt: Prompt, completion: Completion, score: Score) -> dict[str, Any]:
    """The columns of a completion that both kinds of file have."""
    row = completion_row(completion) | score_row(score)
    row["step"] = step
    row["question"] = utf8(prompt.question)
    row["answer"] = dumps(prompt.answer)
    row["images"] = _images(prompt)
    if score.valid:
        row["correct"] = score.correct
        row["reward"] = float(score.value)
    else:
        row["correct"] = None
    return row


def _images(prompt: Prompt) -> list[int] | None:
    """The numbers of the images that a prompt shows."""
    if (prompt.tokens >= 0).all():
        return None
    return shown_images(prompt.tokens)


def _training(group: Group, completion: Completion, record: CompletionRecord) -> dict[str, Any]:
    """The columns of a completion that only the rollouts have."""
    per_token = _values(record.trajectory, OF_TRAJECTORY + FEW_OF_TRAJECTORY)
    per_token |= _values(record.statistics, OF_FORWARD)
    for name, values in per_token.items():
        if values is not None and len(values) != len(completion.tokens):
            where = f"{prompt_name(group.prompt.uid)}, sample {completion.sample}"
            raise ValueError(f"records.{name}: {len(values)} values for {len(completion.tokens)} tokens of {where}")
    row = prompt_row(group.prompt)
    row["prompt_tokens"] = group.prompt.tokens
    row["untruncated_log_prob"] = _untruncated(completion)
    row["baseline"] = group.baseline
    row["outcome"] = record.outcome
    row["used"] = record.used
    row["updates_before"] = None if record.statistics is None else record.statistics.updates_before
    return row | _values(record, OF_ADVANTAGE) | per_token


def _values(source: object, names: Sequence[str]) -> dict[str, Any]:
    """The attributes of this name; None where there is no source."""
    if source is None:
        return dict.fromkeys(names)
    return {name: getattr(source, name) for name in names}


def _untruncated(completion: Completion) -> Floats | None:
    """The log-probs at the temperature alone; None where they are those of the distribution sampled."""
    sampled = completion.sampled_log_prob
    untruncated = completion.untruncated_log_prob
    if untruncated is sampled or np.array_equal(untruncated, sampled):
        return None
    return untruncated


def _write(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)  # somebody may have deleted what he needs no more, during the run
    with atomic_writer(path) as file:
        write_rows(file, schema, rows)
