"""Storage of completions: the definition of each column, and writing rows with numpy columns to Parquet. The columns of
tokens are those of `data.columns` that are `stored`.

A file takes the columns that it needs, by name. Arrays are written as offsets and one flat array of values, without a
Python object per token.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data.columns import TOKEN_COLUMNS, TokenColumn
from proxima.data.flow import Completion, Prompt, Score
from proxima.data.json_reader import load_json
from proxima.system.jsonl import dumps, utf8

ROW_GROUP = 128  # rows converted at once
JSON_COLUMNS = ("messages", "answer", "metadata", "parts", "players")
ABOUT = ("sample", "turn", "text", "finish_reason", "temperature")  # the fields of a completion that are not of tokens


def list_of(values: pa.DataType) -> pa.ListType:
    """The type of a list whose entries are never null: Parquet then has less to write for each of them."""
    return pa.list_(pa.field("element", values, nullable=False))


Described = dict[str, tuple[pa.DataType, str]]  # columns of a file by name, with what their metadata say
_INT = pa.int32()
_FLOAT = pa.float64()
_TEXT = pa.string()
_INTS = list_of(pa.int32())
_LISTS = {"int32": _INTS, "float32": list_of(pa.float32()), "bool": list_of(pa.bool_())}
_WITHOUT_DOC = ("prompt_tokens", "tokens", "policy_version")  # in the metadata of files


def counts_of(name: str) -> str:
    """The column with the number of values of each token, of a ragged column."""
    return f"{name}_counts"


def in_file(names: Iterable[str]) -> Iterator[str]:
    """The columns of a file for these, of which a ragged one has two."""
    for name in names:
        yield name
        if name in TOKEN_COLUMNS and TOKEN_COLUMNS[name].ragged:
            yield counts_of(name)


def _stored(columns: Iterable[TokenColumn]) -> Described:
    """Columns of tokens as a file has them: sets as flat ids and their counts, expert ids as bytes."""
    described: Described = {}
    for column in columns:
        if column.unit:
            doc = f"{column.unit}, {column.meaning}"
        else:
            doc = column.meaning
        if column.dtype == "id":
            kind = pa.binary()
        else:
            kind = _LISTS[column.dtype]
        described[column.name] = (kind, "" if column.name in _WITHOUT_DOC else doc)
        if column.ragged:
            described[counts_of(column.name)] = (_INTS, "[T], how many of these each token has")
    return described


STORED = [column for column in TOKEN_COLUMNS.values() if column.stored]
OF_TOKENS = _stored(column for column in STORED if column.stored == "always")
RARE = _stored(column for column in STORED if column.stored == "where it occurs")
EXPERT_IDS = tuple(column.name for column in STORED if column.dtype == "id")

OTHERS: Described = {
    # of the step, the prompt and the group
    "step": (_INT, ""),
    "prompt_uid": (pa.int64(), ""),
    "uid": (pa.int64(), "prompt_uid"),
    "question": (_TEXT, ""),
    "messages": (_TEXT, "JSON"),
    "answer": (_TEXT, "JSON: what the reward compared with"),
    "metadata": (_TEXT, "JSON"),
    "chat": (pa.bool_(), ""),
    # of the completion
    "sample": (_INT, ""),
    "turn": (_INT, ""),
    "text": (_TEXT, ""),
    "finish_reason": (_TEXT, ""),
    "temperature": (_FLOAT, ""),
    # of its score and its outcome
    "value": (_FLOAT, "weighted sum; NaN where the score is invalid"),
    "valid": (pa.bool_(), "false: a scorer failed, the completion enters no mean"),
    "parts": (_TEXT, "JSON: each reward by name, before its weight"),
    "outcome": (_TEXT, "trained, skipped_zero_advantage, critic_only, dropped_<reason>, invalid"),
    "used": (pa.bool_(), "false: the group was dropped before the step's advantages"),
}
NULLABLE: Described = {
    "baseline": (_FLOAT, "reward of the prompt's greedy completion, where the advantage needs it"),
    "k": (_INT, "K of these"),
    "correct": (pa.bool_(), "null where no reward knows, or the score is invalid"),
    "reward": (_FLOAT, "weighted sum; null where the score is invalid"),
    "error": (_TEXT, "why the score is invalid"),
    "updates_before": (_INT, "updates of this step before that forward pass; 0: the weights of its beginning"),
    "advantage": (_FLOAT, "reward units, of the completion"),
}
# of the few runs that have such completions: their files have these columns too
ROUTES: Described = {name: RARE[name] for name in EXPERT_IDS} | {
    "routed_layers": (_INT, "mixtures of experts of the model"),
    "routed_per_token": (_INT, "experts of each token in each"),
}
CHAIN: Described = {"chained_log_ratio": RARE["chained_log_ratio"]}
EPISODES: Described = {"sampled": RARE["sampled"]} | {
    "opening": (_INTS, "the prompt of a path that has its own"),
    "episode": (_TEXT, "JSON: the messages, and how it ended"),
}
ROLES: Described = {"players": (_TEXT, "JSON: the score of each player of the episode, by its name")}
IMAGES: Described = {"images": (_INTS, "numbers of those that the question shows")}
WEIGHTS: Described = {"question_weight": (_FLOAT, "of the advantages of its completions; null: 1")}
SOURCES: Described = {"source": (_TEXT, "the source of the question, of a mix")}
# of a checkpoint's log-probs under later versions, with `algorithm.chain`
VERSIONS: Described = {
    "newest": (_INTS, "the version of log_prob, -1 where there is none"),
    "first_log_prob": (_LISTS["float32"], "nats, under the version after the sampling one"),
    "bounded_steps": (_LISTS["float32"], "nats, the bounded steps from that version to the newest"),
}


# a row lacks the log-prob at the temperature alone where it is that of the distribution sampled
NEVER_NULL = {*OTHERS, *(column.name for column in STORED if column.required)} - {"untruncated_log_prob"}
# every column as it is written, for those who read files that may be damaged
FIELDS = {
    name: pa.field(name, kind, name not in NEVER_NULL)
    for name, (kind, _) in (
        OTHERS | NULLABLE | OF_TOKENS | ROUTES | EPISODES | ROLES | IMAGES | WEIGHTS | SOURCES | CHAIN
    ).items()
}


def schema(version: str, columns: Sequence[str], *, nullable: bool = False) -> pa.Schema:
    """The schema of a file with these columns, of which with `nullable` any may be null; `version` is the name and the
    number of its format."""
    described = OTHERS | NULLABLE | OF_TOKENS
    fields = []
    for name in columns:
        kind, doc = described[name]
        may_be_null = nullable or FIELDS[name].nullable
        fields.append(pa.field(name, kind, may_be_null, metadata={"doc": doc} if doc else None))
    return pa.schema(fields, metadata={"proxima": version})


def torn_file(error: Exception) -> str:
    """Describe a damaged file in one line; Arrow's reasons may have several."""
    return f"is not a complete Parquet file ({' '.join(str(error).split())})"


# ---- rows ------------------------------------------------------------------------------------------------------------


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt that few runs have."""
    return {"question_weight": None if prompt.weight == 1 else prompt.weight}


def question_weight_of(row: Mapping[str, Any]) -> float:
    """`Prompt.weight` of a row."""
    return float(row.get("question_weight") or 1.0)


def completion_row(completion: Completion) -> dict[str, Any]:
    """The columns of a completion."""
    row = vars(completion) | {"text": utf8(completion.text)} | _expert_ids(completion)
    for column in STORED:
        if column.ragged and (sets := row.get(column.name)) is not None:
            row |= {column.name: sets.ids, counts_of(column.name): sets.counts}
    row["episode"] = None if completion.episode is None else completion.episode.to_json()
    row["opening"] = None if completion.initial_prompt is None else completion.initial_prompt.tokens
    return row


def _expert_ids(completion: Completion) -> dict[str, Any]:
    routes, of_prompt = completion.routed_experts, completion.prompt_routed_experts
    if routes is None or not len(routes):  # without a token nothing is trained
        return dict.fromkeys(ROUTES)
    if of_prompt is None:
        prompt = None
    else:
        prompt = of_prompt.astype(routes.dtype).tobytes()
    return dict(zip(ROUTES, (routes.tobytes(), prompt, *routes.shape[1:]), strict=True))


def score_row(score: Score) -> dict[str, Any]:
    """The columns of a score."""
    row = vars(score) | {"parts": dumps(score.parts), "error": None if score.error is None else utf8(score.error)}
    return row | {"players": dumps(score.facts()["players"]) if score.players else None}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_rows(file: BinaryIO, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, zstd-compressed; a field of a list type takes arrays. Fields that a row lacks are null. Where rows
    have experts of their tokens, are of episodes, of roles, show images, are of weighted questions, name their source,
    or have log-probs of several versions, the file has columns for them.

    Lists have no statistics, and no dictionary but for policy versions, of which there are few; numbers of the others
    are split into byte streams: so they are written faster and take less space.
    """
    further: Described = {}
    few = (
        (EXPERT_IDS[0], ROUTES),
        ("episode", EPISODES),
        ("players", ROLES),
        ("images", IMAGES),
        ("question_weight", WEIGHTS),
        ("source", SOURCES),
        ("chained_log_ratio", CHAIN),
        ("newest", VERSIONS),
    )
    for name, columns in few:
        if columns is ROUTES and "policy_version" not in schema.names:
            continue
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
    if pa.types.is_list(field.type):
        return _list_column(values, field.type)
    return pa.array(values, field.type)


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
