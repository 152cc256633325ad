"""The ranks other than rank 0: they hold the same models and do what rank 0 tells them to."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from proxima.data import UserError
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread
from proxima.runtime.placement.agreement import agree_on_files
from proxima.train import ForwardStage, LogProbStage, TrainStack
from proxima.train.forward_stage import by_column
from proxima.train.messages import Copy, End, Fill, Finish, Gather, Release, Save, Stages, Start, Update
from proxima.train.ranks import Message, Ranks, Refused, SharedProblem
from proxima.train.stack import POLICY

if TYPE_CHECKING:
    from proxima.runtime.state.summary import Summary


FOLDER_SECONDS = 10.0  # for a shared file system to show a new folder
SHARED = "set folder=PATH on a file system that all nodes share"


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """The objects that a rank computes with: the trained models by the name of their stack, and each stack's forward
    stages by their column; `late_stages` builds the stages that rank 0 may never ask for, and `late` holds them once it
    has asked."""

    stacks: Mapping[str, TrainStack]
    stages: Mapping[str, Mapping[str, ForwardStage]] = field(default_factory=dict)
    late_stages: Callable[[], Sequence[ForwardStage]] = tuple
    late: dict[str, ForwardStage] = field(default_factory=dict)

    @property
    def others(self) -> dict[str, TrainStack]:
        """The stacks other than the policy's."""
        return {name: stack for name, stack in self.stacks.items() if name != POLICY}

    def stage(self, target: str, column: str) -> ForwardStage:
        """The stage that fills a column; by default, one that computes the log-probs of the trained model."""
        stages = self.stages.get(target) or self.late
        return stages[column] if column in stages else LogProbStage(column, self.stacks[target].model)


class RankWorkload(Protocol):
    """The part of a run's workload that a follower uses."""

    def hashes(self) -> dict[str, str]: ...

    def load(self, path: str | None) -> LoadedModel: ...

    def rank_parts(
        self, loaded: LoadedModel, compute: ComputeThread, ranks: Ranks, checkpoint: Path | None
    ) -> RankParts:
        """Build the same models as `make_loop`, in the same order."""
        ...


def follow(make_work: Callable[[], RankWorkload], ranks: Ranks) -> "Summary":
    """Do what rank 0 does, message by message, until the run ends; returns its summary. Nothing is read before rank 0
    has found everything in order, so that each problem is reported once.

    Raises:
        UserError: something is missing on this node.
    """
    from proxima.train.node_folders import NodeFolders
    from proxima.train.process_ranks import ProcessRanks

    assert isinstance(ranks, ProcessRanks)
    parts = RankParts(stacks={})
    with closing(NodeFolders(ranks)) as folders:
        while not isinstance(message := ranks.receive(), End):
            try:
                if isinstance(message, Start):
                    parts = start_rank(message, make_work, ranks)
                elif isinstance(message, Copy):
                    folders.follow(message)
                else:
                    obey(message, parts)
            except OSError as error:
                if not isinstance(message, Save | Finish):  # for these, the writer raises it on every rank
                    raise
                print(f"{message}: {error}")
            except (Refused, SharedProblem) as error:  # on every rank; rank 0 decides whether the run continues
                if error.__cause__ is not None:
                    traceback.print_exception(error.__cause__)  # to rank 0's log
        summary: Summary = message.outcome
        return summary


def start_rank(message: Start, make_work: Callable[[], RankWorkload], ranks: Ranks) -> RankParts:
    """What `run.train` does on rank 0: data, files, weights, and the state of a checkpoint."""
    from proxima.train.checkpoint import read_checkpoint
    from proxima.train.checkpoint_restore import restore

    require_folder(message.folder)
    work, path, checkpoint = make_work(), message.checkpoint, None
    agree_on_files(work.hashes, ranks)
    if path is not None and (checkpoint := read_checkpoint(path)) is None:
        raise UserError(f"the checkpoint {path} is not visible on this node", remedy=SHARED)
    loaded = work.load(None if checkpoint is None else str(checkpoint.model))
    parts = work.rank_parts(loaded, ComputeThread(), ranks, path)
    if checkpoint is not None:
        restore(checkpoint, parts.stacks[POLICY], parts.others)
    return parts


def require_folder(folder: Path) -> None:
    """Raise if this node does not see the run folder that rank 0 has created: all ranks write checkpoints."""
    seconds = 0.0
    while not folder.is_dir():
        if seconds >= FOLDER_SECONDS:
            raise UserError(f"the run folder {folder} is not visible on this node", remedy=SHARED)
        time.sleep(0.5)
        seconds += 0.5


def obey(message: Message, parts: RankParts) -> None:
    """Do what rank 0 does with its stacks and checkpoints."""
    match message:
        case Update():
            stack = parts.stacks[message.stack]
            stack.update(
                message.objective, message.updates, planned=message.planned, should_continue=message.should_continue
            )
        case Fill():
            parts.stacks[message.stack].columns(parts.stage(message.stack, message.column), message.trajectories)
        case Gather():
            parts.stacks[message.stack].gathered()
        case Release():
            parts.stacks[message.stack].release()
        case Stages():
            parts.late.update(by_column(parts.late_stages()))
        case Save():
            policy = parts.stacks[POLICY]
            writer, loaded = policy.ranks.writer, policy.model.loaded
            writer.write(message.folder, message.step, loaded, policy, {}, {}, parts.others, wait=False)
        case Finish():
            parts.stacks[POLICY].ranks.writer.finish()
        case _:
            raise AssertionError(f"rank 0 has sent {message}")
