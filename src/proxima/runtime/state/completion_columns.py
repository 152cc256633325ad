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
        kind = pa.binary() if column.dtype == "id" else _LISTS[column.dtype]
        described[column.name] = (kind, _doc(column))
        if column.ragged:
            described[counts_of(column.name)] = (_INTS, "[T], how many of these each token has")
    return described


def _doc(column: TokenColumn) -> str:
    if column.name in _WITHOUT_DOC:
        return ""
    if column.unit:
        return f"{column.unit}, {column.meaning}"
    return column.meaning


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


def _every_column() -> dict[str, pa.Field]:
    never_null = set(OTHERS)
    never_null.update(column.name for column in STORED if column.required)
    # a row lacks the log-prob at the temperature alone where it is that of the distribution sampled
    never_null.remove("untruncated_log_prob")
    described = OTHERS | NULLABLE | OF_TOKENS | ROUTES | EPISODES | ROLES | IMAGES | WEIGHTS | SOURCES | CHAIN
    return {name: pa.field(name, kind, name not in never_null) for name, (kind, _) in described.items()}


FIELDS = _every_column()  # as they are written, for those who read files that may be damaged


def schema(version: str, columns: Sequence[str], *, nullable: bool = False) -> pa.Schema:
    """The schema of a file with these columns, of which with `nullable` any may be null; `version` is the name and the
    number of its format."""
    described = OTHERS | NULLABLE | OF_TOKENS
    fields = []
    for name in columns:
        kind, doc = described[name]
        may_be_null = nullable or FIELDS[name].nullable
        metadata = {"doc": doc} if doc else None
        fields.append(pa.field(name, kind, may_be_null, metadata=metadata))
    return pa.schema(fields, metadata={"proxima": version})


def torn_file(error: Exception) -> str:
    """Describe a damaged file in one line; Arrow's reasons may have several."""
    return f"is not a complete Parquet file ({' '.join(str(error).split())})"


# ---- rows ------------------------------------------------------------------------------------------------------------


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt that few runs have."""
    weight = None if prompt.weight == 1 else prompt.weight
    return {"question_weight": weight}


def question_weight_of(row: Mapping[str, Any]) -> float:
    """`Prompt.weight` of a row."""
    return float(row.get("question_weight") or 1.0)


def completion_row(completion: Completion) -> dict[str, Any]:
    """The columns of a completion."""
    row = vars(completion) | {"text": utf8(completion.text)} | _expert_ids(completion)
    for column in STORED:
        sets = row.get(column.name)
        if column.ragged and sets is not None:
            row[column.name] = sets.ids
            row[counts_of(column.name)] = sets.counts
    row["episode"] = None
    if completion.episode is not None:
        row["episode"] = completion.episode.to_json()
    row["opening"] = None
    if completion.initial_prompt is not None:
        row["opening"] = completion.initial_prompt.tokens
    return row


def _expert_ids(completion: Completion) -> dict[str, Any]:
    routes = completion.routed_experts
    of_prompt = completion.prompt_routed_experts
    if routes is None or not len(routes):  # without a token nothing is trained
        return dict.fromkeys(ROUTES)
    prompt = None
    if of_prompt is not None:
        prompt = of_prompt.astype(routes.dtype).tobytes()
    _, layers, experts = routes.shape
    return dict(zip(ROUTES, (routes.tobytes(), prompt, layers, experts), strict=True))


def score_row(score: Score) -> dict[str, Any]:
    """The columns of a score."""
    row = dict(vars(score))
    row["parts"] = dumps(score.parts)
    if score.error is not None:
        row["error"] = utf8(score.error)
    row["players"] = None
    if score.players:
        row["players"] = dumps(score.facts()["players"])
    return row


# ---- files -----------------------------------------------------------------------------------------------------------


def write_rows(file: BinaryIO, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, zstd-compressed; a field of a list type takes arrays. Fields that a row lacks are null. Where rows
    have experts of their tokens, are of episodes, of roles, show images, are of weighted questions, name their source,
    or have log-probs of several versions, the file has columns for them.

    Lists have no statistics, and no dictionary but for policy versions, of which there are few; numbers of the others
    are split into byte streams: so they are written faster and take less space.
    """
    schema = _with_rare_columns(schema, rows)
    lists = {field.name: field.type.value_type for field in schema if pa.types.is_list(field.type)}
    scalars = []
    for field in schema:
        if field.name not in lists and field.name != "text" and not pa.types.is_binary(field.type):
            scalars.append(field.name)
    split = []
    for name, kind in lists.items():
        if kind in (pa.float32(), pa.int32()) and name != "policy_version":
            split.append(f"{name}.list.element")
    settings = {
        "use_dictionary": [*scalars, "policy_version.list.element"],
        "write_statistics": scalars,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
    }
    with pq.ParquetWriter(file, schema, compression="zstd", **settings) as writer:
        for start in range(0, max(1, len(rows)), ROW_GROUP):
            part = rows[start : start + ROW_GROUP]
            arrays = [_array(field, [row.get(field.name) for row in part]) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _with_rare_columns(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The schema with the columns that few runs have, where a row has a value for the first of them."""
    few = [
        ("episode", EPISODES),
        ("players", ROLES),
        ("images", IMAGES),
        ("question_weight", WEIGHTS),
        ("source", SOURCES),
        ("chained_log_ratio", CHAIN),
        ("newest", VERSIONS),
    ]
    if "policy_version" in schema.names:
        few.insert(0, (EXPERT_IDS[0], ROUTES))
    for first, columns in few:
        if any(row.get(first) is not None for row in rows):
            for name, (kind, doc) in columns.items():
                schema = schema.append(pa.field(name, kind, metadata={"doc": doc}))
    return schema


def _array(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), field.type)
    if pa.types.is_list(field.type):
        return _list_column(values, field.type)
    return pa.array(values, field.type)


def _list_column(columns: Sequence[NDArray[Any] | None], kind: pa.ListType) -> pa.ListArray:
    """One list a row; None is null, a column of several axes is flattened."""
    dtype = kind.value_type.to_pandas_dtype()
    given = [() if column is None else column for column in columns]
    arrays = [np.ravel(np.asarray(values, dtype)) for values in given]
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    lengths = [len(array) for array in arrays]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    null = pa.array([column is None for column in columns], pa.bool_())
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind.value_type), type=kind, mask=null)


def parsed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what is stored as JSON parsed."""
    return [_parsed(row) for row in rows]


def _parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(row)
    for name in JSON_COLUMNS:
        if values.get(name) is not None:
            values[name] = load_json(values[name])
    return values
