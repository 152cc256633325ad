"""Storage of completions: the definition of each column, and writing rows with numpy columns to Parquet.

A file takes the columns that it needs, by name. Arrays are written as offsets and one flat array of values, without a
Python object per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data.flow import Completion, Score
from proxima.data.json_reader import load_json
from proxima.system.jsonl import dumps, utf8

ROW_GROUP = 128  # rows converted at once
JSON_COLUMNS = ("messages", "answer", "metadata", "parts")
MASK_COLUMNS = ("sampling_mask", "sampling_mask_counts")  # ids of all tokens, and how many each token has
PER_TOKEN = ("tokens", "sampled_log_prob", "untruncated_log_prob", "policy_version", "top_k", "top_k_log_prob")
ABOUT = ("sample", "turn", "text", "finish_reason", "temperature")  # the other fields of a completion


def list_of(values: pa.DataType) -> pa.ListType:
    """The type of a list whose entries are never null: Parquet then has less to write for each of them."""
    return pa.list_(pa.field("element", values, nullable=False))


_INT, _FLOAT, _TEXT = pa.int32(), pa.float64(), pa.string()
_INTS, _FLOATS, _BOOLS = list_of(pa.int32()), list_of(pa.float32()), list_of(pa.bool_())
REQUIRED: dict[str, tuple[pa.DataType, str]] = {
    # of the step, the prompt and the group
    "step": (_INT, ""),
    "prompt_uid": (pa.int64(), ""),
    "uid": (pa.int64(), "prompt_uid"),
    "question": (_TEXT, ""),
    "messages": (_TEXT, "JSON"),
    "prompt_tokens": (_INTS, ""),
    "answer": (_TEXT, "JSON: what the reward compared with"),
    "metadata": (_TEXT, "JSON"),
    "chat": (pa.bool_(), ""),
    # of the completion
    "sample": (_INT, ""),
    "turn": (_INT, ""),
    "text": (_TEXT, ""),
    "tokens": (_INTS, ""),
    "sampled_log_prob": (_FLOATS, "nats, under the distribution really sampled"),
    "policy_version": (_INTS, ""),
    "finish_reason": (_TEXT, ""),
    "temperature": (_FLOAT, ""),
    # of its score and its outcome
    "value": (_FLOAT, "weighted sum; NaN where the score is invalid"),
    "valid": (pa.bool_(), "false: a scorer failed, the completion enters no mean"),
    "parts": (_TEXT, "JSON: each reward by name, before its weight"),
    "outcome": (_TEXT, "trained, skipped_zero_advantage, critic_only, dropped_<reason>, invalid"),
    "used": (pa.bool_(), "false: the group was dropped before the step's advantages"),
}
OPTIONAL: dict[str, tuple[pa.DataType, str]] = {
    "baseline": (_FLOAT, "reward of the prompt's greedy completion, where the advantage needs it"),
    "untruncated_log_prob": (_FLOATS, "nats, at the temperature alone; null if sampled_log_prob is that"),
    "top_k": (_INTS, "[T, K] flattened, the K most probable tokens, where the engine reports them"),
    "top_k_log_prob": (_FLOATS, "nats, [T, K] flattened, of these, at the temperature alone"),
    "k": (_INT, "K of these"),
    "sampling_mask": (_INTS, "ids that could be sampled, those of token 0 first; null: not asked for"),
    "sampling_mask_counts": (_INTS, "[T], how many of these each token has"),
    "correct": (pa.bool_(), "null where no reward knows, or the score is invalid"),
    "reward": (_FLOAT, "weighted sum; null where the score is invalid"),
    "error": (_TEXT, "why the score is invalid"),
    "behavior_log_prob": (_FLOATS, "nats, the one of the two that the algorithm chose; null if dropped"),
    "next_log_prob": (_FLOATS, "nats, under the version after the sampling one, of proximal=next; NaN: none"),
    "log_prob": (_FLOATS, "nats, the trainer's first forward; null where it made none"),
    "keep": (_BOOLS, "the token stayed in the trust region at the first update"),
    "updates_before": (_INT, "updates of this step before that forward pass; 0: the weights of its beginning"),
    "entropy": (_FLOATS, "nats, of the policy at the position, first forward"),
    "proximal_log_prob": (_FLOATS, "nats, of a separate forward pass; null where it follows from the others"),
    "selected": (_BOOLS, "what clip_cov, kl_cov or m2po selected over the whole batch; else null"),
    "top_k_divergence": (_FLOATS, "of the surrogate, from μ, where it measures by top-k; else null"),
    "advantage": (_FLOAT, "reward units, of the completion"),
    "token_advantage": (_FLOATS, "null where all tokens have the completion's"),
    "token_reward": (_FLOATS, "reward units; null where the last loss token alone has one, the score"),
}


# of the few runs that have such completions: their files have these columns too
ROUTES: dict[str, tuple[pa.DataType, str]] = {
    "routed_experts": (pa.binary(), "[T, layers, per token] int8 or int16, experts of each token; null: not asked for"),
    "prompt_routed_experts": (pa.binary(), "[P, layers, per token], of each token of the prompt"),
    "routed_layers": (_INT, "mixtures of experts of the model"),
    "routed_per_token": (_INT, "experts of each token in each"),
}
EPISODES: dict[str, tuple[pa.DataType, str]] = {
    "sampled": (_BOOLS, "false: the model did not write the token"),
    "opening": (_INTS, "the prompt of a path that has its own"),
    "episode": (_TEXT, "JSON: the messages, and how it ended"),
}
IMAGES: dict[str, tuple[pa.DataType, str]] = {"images": (_INTS, "numbers of those that the question shows")}


# every column as it is written, for those who read files that may be damaged
FIELDS = {
    name: pa.field(name, kind, name not in REQUIRED)
    for name, (kind, _) in (REQUIRED | OPTIONAL | ROUTES | EPISODES | IMAGES).items()
}


def schema(version: str, columns: Sequence[str], *, nullable: bool = False) -> pa.Schema:
    """The schema of a file with these columns, of which with `nullable` any may be null; `version` is the name and the
    number of its format."""
    described, fields = REQUIRED | OPTIONAL, []
    for name in columns:
        kind, doc = described[name]
        fields.append(pa.field(name, kind, nullable or name in OPTIONAL, metadata={"doc": doc} if doc else None))
    return pa.schema(fields, metadata={"proxima": version})


def torn_file(error: Exception) -> str:
    """Describe a damaged file in one line; Arrow's reasons may have several."""
    return f"is not a complete Parquet file ({' '.join(str(error).split())})"


# ---- rows ------------------------------------------------------------------------------------------------------------


def completion_row(completion: Completion) -> dict[str, Any]:
    """The columns of a completion."""
    mask = completion.sampling_mask
    lists = (None, None) if mask is None else (mask.ids, mask.counts)
    columns = vars(completion) | {"text": utf8(completion.text)} | dict(zip(MASK_COLUMNS, lists, strict=True))
    columns["episode"] = None if completion.episode is None else completion.episode.to_json()
    columns["opening"] = None if completion.opening is None else completion.opening.tokens
    return columns | _route_columns(completion)


def _route_columns(completion: Completion) -> dict[str, Any]:
    routes, of_prompt = completion.routed_experts, completion.prompt_routed_experts
    if routes is None or not len(routes):  # without a token nothing is trained
        return dict.fromkeys(ROUTES)
    prompt = None if of_prompt is None else of_prompt.astype(routes.dtype).tobytes()
    return dict(zip(ROUTES, (routes.tobytes(), prompt, *routes.shape[1:]), strict=True))


def score_row(score: Score) -> dict[str, Any]:
    """The columns of a score."""
    return vars(score) | {"parts": dumps(score.parts), "error": None if score.error is None else utf8(score.error)}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_rows(file: BinaryIO, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, zstd-compressed; a field of a list type takes arrays. Fields that a row lacks are null. Where rows
    have experts of their tokens, are of episodes or show images, the file has columns for them.

    Lists have no statistics, and no dictionary but for policy versions, of which there are few; numbers of the others
    are split into byte streams: so they are written faster and take less space.
    """
    further: dict[str, tuple[pa.DataType, str]] = {}
    if "policy_version" in schema.names and any(row.get("routed_experts") is not None for row in rows):
        further |= ROUTES
    for name, columns in (("episode", EPISODES), ("images", IMAGES)):
        further |= columns if any(row.get(name) is not None for row in rows) else {}
    for name, (kind, doc) in further.items():
        schema = schema.append(pa.field(name, kind, metadata={"doc": doc}))
    scalars = [field.name for field in schema if not pa.types.is_list(field.type)]
    lists = {f"{field.name}.list.element": field.type.value_type for field in schema if pa.types.is_list(field.type)}
    encoding = {name: "BYTE_STREAM_SPLIT" for name, kind in lists.items() if kind in (pa.float32(), pa.int32())}
    versions = "policy_version.list.element"
    encoding.pop(versions, None)
    coded = [name for name in scalars if name != "text" and not pa.types.is_binary(schema.field(name).type)]
    settings = {"use_dictionary": [*coded, versions], "write_statistics": coded, "column_encoding": encoding}
    with pq.ParquetWriter(file, schema, compression="zstd", **settings) as writer:
        for start in range(0, max(1, len(rows)), ROW_GROUP):
            part = rows[start : start + ROW_GROUP]
            arrays = [_array(field, [row.get(field.name) for row in part]) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _array(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), field.type)
    return _list_column(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)


def _list_column(columns: Sequence[NDArray[Any] | None], kind: pa.ListType) -> pa.ListArray:
    """One list a row; None is null, a column of several axes is flattened."""
    dtype = kind.value_type.to_pandas_dtype()
    arrays = [np.ravel(np.asarray(() if column is None else column, dtype)) for column in columns]
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    lengths = [len(array) for array in arrays]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    null = pa.array([column is None for column in columns], pa.bool_())
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind.value_type), type=kind, mask=null)


def parsed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what is stored as JSON parsed."""
    return [row | {name: load_json(row[name]) for name in JSON_COLUMNS if row.get(name) is not None} for row in rows]
