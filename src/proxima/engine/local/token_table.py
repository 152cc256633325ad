"""Per-token columns of the running completions: one line each, written for all lines at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Floats, Ints, SamplingMask, filled_by

Lines = NDArray[np.int64]


class TokenTable:
    """The columns that every engine fills, [lines, capacity], and any others that are appended, [lines, capacity, …].

    A line belongs to one completion from `open` to `close`. `capacity` grows to the longest `max_tokens`. `sets` has,
    by line and token, the tokens that could have been sampled, if they are appended.

    Args:
        lines: number of concurrent completions.
    """

    def __init__(self, lines: int) -> None:
        self.sets: list[list[Ints]] = [[] for _ in range(lines)]
        self.length, self.limit, self.prompt_length = np.zeros((3, lines), np.int64)
        self.uniform: Floats = np.empty((lines, 0), np.float32)
        self.columns: dict[str, NDArray[Any]] = {
            column.name: np.empty((lines, 0), column.dtype) for column in filled_by("engine") if column.required
        }
        self._free = list(range(lines))

    def open(self, prompt_length: int, limit: int, uniform: Floats) -> int:
        """Take a free line for a completion of at most `limit` tokens, drawn with `uniform`."""
        line = self._free.pop()
        if len(uniform) > self.uniform.shape[1]:
            self.uniform = _widened(self.uniform, len(uniform))
            self.columns = {name: _widened(column, len(uniform)) for name, column in self.columns.items()}
        self.length[line] = 0
        self.limit[line] = limit
        self.prompt_length[line] = prompt_length
        self.uniform[line, : len(uniform)] = uniform
        self.sets[line] = []
        return line

    def close(self, line: int) -> None:
        """Free a line for reuse; results of `read` stay valid."""
        self._free.append(line)

    def append(
        self, lines: Lines, policy_version: int, columns: Mapping[str, NDArray[Any]], sets: Sequence[Sequence[Ints]]
    ) -> None:
        """Append tokens to each of `lines`, all of the same version of the weights: [steps, n] or [steps, n, top_k], of
        each step with the `sets` of all lines or of none. A further column begins with its first tokens."""
        steps = len(columns["tokens"])
        at = self._next(lines, steps)
        for name in columns.keys() - self.columns.keys():
            shape = len(self.length), self.uniform.shape[1], *columns[name].shape[2:]
            self.columns[name] = np.empty(shape, columns[name].dtype)
        for name, column in self.columns.items():
            column[lines, at] = policy_version if name == "policy_version" else columns[name]
        self.length[lines] += steps
        for of_step in sets:
            if of_step:
                for line, ids in zip(lines.tolist(), of_step, strict=True):
                    self.sets[line].append(ids)

    def ahead(self, lines: Lines, most: int) -> tuple[Lines, Lines, Floats]:
        """The inputs of the next steps: `most` of them, or fewer until the first of `lines` is full.

        Returns: [n] the last token of each line; [steps, n] the position of each step's last token in the sequence, and
            the draw of its next token.
        """
        at = self._next(lines, min(most, int((self.limit[lines] - self.length[lines]).min())))
        last = self.columns["tokens"][lines, self.length[lines] - 1].astype(np.int64)
        return last, self.prompt_length[lines] + at - 1, self.uniform[lines, at]

    def _next(self, lines: Lines, steps: int) -> Lines:
        """[steps, n] the indices of the next tokens in their lines."""
        return self.length[lines] + np.arange(steps)[:, None]

    def tokens(self, line: int) -> Ints:
        """[T] a view of the tokens of a line."""
        tokens: Ints = self.columns["tokens"][line, : self.length[line]]
        return tokens

    def empty(self) -> dict[str, Any]:
        """The columns of a completion without a token."""
        return {name: column[0, :0].copy() for name, column in self.columns.items()}

    def read(self, line: int) -> dict[str, Any]:
        """Copies of the columns of a line, [T] or [T, top_k], and its `sampling_mask` if it has `sets`. A single policy
        version is broadcast."""
        columns: dict[str, Any] = {
            name: column[line, : self.length[line]].copy() for name, column in self.columns.items()
        }
        if self.sets[line]:
            columns["sampling_mask"] = SamplingMask.of_sets(self.sets[line])
        version = columns["policy_version"]
        if len(version) and (version == version[0]).all():
            columns["policy_version"] = np.broadcast_to(version[:1].copy(), len(version))
        return columns


def _widened(column: NDArray[Any], capacity: int) -> NDArray[Any]:
    wide = np.empty((column.shape[0], capacity, *column.shape[2:]), column.dtype)
    wide[:, : column.shape[1]] = column
    return wide
