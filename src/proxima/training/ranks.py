"""Lets the processes of a run share an update and combine their results.

Rank 0 runs the loop and sends the other ranks messages that say what to compute; each computes its share of the items.
No objective, surrogate or advantage knows about ranks. `Ranks` is the case of a single process;
`proxima.training.process_ranks` implements several.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from proxima.core.metrics import Metrics
from proxima.data import NotFiniteError
from proxima.training.objectives.protocol import Objective

T = TypeVar("T")


class Message:
    """Tells the other ranks what every rank does next; `placement.follower` executes it there. A message contains only
    values: names of stacks and columns, and the specs of a loss. Its `str` names the
    work in status reports, such as `update of policy`."""

    @property
    def target(self) -> str:
        """The name of its stack; `run` if it concerns none."""
        return "run"

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} of {self.target}"


class Refused(Exception):
    """Raised on the other ranks when rank 0 has ended a call with an error, which rank 0 reports itself."""


class SharedProblem(NotFiniteError):
    """A problem that every rank detects at the same point, so that none waits for another."""


class RankError(Exception):
    """An error on another rank."""


class RankLoss(Protocol):
    """The failure of another rank: `placement`'s `RankFailure`."""

    @property
    def text(self) -> str: ...
    @property
    def refused(self) -> bool: ...


class RankMonitor(Protocol):
    """Watches the other ranks: `placement`'s `RankWatch`."""

    @property
    def losing(self) -> bool:
        """True if a rank has failed."""
        ...

    def cause(self, error: BaseException) -> RankLoss | None:
        """The failure of a rank behind an error on rank 0; None if there is none."""
        ...

    def name(self, rank: int) -> str:
        """The name of a rank, for messages."""
        ...

    def late(self, now: float) -> tuple[float, str] | None:
        """Seconds and a sentence about the rank that the others wait for; None if they wait for none."""
        ...

    def attached(
        self, log: Path, warn: Callable[[str], object], cancel: Callable[[], object]
    ) -> AbstractContextManager[None]:
        """Within the block, log what the ranks print, and cancel the run if one of them fails."""
        ...


class CheckpointWriter(Protocol):
    """Writes the checkpoints of several ranks: `sharded_checkpoint.ShardedWriter`."""

    @property
    def unfinished(self) -> bool:
        """True if a checkpoint waits for `finish`."""
        ...

    def write(self, folder: Path, step: int, contents: Any) -> None:
        """Begin to write a checkpoint with these `CheckpointContents` (an import of that class would be circular)."""
        ...

    def finish(self) -> object:
        """Wait for the checkpoint that is being written."""
        ...


class Ranks:
    """A single process. Methods marked collective are called by every rank, in the same order."""

    rank: int = 0
    size: int = 1
    ranks_per_share: int = 1  # neighbouring ranks that compute the same share, split by matrices or tokens

    writer: CheckpointWriter | None = None  # where there are several ranks
    in_call: bool = False  # the other ranks are in the middle of a call, and receive nothing before its end
    monitor: RankMonitor | None = None  # on rank 0 of several

    @property
    def shares(self) -> int:
        """The number of parts into which an update is split."""
        return self.size // self.ranks_per_share

    @property
    def share(self) -> int:
        """The index of this rank's share."""
        return self.rank // self.ranks_per_share

    @property
    def writing(self) -> bool:
        """True if a checkpoint is not complete yet."""
        return self.writer is not None and self.writer.unfinished

    def call(self, message: Message) -> AbstractContextManager[None]:
        """On rank 0: send a message to every rank, which does what rank 0 does in the block. Elsewhere, no effect."""
        return nullcontext()

    def end(self, outcome: Any) -> None:
        """On rank 0: end the other ranks, with the outcome of the run."""

    def losing(self) -> bool:
        """True if another rank has failed."""
        return self.monitor is not None and self.monitor.losing

    def name(self, rank: int) -> str:
        """The name of a rank, for messages."""
        if self.monitor is None:
            return f"rank {rank}"
        return self.monitor.name(rank)

    def at(self, part: str) -> None:
        """Note the part of the call that comes next, for status reports of this rank."""

    def agree(self, problem: Exception | None) -> None:
        """Raise a rank's problem on every rank at the same point, so that none waits for another: on rank 0 its own
        problem, if it has one; on the other ranks `Refused`. Collective.

        Raises:
            SharedProblem: a rank has a NotFiniteError.
            RankError: another rank has another problem.
        """
        if problem is not None:
            raise problem

    def share_value(self, value: T) -> T:
        """Rank 0's value, on every rank; collective."""
        return value

    def scatter(self, make: Callable[[int], T] | None, *, device: torch.device | str | None = None) -> T:
        """What rank 0 makes for this rank's share; no rank receives what is made for the others. Collective.

        Args:
            make: on rank 0, makes the value of a share from the share's index; None on the other ranks.
            device: where the tensors arrive on the other ranks; None: the values have tensors on the CPU alone.
        """
        assert make is not None
        return make(0)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on rank 0; elsewhere only this rank's. Collective; tensors arrive on the CPU."""
        return [value]

    def gather_shares(self, value: T, *, device: torch.device | str = "cpu") -> list[T]:
        """The values of all shares, each from the first rank that has it, on rank 0; elsewhere only this rank's.
        Collective; the tensors of several ranks arrive on `device`."""
        return [value]

    def gather_metrics(self, metrics: list[Metrics]) -> list[Metrics]:
        """The metrics of all shares, on rank 0; elsewhere only this rank's. Collective."""
        return metrics

    def sum(self, value: Tensor) -> Tensor:
        """[] summed over the shares; collective."""
        return value

    def maximum(self, count: int) -> int:
        """The largest count of any rank; collective."""
        return count

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """[] the 2-norm of tensors that may be sharded over the ranks; collective."""
        return nn.utils.get_total_norm(tensors)

    def clip(self, parameters: Iterable[nn.Parameter], maximum: float, norm: Tensor) -> None:
        """Scale the gradients, of norm `norm`, down to `maximum`."""
        nn.utils.clip_grads_with_norm_(parameters, maximum, norm)


ALONE = Ranks()


@dataclass(frozen=True)
class Start(Message):
    """Read the data, compare them with the other nodes' data, and load the models, from `checkpoint` if the run resumes
    from one. `decided`: the values by path that rank 0 has put in place of `auto`."""

    folder: Path
    checkpoint: Path | None
    decided: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OfStack(Message):
    """Calls a method of the stack with this name."""

    stack: str

    @property
    def target(self) -> str:
        return self.stack


@dataclass(frozen=True)
class Fill(OfStack):
    """Run the stage that fills `column`, see `TrainStack.columns`; rank 0 then scatters the trajectories."""

    column: str


@dataclass(frozen=True)
class Update(OfStack):
    """Call `TrainStack.update` with these arguments; rank 0 then scatters the items. If it `may_stop`, rank 0 says
    after each update whether another one follows."""

    objective: Objective[Any]
    planned: int
    may_stop: bool


class Gather(OfStack):
    """Send rank 0 the weights, see `TrainStack.gathered`."""


class Lend(OfStack):
    """Gather weights as rank 0 reads them, see `TrainStack.lent_model`."""


class Release(OfStack):
    """Return unused device memory, see `TrainStack.release`."""


class Stages(OfStack):
    """Create the late stages, see `TrainStack.late_stages`."""


@dataclass(frozen=True)
class Save(Message):
    """Begin the checkpoint of a step, see `ShardedWriter.write`."""

    folder: Path
    step: int


@dataclass(frozen=True)
class Finish(Message):
    """Wait for the checkpoint that is being written."""


@dataclass(frozen=True)
class End(Message):
    """End, with the outcome of the run."""

    outcome: Any
