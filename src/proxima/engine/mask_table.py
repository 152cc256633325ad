"""The sampling masks of the running completions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Ints
from proxima.data.sampling_mask import SamplingMask


class MaskTable:
    """The tokens that could have been sampled at each token of each line: one growing buffer of ids per line."""

    def __init__(self, lines: int) -> None:
        self._ids = [np.empty(0, np.int32) for _ in range(lines)]
        self._counts = [np.empty(0, np.int64) for _ in range(lines)]
        self._used = np.zeros((2, lines), np.int64)  # of ids and counts

    def clear(self, line: int) -> None:
        """Empty a line."""
        self._used[:, line] = 0

    def append(self, lines: NDArray[np.int64], ids: Ints, counts: NDArray[np.int64]) -> None:
        """Append tokens to each of `lines`.

        Args:
            ids: [M], step by step, and line by line within a step.
            counts: [steps, n] the number of ids of each step and line.
        """
        steps, n = counts.shape
        place = np.arange(steps * n).reshape(steps, n)
        by_line = np.argsort(np.repeat(place % n, counts.ravel()), kind="stable")
        parts = np.split(ids[by_line], np.cumsum(counts.sum(0))[:-1])
        for i, line in enumerate(lines.tolist()):
            self._ids[line] = _extended(self._ids[line], self._used[0, line], parts[i])
            self._counts[line] = _extended(self._counts[line], self._used[1, line], counts[:, i])
            self._used[:, line] += len(parts[i]), steps

    def read(self, line: int) -> SamplingMask:
        """Return a copy of a line."""
        ids, tokens = self._used[:, line].tolist()
        return SamplingMask.of_counts(self._ids[line][:ids].copy(), self._counts[line][:tokens])


def _extended(buffer: NDArray[Any], used: int, values: NDArray[Any]) -> NDArray[Any]:
    """Write `values` after the first `used` elements; return the buffer, doubled if they do not fit."""
    if used + len(values) > len(buffer):
        wider = np.empty(2 * (used + len(values)), buffer.dtype)
        wider[:used] = buffer[:used]
        buffer = wider
    buffer[used : used + len(values)] = values
    return buffer
