"""Numpy columns into Arrow list arrays and back: offsets and one flat array of values, no Python object per token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def list_column(columns: Sequence[NDArray[Any] | None], values: pa.DataType) -> pa.ListArray:
    """One list a row; None is null, a column of several axes is flattened.

    Args:
        values: Arrow type of the entries.
    """
    dtype = values.to_pandas_dtype()
    arrays = [np.ravel(np.asarray(() if column is None else column, dtype)) for column in columns]
    flat = np.concatenate([np.empty(0, dtype), *arrays])
    lengths = [len(array) for array in arrays]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    null = pa.array([column is None for column in columns], pa.bool_())
    return pa.ListArray.from_arrays(offsets, pa.array(flat, values), type=pa.list_(values), mask=null)


def numpy_columns(column: pa.ChunkedArray) -> list[NDArray[Any] | None]:
    """The rows of a list column as arrays; null is None."""
    out: list[NDArray[Any] | None] = []
    for chunk in column.chunks:
        offsets, flat = chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False)
        rows = zip(offsets[:-1], offsets[1:], chunk.is_valid().to_pylist(), strict=True)
        out += [flat[start:end] if valid else None for start, end, valid in rows]
    return out
