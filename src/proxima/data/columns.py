"""The per-token columns, declared once; `Columns`, the base of the host objects that hold them; and `SamplingMask`.

`TOKEN_COLUMNS` declares the meaning of each column, who fills it, and whether a run stores it. `Completion`,
`Trajectory`, `PackedBatch` and `PolicyBatch` repeat the fields for the reader and the type checker; a test compares
them with the table. Everything that iterates over columns (checks, packing, cutting, Parquet, the viewer's list, the
table in the docs) reads them here.

To add a column: a line here, a field in the classes that carry it, and code that fills it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
ExpertIds = NDArray[np.int8] | NDArray[np.int16]
LARGEST = float(np.finfo(np.float32).max)  # in a column of floats

_DTYPES: dict[Any, np.dtype[Any]] = {Ints: np.dtype("int32"), Floats: np.dtype("float32"), Bools: np.dtype("bool")}


@dataclass(frozen=True, kw_only=True)
class TokenColumn:
    """The declaration of a per-token column.

    Args:
        dtype: of the host's array; `id` is int8, or int16 if int8 is too small.
        axes: T tokens of the response, P of the prompt; `*`: a set of any size for each token, a `SamplingMask`.
        by: who fills it: `episode`, the player of episodes; `batch`, the builder of the training batch, and the
            next-policy cache; `forward`, a forward pass of the trainer, the first one of a step if it is stored.
        meaning: one sentence. Parquet files quote it, so a change of wording changes their bytes.
        unit: of the values; empty: none.
        stored: in the Parquet of every run, or only of runs in which it occurs; empty: not stored.
        required: every completion has it.
        shown: the viewer has it as a column of its own.
    """

    name: str
    dtype: Literal["int32", "float32", "bool", "id"]
    axes: str = "T"
    by: Literal["task", "engine", "episode", "batch", "advantage", "forward", "correction", "teacher", "critic"]
    meaning: str
    unit: str = ""
    stored: Literal["", "always", "where it occurs"] = ""
    required: bool = False
    shown: bool = False

    @property
    def ragged(self) -> bool:
        """True if each token has a set of values."""
        return self.axes.endswith("*")

    @property
    def of_prompt(self) -> bool:
        """True if it has a value for each token of the prompt, not of the response."""
        return self.axes.startswith("P")

    @property
    def plain(self) -> bool:
        """True if it is written to JSON: neither a set for each token nor expert ids."""
        return not self.ragged and self.dtype != "id"

    @property
    def absent(self) -> int:
        """The placeholder at tokens for which the engine has no value."""
        return -1 if self.dtype == "id" else 0

    @property
    def tensor(self) -> str:
        """The annotation of its tensor in a packed batch; expert ids have axis L, all tokens that are fed."""
        axis = "L" if self.dtype == "id" else "N"
        kind = self.dtype.rstrip("0123456789")
        return f"{kind} {self.axes.replace('T', axis, 1)}"


# fmt: off
TOKEN_COLUMNS: dict[str, TokenColumn] = {column.name: column for column in (
    TokenColumn(name="prompt_tokens", dtype="int32", axes="P", by="task", stored="always", required=True,
                meaning="ids after the chat template"),
    TokenColumn(name="tokens", dtype="int32", by="engine", stored="always", required=True,
                meaning="ids, the stop token included"),
    TokenColumn(name="sampled_log_prob", dtype="float32", by="engine", unit="nats", stored="always", required=True,
                shown=True, meaning="under the distribution really sampled"),
    TokenColumn(name="untruncated_log_prob", dtype="float32", by="engine", unit="nats", stored="always", required=True,
                shown=True, meaning="at the temperature alone; null if sampled_log_prob is that"),
    TokenColumn(name="policy_version", dtype="int32", by="engine", stored="always", required=True, shown=True,
                meaning="the version of the weights that sampled the token"),
    TokenColumn(name="top_k", dtype="int32", axes="T K", by="engine", stored="always",
                meaning="[T, K] flattened, the K most probable tokens, where the engine reports them"),
    TokenColumn(name="top_k_log_prob", dtype="float32", axes="T K", by="engine", unit="nats", stored="always",
                meaning="[T, K] flattened, of these, at the temperature alone"),
    TokenColumn(name="sampling_mask", dtype="int32", axes="T *", by="engine", stored="always",
                meaning="ids that could be sampled, those of token 0 first; null: not asked for"),
    TokenColumn(name="routed_experts", dtype="id", axes="T M K", by="engine", stored="where it occurs",
                meaning="[T, layers, per token] int8 or int16, experts of each token; null: not asked for"),
    TokenColumn(name="prompt_routed_experts", dtype="id", axes="P M K", by="engine", stored="where it occurs",
                meaning="[P, layers, per token], of each token of the prompt"),
    TokenColumn(name="sampled", dtype="bool", by="episode", stored="where it occurs", shown=True,
                meaning="false: the model did not write the token"),
    TokenColumn(name="behavior_log_prob", dtype="float32", by="batch", unit="nats", stored="always", shown=True,
                meaning="the one of the two that the algorithm chose; null if dropped"),
    TokenColumn(name="next_log_prob", dtype="float32", by="batch", unit="nats", stored="always", shown=True,
                meaning="under the version after the sampling one, of proximal=next; NaN: none"),
    TokenColumn(name="chained_log_ratio", dtype="float32", by="batch", unit="nats", stored="where it occurs",
                meaning="of algorithm.chain: the bounded steps from μ to next_log_prob, then of a later version"),
    TokenColumn(name="behavior_top_k_log_prob", dtype="float32", axes="T K", by="batch", unit="nats",
                meaning="of the tokens `top_k`, as the engine reported them"),
    TokenColumn(name="loss_mask", dtype="bool", by="batch", meaning="the token enters the loss"),
    TokenColumn(name="echo", dtype="float32", by="batch", meaning="weight of the cross-entropy of an observation"),
    TokenColumn(name="taught", dtype="int32", by="batch",
                meaning="1: the token learns from the teacher alone, 0: from rewards alone; null: from both"),
    TokenColumn(name="log_prob", dtype="float32", by="forward", unit="nats", stored="always", shown=True,
                meaning="the trainer's first forward; null where it made none"),
    TokenColumn(name="keep", dtype="bool", by="forward", stored="always", shown=True,
                meaning="the token stayed in the trust region at the first update"),
    TokenColumn(name="entropy", dtype="float32", by="forward", unit="nats", stored="always", shown=True,
                meaning="of the policy at the position, first forward"),
    TokenColumn(name="proximal_log_prob", dtype="float32", by="forward", unit="nats", stored="always",
                meaning="of a separate forward pass; null where it follows from the others"),
    TokenColumn(name="selected", dtype="bool", by="forward", stored="always",
                meaning="what clip_cov, kl_cov or m2po selected over the whole batch; else null"),
    TokenColumn(name="top_k_divergence", dtype="float32", by="forward", stored="always",
                meaning="of the surrogate, from μ, where it measures by top-k; else null"),
    TokenColumn(name="reference_log_prob", dtype="float32", by="forward", unit="nats",
                meaning="of the frozen reference policy"),
    TokenColumn(name="score_variance", dtype="float32", by="forward", meaning="1 − 2 π_t + Σ_v π_v²"),
    TokenColumn(name="advantage", dtype="float32", by="advantage", unit="reward units", meaning="of the token"),
    TokenColumn(name="reward", dtype="float32", by="advantage", unit="reward units", meaning="of the token"),
    TokenColumn(name="token_advantage", dtype="float32", by="advantage", stored="always",
                meaning="null where all tokens have the completion's"),
    TokenColumn(name="token_reward", dtype="float32", by="advantage", stored="always",
                meaning="reward units; null where the last loss token alone has one, the score"),
    TokenColumn(name="value", dtype="float32", by="critic", unit="reward units", meaning="the critic's estimate"),
    TokenColumn(name="returns", dtype="float32", by="advantage", unit="reward units",
                meaning="the target of the value"),
    TokenColumn(name="weight", dtype="float32", by="correction", meaning="of the correction over the optimizer batch"),
    TokenColumn(name="token", dtype="int32", by="batch", meaning="`tokens`, as the loss reads them"),
    TokenColumn(name="teacher_log_prob", dtype="float32", by="teacher", unit="nats", meaning="of the token"),
    TokenColumn(name="bucket_token", dtype="int32", axes="T J", by="teacher",
                meaning="the tokens that have their own bucket in the divergence from the teacher"),
    TokenColumn(name="teacher_bucket_log_prob", dtype="float32", axes="T J", by="teacher", unit="nats",
                meaning="of the tokens `bucket_token`"),
    TokenColumn(name="bucket_log_prob", dtype="float32", axes="T J", by="forward", unit="nats",
                meaning="of the tokens `bucket_token`, of the current policy"),
)}
# fmt: on


def filled_by(*fillers: str) -> list[TokenColumn]:
    """The columns of the response that any of these fills, in the order of the table."""
    return [column for column in TOKEN_COLUMNS.values() if column.by in fillers and not column.of_prompt]


def as_column(values: ArrayLike, dtype: np.dtype[Any], *, name: str = "column") -> NDArray[Any]:
    """Convert values to an array of `dtype`; an array that already has this dtype is shared, not copied. ValueError if
    they are not numbers, or if the conversion would lose more than precision (float to int, int to bool)."""
    array = np.asarray(values)
    if array.dtype == dtype:
        return array
    if array.size == 0:
        return np.empty(array.shape, dtype)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name}: dtype {array.dtype}, expected {dtype}.")
    return array.astype(dtype)


@dataclass(frozen=True, eq=False)
class Columns:
    """Base of the frozen dataclasses that hold columns.

    A field annotated `Ints`, `Floats` or `Bools` (or one of them with `| None`) accepts any sequence, array or CPU
    tensor, and holds a numpy array. A scalar is broadcast to the length of `tokens` and takes no memory. Arrays are
    shared with the caller: treat them as immutable. Two objects are equal when all fields are, arrays value by value,
    with NaN equal to NaN.
    """

    not_json: ClassVar[tuple[str, ...]] = ()  # fields left out of the JSON, as are columns that are not `plain`

    def __post_init__(self) -> None:
        """Convert the columns and check their lengths; ValueError names the class, the column and the mismatch."""
        cls: type = type(self)
        length = None
        for name, dtype in column_dtypes(cls).items():
            values = getattr(self, name)
            if values is None:
                continue
            column = as_column(values, dtype, name=f"{cls.__name__}.{name}")
            if column.ndim == 0 and length is not None:
                column = np.broadcast_to(column, length)
            if name == "tokens":
                length = len(column)
            of_prompt = name in TOKEN_COLUMNS and TOKEN_COLUMNS[name].of_prompt
            if not of_prompt and len(column) != length:
                raise ValueError(f"{cls.__name__}.{name}: {len(column)} values for {length} tokens.")
            object.__setattr__(self, name, column)

    def check_shapes(self, *, tokens: int, prompt_tokens: int | None, sampled: Bools | None) -> None:
        """Check the columns that are not `plain`, for this many tokens (None: any); ValueError as above."""
        for column in TOKEN_COLUMNS.values():
            values = vars(self).get(column.name)
            if column.plain or values is None:
                continue
            if column.ragged:
                values.check(vars(self)["tokens"], sampled)
            else:
                rows = prompt_tokens if column.of_prompt else tokens
                check_expert_ids(values, rows, f"{type(self).__name__}.{column.name}")

    def __eq__(self, other: object) -> bool:  # and so no hash: arrays have none
        if type(other) is not type(self):
            return NotImplemented
        names = [each.name for each in fields(self)]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    def to_json(self) -> dict[str, Any]:
        """The fields by name, columns as lists; those in `not_json`, and columns that are not `plain`, are None."""
        omitted = {column.name for column in TOKEN_COLUMNS.values() if not column.plain} | set(self.not_json)
        facts: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in omitted:
                value = None
            elif isinstance(value, np.ndarray):
                value = value.tolist()
            facts[each.name] = value
        return facts


@cache
def column_dtypes(cls: type[Any]) -> dict[str, np.dtype[Any]]:
    """The columns of a class by name, in the order of its fields. Fields with a quoted annotation are not columns."""
    dtypes: dict[str, np.dtype[Any]] = {}
    for each in fields(cls):
        for part in (each.type, *get_args(each.type)):
            if part in _DTYPES:
                dtypes[each.name] = _DTYPES[part]
    return dtypes


def check_expert_ids(ids: Any, rows: int | None, name: str) -> None:
    """Raise ValueError unless `ids` are [rows, layers, K], int8 or int16; `rows` None: any number of rows."""
    kind = getattr(ids, "dtype", type(ids).__name__)
    shape = list(np.shape(ids))
    if kind not in (np.int8, np.int16) or len(shape) != 3 or (rows is not None and shape[0] != rows):
        count = "rows" if rows is None else rows
        raise ValueError(f"{name}: {kind} of shape {shape}, expected int8 or int16 of [{count}, layers, K].")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a is b or np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and bool(a == b)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The sets of tokens that top-k, top-p and min-p left, one for each of T positions.

    Args:
        ids: [M] int32, token ids, ascending and without duplicates within a set.
        offsets: [T+1] int64, 0 … M; token t was drawn from `ids[offsets[t]:offsets[t+1]]`. An empty set marks a token
            that was not sampled.

    Raises:
        ValueError: `ids` or `offsets` violate these conditions.

    Arrays are shared with the caller: treat them as immutable.
    """

    ids: Ints
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        ids = as_column(self.ids, np.dtype("int32"), name="sampling_mask.ids")
        offsets = as_column(self.offsets, np.dtype("int64"), name="sampling_mask.offsets")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "offsets", offsets)
        counts = np.diff(offsets)
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (counts < 0).any():
            raise ValueError(f"sampling_mask.offsets: {offsets[:8].tolist()}, expected 0 … {len(ids)}, ascending.")
        rises = np.diff(ids) > 0
        inner = offsets[1:-1]
        inner = inner[(inner > 0) & (inner < len(ids))]
        rises[inner - 1] = True  # between two sets
        if not rises.all() or (len(ids) and ids.min() < 0):
            raise ValueError("sampling_mask.ids: must be >= 0, ascending and without duplicates within each set.")

    @classmethod
    def of_counts(cls, ids: Ints, counts: NDArray[Any]) -> "SamplingMask":
        """Build the sets from the number of ids in each."""
        return cls(ids, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))

    @classmethod
    def of_sets(cls, sets: Sequence[Sequence[int] | Ints]) -> "SamplingMask":
        """Build the sets from the ids of each token, in any order."""
        arrays = [np.sort(np.asarray(ids, np.int32)) for ids in sets]
        joined = np.concatenate([np.empty(0, np.int32), *arrays])
        counts = np.array([len(ids) for ids in arrays])
        return cls.of_counts(joined, counts)

    @classmethod
    def joined(cls, parts: Sequence["SamplingMask"]) -> "SamplingMask":
        """The sets of all parts, in order."""
        ids = [np.empty(0, np.int32)]
        counts = [np.empty(0, np.int64)]
        for part in parts:
            ids.append(part.ids)
            counts.append(part.counts)
        return cls.of_counts(np.concatenate(ids), np.concatenate(counts))

    def part(self, start: int, end: int) -> "SamplingMask":
        """The sets of tokens `start:end`."""
        edges = self.offsets[start : end + 1]
        return SamplingMask(self.ids[edges[0] : edges[-1]], edges - edges[0])

    def __len__(self) -> int:
        """T."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """[T] the size of each set."""
        return np.diff(self.offsets)

    def __eq__(self, other: object) -> bool:  # and so no hash: arrays have none
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.offsets, other.offsets)

    def check(self, tokens: Ints, sampled: Bools | None = None) -> None:
        """Raise ValueError unless there are T sets and every sampled token is in its set.

        Args:
            tokens: [T] int32.
            sampled: [T] bool; None: all are sampled.
        """
        if len(self) != len(tokens):
            raise ValueError(f"sampling_mask: {len(self)} sets for {len(tokens)} tokens.")
        counts = self.counts
        row = np.repeat(np.arange(len(self)), counts)
        in_set = np.bincount(row[self.ids == tokens[row]], minlength=len(self)) > 0
        wrong = ~in_set
        if sampled is not None:
            wrong &= sampled
        if wrong.any():
            t = int(wrong.argmax())
            if counts[t]:
                what = f"is not in its set of {counts[t]}"
            else:
                what = "has an empty set"
            raise ValueError(f"sampling_mask: token {t}, id {tokens[t]}, {what}: it could not have been sampled.")
