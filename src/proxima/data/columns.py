"""Per-token columns: numpy arrays of one dtype and length, built from any sequence and compared exactly."""

from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from proxima.data.routed_experts import check_expert_ids

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
ExpertIds = NDArray[np.int8] | NDArray[np.int16]
LARGEST = float(np.finfo(np.float32).max)  # in a column of floats

_DTYPES: dict[Any, np.dtype[Any]] = {Ints: np.dtype("int32"), Floats: np.dtype("float32"), Bools: np.dtype("bool")}


def as_column(values: ArrayLike, dtype: np.dtype[Any], *, name: str = "column") -> NDArray[Any]:
    """The values as an array of `dtype`; an array that already has this dtype is shared, not copied. ValueError if they
    are not numbers, or if a conversion would lose more than precision (float to int, int to bool)."""
    array = np.asarray(values)
    if array.dtype == dtype:
        return array
    if array.size == 0:
        return np.empty(array.shape, dtype)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"{name}: dtype {array.dtype}, expected {dtype}.")
    return array.astype(dtype)


class Columns:
    """Base of the frozen dataclasses that hold columns.

    A field annotated `Ints`, `Floats` or `Bools` (or one of them with `| None`) accepts any sequence, array or CPU
    tensor, and holds a numpy array. A scalar is broadcast to the length of `tokens` and takes no memory. Arrays are
    shared with the caller: treat them as immutable. Two objects are equal when all fields are, arrays value by value,
    with NaN equal to NaN.
    """

    other_length: ClassVar[tuple[str, ...]] = ()  # columns that do not have one entry per token
    not_json: ClassVar[tuple[str, ...]] = ()  # columns left out of the JSON

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
            elif name not in self.other_length and len(column) != length:
                raise ValueError(f"{cls.__name__}.{name}: {len(column)} values for {length} tokens.")
            object.__setattr__(self, name, column)

    def check_experts(self, **rows: int | None) -> None:
        """Raise ValueError unless each expert column that is not None has the given number of rows (None: any)."""
        for name, count in rows.items():
            if (ids := getattr(self, name)) is not None:
                check_expert_ids(ids, count, f"{type(self).__name__}.{name}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """The fields by name, columns as lists; the fields in `not_json` are None."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        kept = ((name, None if name in self.not_json else value) for name, value in values)
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in kept}


@cache
def column_dtypes(cls: type[Any]) -> dict[str, np.dtype[Any]]:
    """The columns of a class by name, in the order of its fields. A quoted annotation is not of a column."""
    hints = {f.name: [f.type, *getattr(f.type, "__args__", ())] for f in fields(cls)}
    return {name: _DTYPES[part] for name, parts in hints.items() for part in parts if part in _DTYPES}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a is b or np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and bool(a == b)
