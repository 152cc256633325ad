"""The next-policy cache in a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from proxima.runtime.state.carried_groups import read_snapshot
from proxima.runtime.state.list_columns import list_of, write_rows
from proxima.train.next_policy import NextLogProbs

NEXT_POLICY = "next_policy.parquet"
_INTS = list_of(pa.int32())
_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.int64()),
        pa.field("sample", pa.int32()),
        pa.field("turn", pa.int32()),
        pa.field("tokens", _INTS),
        pa.field("policy_version", _INTS),
        pa.field("log_prob", list_of(pa.float32()), metadata={"doc": "nats, under policy_version + 1; NaN: unknown"}),
    ],
    metadata={"proxima": "next policy 1"},
)


def write_next_policy(path: Path, entries: Sequence[NextLogProbs]) -> None:
    """Write a snapshot; `read_next_policy` gives it back equal, to the bit."""
    with path.open("wb") as file:
        write_rows(file, _SCHEMA, [vars(entry) for entry in entries])


def read_next_policy(path: Path) -> list[NextLogProbs]:
    """A snapshot; none where the checkpoint has no such file.

    Raises:
        UserError: the file is torn.
    """
    return [NextLogProbs(**row) for row in read_snapshot(path)] if path.is_file() else []
