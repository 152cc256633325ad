"""Storage of episodes: one row per path, with columns that the files of other runs don't have."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from proxima.data import Completion, Episode, Prompt

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "sampled": (pa.list_(pa.field("element", pa.bool_(), nullable=False)), "false: the model did not write the token"),
    "opening": (pa.list_(pa.field("element", pa.int32(), nullable=False)), "the prompt of a path that has its own"),
    "episode": (pa.string(), "JSON: the messages, and how it ended"),
}


def stored_episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a path."""
    opening = None
    if row["opening"] is not None:
        opening = Prompt(uid=row["prompt_uid"], messages=(), tokens=row["opening"])
    return {"sampled": row["sampled"], "episode": Episode.from_json(row["episode"]), "opening": opening}


def joined_paths(paths: Sequence[Completion]) -> tuple[Completion, ...]:
    """Each sample with all its consecutive paths, in order."""
    samples = (tuple(members) for _, members in groupby(paths, key=lambda path: path.sample))
    return tuple(replace(last, earlier=tuple(earlier)) for *earlier, last in samples)
