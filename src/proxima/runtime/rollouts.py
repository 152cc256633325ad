"""What the policy wrote, as Parquet: one file a step, one row a completion. To be read by pandas, DuckDB, the report,
or `read_rows`.

Everything that tells why a token was or was not learnt from stays here: the log-prob it was sampled with, the version
that sampled it, the trainer's own log-prob, and whether the trust region kept it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from proxima.data import Completion, Group, Prompt, Score, UserError
from proxima.data.atomic_files import replacing
from proxima.data.columns import Bools, Floats
from proxima.data.jsonl import dumps, utf8

_COMMON = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("prompt_uid", pa.int64(), nullable=False),
    pa.field("sample", pa.int32(), nullable=False),
    pa.field("question", pa.string(), nullable=False),
    pa.field("answer", pa.string(), nullable=False, metadata={"doc": "JSON: what the reward compared with"}),
    pa.field("text", pa.string(), nullable=False),
    pa.field("tokens", pa.list_(pa.int32()), nullable=False),
    pa.field("correct", pa.bool_(), metadata={"doc": "null where no reward knows, or the score is invalid"}),
    pa.field("reward", pa.float64(), metadata={"doc": "weighted sum; null where the score is invalid"}),
    pa.field(
        "valid", pa.bool_(), nullable=False, metadata={"doc": "false: a scorer failed, the completion enters no mean"}
    ),
    pa.field("error", pa.string(), metadata={"doc": "why the score is invalid"}),
    pa.field("finish_reason", pa.string(), nullable=False),
]
_TRAINING = [
    pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
    pa.field(
        "sampled_log_prob",
        pa.list_(pa.float32()),
        nullable=False,
        metadata={"doc": "nats, under the distribution really sampled"},
    ),
    pa.field(
        "untruncated_log_prob",
        pa.list_(pa.float32()),
        nullable=False,
        metadata={"doc": "nats, at the temperature alone"},
    ),
    pa.field("policy_version", pa.list_(pa.int32()), nullable=False),
    pa.field(
        "log_prob",
        pa.list_(pa.float32()),
        metadata={"doc": "nats, the trainer's first forward; null where it made none"},
    ),
    pa.field(
        "keep", pa.list_(pa.bool_()), metadata={"doc": "the token stayed in the trust region at the first update"}
    ),
    pa.field("entropy", pa.list_(pa.float32()), metadata={"doc": "nats, of the policy at the position, first forward"}),
    pa.field("parts", pa.string(), nullable=False, metadata={"doc": "JSON: each reward by name, before its weight"}),
    pa.field("advantage", pa.float64()),
    pa.field("temperature", pa.float32(), nullable=False),
    pa.field(
        "outcome",
        pa.string(),
        nullable=False,
        metadata={"doc": "trained, skipped_zero_advantage, dropped_<reason>, invalid"},
    ),
]
EVAL_SCHEMA = pa.schema(_COMMON, metadata={"proxima": "evals 1"})
ROLLOUT_SCHEMA = pa.schema(_COMMON + _TRAINING, metadata={"proxima": "rollouts 1"})


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """What became of one completion in its step.

    Args:
        outcome: `trained`, `skipped_zero_advantage`, `dropped_<reason>` or `invalid`.
        advantage: reward units; None where none was computed.
        log_prob: [tokens] nats, the trainer's first forward. None where it made none.
        keep: [tokens], the surrogate kept the token at the first update.
        entropy: [tokens] nats.
    """

    outcome: str
    advantage: float | None = None
    log_prob: Floats | None = None
    keep: Bools | None = None
    entropy: Floats | None = None


def write_rollouts(path: Path, step: int, groups: Sequence[Group], fates: Sequence[CompletionRecord]) -> None:
    """Write a step's completions: to a name aside, fsynced, renamed. A failure leaves a former file whole.

    Args:
        path: the file, `rollouts/000012.parquet`.
        groups: the step's groups, dropped ones too.
        fates: one for each completion, in the order of the groups and of their completions.

    Raises:
        ValueError: a number of fates, or of values in one, that doesn't fit.
        OSError: the disk is full or read-only.
    """
    rows = list(_completions(groups))
    if len(fates) != len(rows):
        raise UserError(f"fates: {len(fates)} for {len(rows)} completions")
    _write(
        path,
        ROLLOUT_SCHEMA,
        [_common(step, *row) | _training(*row, fate) for row, fate in zip(rows, fates, strict=True)],
    )


def write_evals(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write an evaluation's completions, `evals/000040-after.parquet`; as `write_rollouts`."""
    _write(path, EVAL_SCHEMA, [_common(step, *row) for row in _completions(groups)])


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The file as an Arrow table, with the columns above or those wanted of them.

    Raises:
        ValueError: the file is torn or no Parquet; names it and the remedy.
    """
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns), partitioning=None)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{path} is no whole Parquet file ({error}); delete it and resume: the step is run again"
        ) from error


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The file as dictionaries; `answer` and `parts` are parsed from their JSON."""
    rows: list[dict[str, Any]] = read_table(path, columns).to_pylist()
    for row in rows:
        for name in ("answer", "parts"):
            if name in row:
                row[name] = json.loads(row[name])
    return rows


def _completions(groups: Sequence[Group]) -> Iterator[tuple[Prompt, Completion, Score]]:
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            yield group.prompt, completion, score


def _common(step: int, prompt: Prompt, completion: Completion, score: Score) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_uid": prompt.uid,
        "sample": completion.sample,
        "question": utf8(prompt.question),
        "answer": dumps(prompt.answer),
        "text": utf8(completion.text),
        "tokens": completion.tokens,
        "correct": score.correct if score.valid else None,
        "reward": float(score.value) if score.valid else None,
        "valid": score.valid,
        "error": None if score.error is None else utf8(score.error),
        "finish_reason": completion.finish_reason,
    }


def _training(prompt: Prompt, completion: Completion, score: Score, fate: CompletionRecord) -> dict[str, Any]:
    for name in ("log_prob", "keep", "entropy"):
        values = getattr(fate, name)
        if values is not None and len(values) != len(completion.tokens):
            where = f"prompt {prompt.uid}, sample {completion.sample}"
            raise UserError(f"fates.{name}: {len(values)} values for {len(completion.tokens)} tokens of {where}")
    return {
        "prompt_tokens": prompt.tokens,
        "sampled_log_prob": completion.sampled_log_prob,
        "untruncated_log_prob": completion.untruncated_log_prob,
        "policy_version": completion.policy_version,
        "log_prob": fate.log_prob,
        "keep": fate.keep,
        "entropy": fate.entropy,
        "parts": dumps(score.parts),
        "advantage": fate.advantage,
        "temperature": completion.temperature,
        "outcome": fate.outcome,
    }


def _write(path: Path, schema: pa.Schema, rows: list[Mapping[str, Any]]) -> None:
    table = pa.Table.from_pydict(
        {field.name: pa.array([row[field.name] for row in rows], field.type) for field in schema}, schema=schema
    )
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")
