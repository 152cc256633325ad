"""Per-token columns of the running completions: one line each, written for all lines at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Floats, Ints

Lines = NDArray[np.int64]


class TokenTable:
    """Columns `tokens`, `sampled_log_prob`, `untruncated_log_prob`, `policy_version` [lines, capacity], and with
    `top_k`, `top_k` and `top_k_log_prob` [lines, capacity, top_k]; with routes also `routed_experts` [lines, capacity,
    M, K].

    A line belongs to one completion from `open` to `close`. `capacity` grows to the longest `max_tokens`.

    Args:
        lines: number of concurrent completions.
        top_k: most probable tokens kept with each token; 0 for none.
        sampling_mask: keep the tokens that could have been sampled, by line and token, in `masks`, which is None
            otherwise.
    """

    def __init__(self, lines: int, top_k: int = 0, sampling_mask: bool = False) -> None:
        self.masks: list[list[Ints]] | None = [[] for _ in range(lines)] if sampling_mask else None
        self.length, self.limit, self.prompt_length = np.zeros((3, lines), np.int64)
        self.uniform: Floats = np.empty((lines, 0), np.float32)
        self.columns: dict[str, NDArray[Any]] = {
            "tokens": np.empty((lines, 0), np.int32),
            "sampled_log_prob": np.empty((lines, 0), np.float32),
            "untruncated_log_prob": np.empty((lines, 0), np.float32),
            "policy_version": np.empty((lines, 0), np.int32),
        }
        if top_k:
            self.columns["top_k"] = np.empty((lines, 0, top_k), np.int32)
            self.columns["top_k_log_prob"] = np.empty((lines, 0, top_k), np.float32)
        self._free = list(range(lines))

    def open(self, prompt_length: int, limit: int, uniform: Floats) -> int:
        """Take a free line for a completion of at most `limit` tokens, drawn with `uniform`."""
        line = self._free.pop()
        if len(uniform) > self.uniform.shape[1]:
            self.uniform = _widened(self.uniform, len(uniform))
            self.columns = {name: _widened(column, len(uniform)) for name, column in self.columns.items()}
        self.length[line], self.limit[line], self.prompt_length[line] = 0, limit, prompt_length
        self.uniform[line, : len(uniform)] = uniform
        if self.masks is not None:
            self.masks[line] = []
        return line

    def close(self, line: int) -> None:
        """Free a line for reuse; results of `read` stay valid."""
        self._free.append(line)

    def append(self, lines: Lines, policy_version: int, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append tokens to each of `lines`, all of the same version of the weights: [steps, n] or [steps, n, top_k].
        The first routes add their column."""
        steps = len(columns["tokens"])
        at = self._next(lines, steps)
        for name in columns.keys() - self.columns.keys():
            shape = len(self.length), self.uniform.shape[1], *columns[name].shape[2:]
            self.columns[name] = np.empty(shape, columns[name].dtype)
        for name, column in self.columns.items():
            column[lines, at] = policy_version if name == "policy_version" else columns[name]
        self.length[lines] += steps

    def append_masks(self, lines: Lines, ids: Ints, counts: Lines) -> None:
        """Append the tokens that could have been sampled to the `masks` of each of `lines`.

        Args:
            ids: [M], step by step, and line by line within a step.
            counts: [steps, n] the number of ids of each step and line.
        """
        assert self.masks is not None
        parts = np.split(ids, counts.cumsum()[:-1])
        for line, part in zip(np.tile(lines, len(counts)).tolist(), parts, strict=True):
            self.masks[line].append(part)

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
        """Copies of the columns of a line, [T] or [T, top_k], and its `sampling_mask` if the table has `masks`. A
        single policy version is broadcast."""
        own: dict[str, Any] = {name: column[line, : self.length[line]].copy() for name, column in self.columns.items()}
        if self.masks is not None:
            from proxima.data.sampling_mask import SamplingMask  # few runs replay masks

            own["sampling_mask"] = SamplingMask.of_sets(self.masks[line])
        version = own["policy_version"]
        if len(version) and (version == version[0]).all():
            own["policy_version"] = np.broadcast_to(version[:1].copy(), len(version))
        return own


def _widened(column: NDArray[Any], capacity: int) -> NDArray[Any]:
    wide = np.empty((column.shape[0], capacity, *column.shape[2:]), column.dtype)
    wide[:, : column.shape[1]] = column
    return wide
