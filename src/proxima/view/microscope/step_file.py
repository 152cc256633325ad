"""A step's completions, read from its Parquet file by row group and column, a few megabytes at a time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data import UserError
from proxima.data.flow import Key, prompt_name
from proxima.data.json_reader import load_json
from proxima.runtime.state.completion_columns import FIELDS, torn_file
from proxima.runtime.state.stored_completions import array_rows
from proxima.system.damage import check_columns
from proxima.system.jsonl import utf8
from proxima.view.formatting import shortened

FORMAT = "rollouts 5"
SCALARS = ("prompt_uid", "sample", "turn", "reward", "valid", "correct", "finish_reason", "outcome", "advantage")
TEXTS = ("question", "answer")  # the same for all completions of a group
GROUP = ("sample", "turn", "text", "reward", "parts", "advantage", "outcome", "finish_reason", "correct", "error")
BEGINNING = 80  # characters of an answer in the table of a step
MESSAGE = 240  # characters of a message shown in a view of several episodes
REQUIRED = {
    *SCALARS,
    *TEXTS,
    "text",
    "tokens",
    "policy_version",
    "sampled_log_prob",
    "behavior_log_prob",
    "log_prob",
    "keep",
}


@dataclass(frozen=True)
class StepFile:
    """`rollouts/000012.parquet`, as of its opening: files are replaced as a whole, never modified.

    Raises:
        UserError: the file is missing, damaged, or in the format of another version.
    """

    path: Path

    def __post_init__(self) -> None:
        names = {name.partition(".")[0] for name in self._parquet.schema_arrow.names}
        missing = sorted(REQUIRED - names)
        if missing:
            metadata = self._parquet.schema_arrow.metadata or {}
            stored = metadata.get(b"proxima", b"an unknown format").decode("utf-8", "replace")
            raise UserError(
                f"{self.path.name} has no {missing[0]}: it is {stored}, of another version; this one reads {FORMAT}"
            )

    @cached_property
    def _parquet(self) -> pq.ParquetFile:
        try:
            if utf8(str(self.path)) == str(self.path):
                return pq.ParquetFile(self.path, pre_buffer=False)
            return pq.ParquetFile(self.path.open("rb"), pre_buffer=False)  # Arrow can't open such a name
        except FileNotFoundError:
            raise UserError(
                f"{self.path.name} does not exist: the step is not finished, or its file was deleted"
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.path.name} {torn_file(error)}") from error

    @property
    def columns(self) -> list[str]:
        return list(self._parquet.schema_arrow.names)

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        """Read a column of a row group."""
        try:
            table = self._parquet.read_row_group(group, columns=[name], use_threads=False)
            check_columns(table, FIELDS)
            return table[name]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UserError(f"{self.path.name} {torn_file(error)}") from error

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each row group, and the number of rows, [row groups + 1]."""
        sizes = [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.num_row_groups)]
        return np.cumsum([0, *sizes])

    @cached_property
    def table(self) -> dict[str, list[Any]]:
        """One value per completion, by column name, for drawing and filtering a step."""
        derived = ("length", "masked", "beginning", "version_min", "version_max")
        table: dict[str, list[Any]] = {name: [] for name in (*SCALARS, *derived)}
        for group in range(len(self.starts) - 1):
            for name in SCALARS:
                table[name] += self.column(group, name).to_pylist()
            for chunk in self.column(group, "policy_version").chunks:
                edges = chunk.offsets.to_numpy()
                flat = chunk.values.to_numpy()
                lengths = np.diff(edges)
                for name, pick in (("version_min", np.minimum), ("version_max", np.maximum)):
                    version = np.full(len(lengths), -1)
                    some = lengths > 0
                    if some.any():
                        version[some] = pick.reduceat(flat, edges[:-1][some])
                    table[name] += version.tolist()
            table["length"] += self._lengths(group)
            table["masked"] += self._masked(group)
            texts = pc.utf8_slice_codeunits(self.column(group, "text"), 0, 4 * BEGINNING)
            table["beginning"] += [" ".join((text or "").split())[:BEGINNING] for text in texts.to_pylist()]
        return table

    def _lengths(self, group: int) -> list[int]:
        """Count the tokens of each completion that the model wrote, without those of an environment's answers."""
        lengths: list[int] = pc.list_value_length(self.column(group, "policy_version")).to_pylist()
        if "sampled" not in self.columns:
            return lengths
        counts: list[int] = []
        for chunk in self.column(group, "sampled").chunks:
            total = np.concatenate([[0], np.cumsum(chunk.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
            counts += np.diff(total[chunk.offsets.to_numpy()]).tolist()
        given = self.column(group, "sampled").is_valid().to_pylist()
        for i, has_mask in enumerate(given):
            if has_mask:
                lengths[i] = counts[i]
        return lengths

    def _masked(self, group: int) -> list[int | None]:
        """Count the tokens of each completion that the model wrote and the update masked; None if it was not
        trained."""
        kept = array_rows(pa.table({"keep": self.column(group, "keep")}))
        wrote = kept
        if "sampled" in self.columns:
            wrote = array_rows(pa.table({"sampled": self.column(group, "sampled")}))
        return [_count_masked(row["keep"], other.get("sampled")) for row, other in zip(kept, wrote, strict=True)]

    @cached_property
    def rows(self) -> dict[Key, int]:
        """The row of each completion."""
        columns = (self.table[name] for name in ("prompt_uid", "sample", "turn"))
        return {key: row for row, key in enumerate(zip(*columns, strict=True))}

    def row_of(self, key: Key) -> int:
        """Return the row of a completion; UserError if the step has no such completion."""
        if key not in self.rows:
            raise UserError(f"{self.path.name} has no completion {'.'.join(map(str, key))}")
        return self.rows[key]

    def read(self, rows: Sequence[int], names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Read ascending rows, with lists as arrays and JSON parsed. Columns are read one after the other, so that a
        row group is never entirely in memory. A path's own opening replaces its `prompt_tokens`."""
        wanted = self.columns if names is None else [*names, "opening"]
        fields = [name for name in wanted if name in self.columns]
        read = array_rows(pa.table({name: pa.concat_arrays(self._at(name, rows)) for name in fields}))
        for row in read:
            opening = row.pop("opening", None)
            if opening is not None and "prompt_tokens" in row:
                row["prompt_tokens"] = opening
        return read

    @property
    def step(self) -> int:
        return int(self.path.stem)

    def answer(self) -> dict[str, Any]:
        """Return the step without its metrics: its groups, and its completions column by column."""
        columns: dict[str, list[Any]] = {}
        for name, values in self.table.items():
            shown = "uid" if name == "prompt_uid" else name
            columns[shown] = values
        return {"step": self.step, "groups": self.groups(), "completions": columns}

    def of_group(self, uid: int) -> dict[str, Any]:
        """Return a prompt and its completions. Raises: UserError if the step has no such prompt."""
        rows = [row for row, value in enumerate(self.table["prompt_uid"]) if value == uid]
        if not rows:
            raise UserError(f"{self.path.name} has no {prompt_name(uid)}")
        read = self.read(rows, (*GROUP, *TEXTS, "episode"))
        texts = {name: read[0][name] for name in TEXTS}
        completions = []
        for values, row in zip(read, rows, strict=True):
            completion = {name: values.get(name) for name in GROUP}
            completion["length"] = self.table["length"][row]
            completion["episode"] = short_episode(values.get("episode"))
            completions.append(completion)
        messages = [{"role": "user", "content": texts["question"]}]
        return {"uid": uid, **texts, "messages": messages, "completions": completions}

    def groups(self) -> list[dict[str, Any]]:
        """Summarise each group, in the order of the file: its question and answer, its rewards, its outcomes."""
        members: dict[int, list[int]] = {}
        for row, uid in enumerate(self.table["prompt_uid"]):
            members.setdefault(uid, []).append(row)
        firsts = [rows[0] for rows in members.values()]
        texts = {name: pa.concat_arrays(self._at(name, firsts)).to_pylist() for name in TEXTS}
        return [
            {
                "uid": uid,
                "question": texts["question"][i],
                "answer": load_json(texts["answer"][i]),
                **self._spread(rows),
            }
            for i, (uid, rows) in enumerate(members.items())
        ]

    def _at(self, name: str, rows: Sequence[int]) -> list[pa.Array]:
        """Read a column at ascending rows, by row group."""
        parts: list[pa.Array] = []
        for group, start in enumerate(self.starts[:-1]):
            inside = [row - start for row in rows if start <= row < self.starts[group + 1]]
            if inside:
                parts.append(self.column(group, name).take(pa.array(inside, pa.int64())).combine_chunks())
        return parts

    def _spread(self, rows: Sequence[int]) -> Mapping[str, Any]:
        """Compute figures of a group's rows. In means, an episode of several paths counts once, with all its tokens."""
        samples: dict[int, list[int]] = {}
        for row in rows:
            samples.setdefault(self.table["sample"][row], []).append(row)
        lengths = [sum(self.table["length"][row] for row in paths) for paths in samples.values()]
        of_samples = [self.table["reward"][paths[-1]] for paths in samples.values()]
        rewards = np.array([value for value in of_samples if value is not None], np.float64)
        figures: dict[str, float | None] = dict.fromkeys(("mean", "std", "min", "max"))
        if len(rewards):
            figures = {name: float(getattr(rewards, name)()) for name in figures}
        return {
            "size": len(rows),
            **figures,
            "length_mean": float(np.mean(lengths)),
            "outcomes": dict(Counter(self.table["outcome"][row] for row in rows)),
        }

    def matches(self, text: str, *, regex: bool) -> list[int]:
        """Find the rows whose question or text contains `text`, ignoring case, or matches it as a regular expression of
        RE2, whose time is linear in the text.

        Raises:
            UserError: the expression is invalid or too large.
        """
        find = pc.match_substring_regex if regex else pc.match_substring
        matching: list[int] = []
        for group, start in enumerate(self.starts[:-1]):
            try:
                either = [find(self.column(group, name), text, ignore_case=True) for name in ("question", "text")]
            except (pa.ArrowInvalid, pa.ArrowException) as error:
                raise UserError(f"not a regular expression: {' '.join(str(error).split())[:200]}") from error
            hits = np.logical_or(*(hit.to_numpy(zero_copy_only=False).astype(bool) for hit in either))
            matching += (start + hits.nonzero()[0]).tolist()
        return matching


def _count_masked(keep: NDArray[np.bool_] | None, sampled: NDArray[np.bool_] | None) -> int | None:
    if keep is None:
        return None
    masked = ~keep
    if sampled is not None:
        masked &= sampled
    return int(masked.sum())


def short_episode(text: str | None) -> dict[str, Any] | None:
    """Shorten an episode to the beginnings of its messages; None if there is no episode."""
    if text is None:
        return None
    episode = load_json(text)
    return {**episode, "spans": [{**span, "text": shortened(span["text"], MESSAGE)} for span in episode["spans"]]}
