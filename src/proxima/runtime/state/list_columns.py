"""Rows with numpy columns into Parquet and back: offsets and one flat array of values, no Python object per token."""

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from proxima.data import SamplingMask

ROW_GROUP = 128  # rows converted at once
MASK_COLUMNS = ("sampling_mask", "sampling_mask_counts")  # ids of all tokens, and how many each token has


def write_rows(file: BinaryIO, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, zstd-compressed; a field of a list type takes arrays. Fields that a row lacks are null.

    Lists have no statistics, and no dictionary but for policy versions, of which there are few; numbers of the others
    are split into byte streams: so they are written faster and take less space.
    """
    scalars = [field.name for field in schema if not pa.types.is_list(field.type)]
    lists = {f"{field.name}.list.element": field.type.value_type for field in schema if pa.types.is_list(field.type)}
    encoding = {name: "BYTE_STREAM_SPLIT" for name, kind in lists.items() if kind in (pa.float32(), pa.int32())}
    versions = "policy_version.list.element"
    encoding.pop(versions, None)
    coded = [name for name in scalars if name != "text"]
    settings = {"use_dictionary": [*coded, versions], "write_statistics": coded, "column_encoding": encoding}
    with pq.ParquetWriter(file, schema, compression="zstd", **settings) as writer:
        for start in range(0, max(1, len(rows)), ROW_GROUP):
            part = rows[start : start + ROW_GROUP]
            arrays = [_array(field, [row.get(field.name) for row in part]) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _array(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    if all(value is None for value in values):
        return pa.nulls(len(values), field.type)
    return list_column(values, field.type) if pa.types.is_list(field.type) else pa.array(values, field.type)


def list_of(values: pa.DataType) -> pa.ListType:
    """The type of a list whose entries are never null: Parquet then has less to write for each of them."""
    return pa.list_(pa.field("element", values, nullable=False))


def list_column(columns: Sequence[NDArray[Any] | None], kind: pa.ListType) -> pa.ListArray:
    """One list a row; None is null, a column of several axes is flattened."""
    dtype = kind.value_type.to_pandas_dtype()
    arrays = [np.ravel(np.asarray(() if column is None else column, dtype)) for column in columns]
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    lengths = [len(array) for array in arrays]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    null = pa.array([column is None for column in columns], pa.bool_())
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind.value_type), type=kind, mask=null)


def numpy_columns(column: pa.ChunkedArray) -> list[NDArray[Any] | None]:
    """The rows of a list column as arrays; null is None."""
    out: list[NDArray[Any] | None] = []
    for chunk in column.chunks:
        offsets, flat = chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False)
        rows = zip(offsets[:-1], offsets[1:], chunk.is_valid().to_pylist(), strict=True)
        out += [flat[start:end] if valid else None for start, end, valid in rows]
    return out


def mask_columns(mask: SamplingMask | None) -> dict[str, NDArray[Any] | None]:
    """A sampling mask as the lists `MASK_COLUMNS`."""
    return dict(zip(MASK_COLUMNS, (None, None) if mask is None else (mask.ids, mask.counts), strict=True))


def read_mask(row: Mapping[str, Any]) -> SamplingMask | None:
    """The sampling mask of a row; files of earlier versions have no such columns."""
    ids, counts = (row.get(name) for name in MASK_COLUMNS)
    return None if ids is None or counts is None else SamplingMask.of_counts(ids, counts)
