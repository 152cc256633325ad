"""What the policy wrote, as Parquet: one file a step, one row a completion. To be read by pandas, DuckDB, the report,
or `read_rows`.

Everything that tells why a token was or was not learnt from stays here: the log-prob it was sampled with, the version
that sampled it, the trainer's own log-prob, and whether the trust region kept it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from proxima.data import Completion, Group, Prompt, Score, UserError
from proxima.data.atomic_files import atomic_writer
from proxima.data.flow import Key
from proxima.data.jsonl import dumps, utf8
from proxima.runtime.state.list_columns import list_of, mask_columns, write_rows
from proxima.train.completion_record import CompletionRecord

_INTS, _FLOATS = list_of(pa.int32()), list_of(pa.float32())


def _field(name: str, kind: pa.DataType, doc: str = "", *, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"doc": doc} if doc else None)


_COMMON = [
    _field("step", pa.int32()),
    _field("prompt_uid", pa.int64()),
    _field("sample", pa.int32()),
    _field("turn", pa.int32()),
    _field("question", pa.string()),
    _field("answer", pa.string(), "JSON: what the reward compared with"),
    _field("text", pa.string()),
    _field("tokens", _INTS),
    _field("correct", pa.bool_(), "null where no reward knows, or the score is invalid", null=True),
    _field("reward", pa.float64(), "weighted sum; null where the score is invalid", null=True),
    _field("valid", pa.bool_(), "false: a scorer failed, the completion enters no mean"),
    _field("error", pa.string(), "why the score is invalid", null=True),
    _field("finish_reason", pa.string()),
]
_PARTS = _field("parts", pa.string(), "JSON: each reward by name, before its weight")
_TRAINING = [
    _field("prompt_tokens", _INTS),
    _field("sampled_log_prob", _FLOATS, "nats, under the distribution really sampled"),
    _field(
        "untruncated_log_prob", _FLOATS, "nats, at the temperature alone; null if sampled_log_prob is that", null=True
    ),
    _field(
        "behavior_log_prob", _FLOATS, "nats, the one of the two that the algorithm chose; null if dropped", null=True
    ),
    _field("policy_version", _INTS),
    _field(
        "next_log_prob",
        _FLOATS,
        "nats, under the version after the sampling one, of proximal=next; NaN: none",
        null=True,
    ),
    _field("log_prob", _FLOATS, "nats, the trainer's first forward; null where it made none", null=True),
    _field("keep", list_of(pa.bool_()), "the token stayed in the trust region at the first update", null=True),
    _field("entropy", _FLOATS, "nats, of the policy at the position, first forward", null=True),
    _PARTS,
    _field("advantage", pa.float64(), "reward units, of the completion", null=True),
    _field("token_advantage", _FLOATS, "null where all tokens have the completion's", null=True),
    _field("token_reward", _FLOATS, "reward units; null where the last loss token alone has one, the score", null=True),
    _field("temperature", pa.float64()),
    _field("outcome", pa.string(), "trained, skipped_zero_advantage, critic_only, dropped_<reason>, invalid"),
    _field("used", pa.bool_(), "false: the group was dropped before the step's advantages"),
    _field(
        "baseline", pa.float64(), "reward of the prompt's greedy completion, where the advantage needs it", null=True
    ),
    _field("top_k", _INTS, "[T, K] flattened, the K most probable tokens, where the engine reports them", null=True),
    _field("top_k_log_prob", _FLOATS, "nats, [T, K] flattened, of these, at the temperature alone", null=True),
    _field("sampling_mask", _INTS, "ids that could be sampled, those of token 0 first; null: not asked for", null=True),
    _field("sampling_mask_counts", _INTS, "[T], how many of these each token has", null=True),
]
EVAL_SCHEMA = pa.schema([*_COMMON, _PARTS], metadata={"proxima": "evals 3"})
ROLLOUT_SCHEMA = pa.schema(_COMMON + _TRAINING, metadata={"proxima": "rollouts 5"})

FORWARD = ("log_prob", "keep", "entropy")  # of the trainer's first forward


def write_rollouts(path: Path, step: int, groups: Sequence[Group], records: Mapping[Key, CompletionRecord]) -> None:
    """Write a step's completions: to a temporary name, fsynced, renamed. A failure leaves an existing file as it was.

    Args:
        path: the file, `rollouts/000012.parquet`.
        groups: the step's groups, dropped ones too.
        records: one for each completion, by its `key`.

    Raises:
        ValueError: a completion has no record, or a record has another number of values than the completion has tokens.
        OSError: the disk is full or read-only.
    """
    fields: list[dict[str, Any]] = []
    for group, completion, score in _completions(groups):
        if completion.key not in records:
            raise ValueError(f"records: none for prompt {group.prompt.uid}, sample {completion.sample}")
        fields.append(_common(step, group.prompt, completion, score))
        fields[-1] |= _training(group, completion, score, records[completion.key])
    _write(path, ROLLOUT_SCHEMA, fields)


def write_evals(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write an evaluation's completions, `evals/000040-after.parquet`; as `write_rollouts`."""
    _write(
        path,
        EVAL_SCHEMA,
        [_common(step, group.prompt, completion, score) for group, completion, score in _completions(groups)],
    )


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The file as an Arrow table, with the columns above or those wanted of them; `untruncated_log_prob` is filled in.

    Raises:
        ValueError: the file is torn or no Parquet; names it and the remedy.
    """
    sampled, filled = "sampled_log_prob", "untruncated_log_prob"
    wanted = None if columns is None else [*columns, *({sampled} - set(columns) if filled in columns else ())]
    try:
        table = pq.read_table(path, columns=wanted, partitioning=None)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{path} is no whole Parquet file ({error}); delete it to read the others. A resume generates it again if"
            " its step is after the last checkpoint; else its completions are lost, which training does not need"
        ) from error
    if filled in table.column_names:
        whole = pc.coalesce(table[filled], table[sampled])
        table = table.set_column(table.column_names.index(filled), table.schema.field(filled), whole)
    return table if columns is None else table.select(columns)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The file as dictionaries; `answer` and `parts` are parsed from their JSON."""
    rows: list[dict[str, Any]] = read_table(path, columns).to_pylist()
    for row in rows:
        for name in ("answer", "parts"):
            if name in row:
                row[name] = json.loads(row[name])
    return rows


def _completions(groups: Sequence[Group]) -> Iterator[tuple[Group, Completion, Score]]:
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            yield group, completion, score


def _common(step: int, prompt: Prompt, completion: Completion, score: Score) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_uid": prompt.uid,
        "sample": completion.sample,
        "turn": completion.turn,
        "question": utf8(prompt.question),
        "answer": dumps(prompt.answer),
        "text": utf8(completion.text),
        "tokens": completion.tokens,
        "correct": score.correct if score.valid else None,
        "reward": float(score.value) if score.valid else None,
        "valid": score.valid,
        "error": None if score.error is None else utf8(score.error),
        "finish_reason": completion.finish_reason,
        "parts": dumps(score.parts),
    }


def _training(group: Group, completion: Completion, score: Score, record: CompletionRecord) -> dict[str, Any]:
    per_token = {name: getattr(record, name) for name in ("behavior_log_prob", "next_log_prob")}
    per_token |= {name: getattr(record.statistics, name, None) for name in FORWARD}
    for name, values in per_token.items():
        if values is not None and len(values) != len(completion.tokens):
            where = f"prompt {group.prompt.uid}, sample {completion.sample}"
            raise ValueError(f"records.{name}: {len(values)} values for {len(completion.tokens)} tokens of {where}")
    sampled, untruncated = completion.sampled_log_prob, completion.untruncated_log_prob
    return {
        "prompt_tokens": group.prompt.tokens,
        "sampled_log_prob": sampled,
        "untruncated_log_prob": None if untruncated is sampled or np.array_equal(untruncated, sampled) else untruncated,
        "policy_version": completion.policy_version,
        "advantage": record.advantage,
        "token_advantage": record.token_advantage,
        "token_reward": record.token_reward,
        "temperature": completion.temperature,
        "outcome": record.outcome,
        "used": record.used,
        "baseline": group.baseline,
        "top_k": completion.top_k,
        "top_k_log_prob": completion.top_k_log_prob,
        **mask_columns(completion.sampling_mask),
        **per_token,
    }


def _write(path: Path, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)  # somebody may have deleted what he needs no more, during the run
    with atomic_writer(path) as file:
        write_rows(file, schema, rows)
