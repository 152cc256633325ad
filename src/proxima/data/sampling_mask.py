"""The tokens that could be sampled at each position under truncated sampling: a ragged column."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Bools, Ints, as_column


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The sets that top-k, top-p and min-p left, one for each of T tokens.

    Args:
        ids: [M] int32, token ids, ascending and without duplicates within a set.
        offsets: [T+1] int64, 0 … M; token t was drawn from `ids[offsets[t]:offsets[t+1]]`. An empty set marks a token
            that was not sampled.

    Raises:
        ValueError: these conditions do not hold.

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
        rises[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(ids))] - 1] = True  # set boundaries
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
        return cls.of_counts(np.concatenate([np.empty(0, np.int32), *arrays]), np.array([len(ids) for ids in arrays]))

    @classmethod
    def joined(cls, parts: Sequence["SamplingMask"]) -> "SamplingMask":
        """The sets of all parts, in order."""
        counts = [np.empty(0, np.int64), *(part.counts for part in parts)]
        return cls.of_counts(np.concatenate([np.empty(0, np.int32), *(p.ids for p in parts)]), np.concatenate(counts))

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]

    def check(self, tokens: Ints, sampled: Bools | None = None) -> None:
        """Raise ValueError unless every sampled token is in its set.

        Args:
            tokens: [T].
            sampled: [T]; None: all are.
        """
        if len(self) != len(tokens):
            raise ValueError(f"sampling_mask: {len(self)} sets for {len(tokens)} tokens.")
        counts = self.counts
        row = np.repeat(np.arange(len(self)), counts)
        in_set = np.bincount(row[self.ids == tokens[row]], minlength=len(self)) > 0
        wrong = ~in_set if sampled is None else ~in_set & sampled
        if wrong.any():
            t = int(wrong.argmax())
            what = f"is not in its set of {counts[t]}" if counts[t] else "has an empty set"
            raise ValueError(f"sampling_mask: token {t}, id {tokens[t]}, {what}: it could not have been sampled.")
