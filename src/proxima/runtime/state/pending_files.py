"""Files of a checkpoint other than the weights: groups that no step has consumed yet, and their next-policy log-probs.
Parquet, one row per completion or path of an episode, exact to the bit."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from proxima.data.columns import filled_by
from proxima.data.flow import Group, Prompt
from proxima.runtime.state.completion_columns import (
    OF_TOKENS,
    completion_row,
    in_file,
    prompt_row,
    question_weight_of,
    schema,
    score_row,
    write_rows,
)
from proxima.runtime.state.stored_completions import array_rows, stored_group
from proxima.system.jsonl import dumps
from proxima.training.next_policy import NextLogProbs

OF_PROMPT = ("messages", "prompt_tokens", "answer", "metadata", "chat")  # with the baseline in a group's first row
_ENGINE = [column for column in filled_by("engine") if column.name in OF_TOKENS]
OF_TOKEN = (
    *(column.name for column in _ENGINE if not column.ragged),
    "k",
    *in_file(column.name for column in _ENGINE if column.ragged),
)
OF_COMPLETION = ("sample", "turn", "text", *OF_TOKEN, "finish_reason", "temperature")
OF_SCORE = ("value", "valid", "parts", "error", "correct")
GROUPS = schema("groups 4", ("uid", *OF_PROMPT, "baseline", *OF_COMPLETION, *OF_SCORE), nullable=True)
NEXT = schema("next policy 1", ("uid", "sample", "turn", "tokens", "policy_version", "log_prob"), nullable=True)


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write the groups; `read_groups` gives them back equal. Values that no file can hold are stored as in the
    rollouts."""
    rows = []
    for group in groups:
        prompt = group.prompt
        of_group: dict[str, Any] = {
            **prompt_row(prompt),
            "messages": dumps(prompt.messages),
            "prompt_tokens": prompt.tokens,
            "answer": dumps(prompt.answer),
            "metadata": dumps(prompt.metadata),
            "chat": prompt.chat,
            "baseline": group.baseline,
        }
        for completion, score in zip(group.completions, group.scores, strict=True):
            for episode_path in completion.paths:
                top_k = episode_path.top_k
                k = None if top_k is None else top_k.shape[-1]
                row = completion_row(episode_path) | score_row(score) | of_group
                rows.append(row | {"uid": prompt.uid, "k": k})
                of_group = {}
    with path.open("wb") as file:
        write_rows(file, GROUPS, rows)


def read_groups(path: Path) -> list[Group]:
    """The groups of a file, in order; none where the checkpoint has no such file."""
    by_uid = groupby(_read(path), key=itemgetter("uid"))
    return [_group(uid, list(rows)) for uid, rows in by_uid]


def write_next_policy(path: Path, entries: Sequence[NextLogProbs]) -> None:
    """Write a snapshot; `read_next_policy` gives it back equal, to the bit."""
    with path.open("wb") as file:
        write_rows(file, NEXT, [vars(entry) for entry in entries])


def read_next_policy(path: Path) -> list[NextLogProbs]:
    """A snapshot; none where the checkpoint has no such file."""
    return [NextLogProbs(**row) for row in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file whose checksum the resume has compared."""
    if path.is_file():
        return array_rows(pq.read_table(path, partitioning=None))
    return []


def _group(uid: int, rows: Sequence[dict[str, Any]]) -> Group:
    first = rows[0]
    prompt = Prompt(
        uid=uid,
        messages=tuple(first["messages"]),
        tokens=first["prompt_tokens"],
        answer=first["answer"],
        metadata=first["metadata"],
        chat=first["chat"],
        weight=question_weight_of(first),
    )
    return stored_group(prompt, rows)
