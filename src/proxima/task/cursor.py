"""The order of the rows: deterministic over epochs, and stored as four values in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data import require
from proxima.data.random import permutation


class Cursor:
    """Draws rows in order, epoch after epoch, each row once per epoch. The uid of a draw is epoch x size + position:
    unique in a run, never reused, the same after a resume.

    Args:
        size: number of rows; >= 1.
        seed: determines the order of each epoch, together with the epoch's number and nothing else.
        shuffle: False keeps the order of the rows.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        require(size >= 1, "size", size, "must be >= 1: there is nothing to draw from")
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def next(self, n: int) -> range:
        """Draw, and return the uids of the next n draws; they may cross the end of an epoch."""
        self.drawn += n
        return range(self.drawn - n, self.drawn)

    def row(self, uid: int) -> int:
        """Return the row of a uid, past or future, in 0 … size-1; does not move the cursor."""
        epoch, position = divmod(uid, self.size)
        return int(self._epoch_order(epoch)[position]) if self.shuffle else position

    def state(self) -> dict[str, Any]:
        """Return JSON values that `load` restores."""
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "drawn": self.drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; FieldError, with both values, if it belongs to other data, seed or order."""
        for name in ("size", "seed", "shuffle"):
            stored, expected = state.get(name), getattr(self, name)
            bound = f"in the checkpoint, but the run has {expected!r}; resume with the same data and seed"
            require(stored == expected, f"cursor.{name}", stored, bound)
        drawn = state.get("drawn")
        require(isinstance(drawn, int) and drawn >= 0, "cursor.drawn", drawn, "must be an integer >= 0")
        self.drawn = int(state["drawn"])

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(self.size, self.seed, epoch))
        return self._order[1]
