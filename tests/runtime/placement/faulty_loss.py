"""A surrogate that warns in one rank, and fails there."""

import os
import signal
import time
import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

from proxima.core import PolicyBatch, Surrogate, TokenLoss
from proxima.core.ratio import masked_ratio


@dataclass(frozen=True)
class Faulty(Surrogate):
    """-A r; in a rank something happens."""

    rank: int = 1
    how: Literal["raise", "kill", "stop", "sleep", "warn"] = "raise"
    zero_advantage_inert: ClassVar[bool] = False

    def __call__(self, b: PolicyBatch) -> TokenLoss:
        if os.environ.get("RANK") == str(self.rank):
            warnings.warn("a rank warns", stacklevel=1)
            if self.how == "raise":
                raise MemoryError("this rank has no memory left")
            if self.how == "sleep":
                time.sleep(600)
            if self.how in ("kill", "stop"):
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.how])
        return TokenLoss(-b.masked("advantage") * masked_ratio(b), b.loss_mask, {})
