"""The ranks other than rank 0: they hold the same models and do what rank 0 tells them to."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.data import UserError
from proxima.train import ForwardStage, LogProbStage, TrainStack
from proxima.train.checkpoint import Checkpoint, read_checkpoint
from proxima.train.forward_stage import by_column
from proxima.train.messages import End, Fill, Finish, Gather, Release, Save, Stages, Start, Update
from proxima.train.ranks import Message, Ranks, Refused, SharedProblem
from proxima.train.stack import POLICY

if TYPE_CHECKING:
    from proxima.runtime.state.summary import Summary


FOLDER_SECONDS = 10.0  # for a shared file system to show a new folder
SHARED = "set folder=PATH on a file system that all nodes share"


@dataclass(frozen=True, kw_only=True)
class RankModels:
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

    def take_part(self, message: Message) -> None:
        """Do what rank 0 does with its stacks and checkpoints."""
        match message:
            case Update():
                updates, goes_on = message.updates, message.should_continue
                stack = self.stacks[message.stack]
                stack.update(message.objective, updates, planned=message.planned, should_continue=goes_on)
            case Fill():
                self.stacks[message.stack].columns(self.stage(message.stack, message.column), message.trajectories)
            case Gather():
                self.stacks[message.stack].gathered()
            case Release():
                self.stacks[message.stack].release()
            case Stages():
                self.late.update(by_column(self.late_stages()))
            case Save():
                policy = self.stacks[POLICY]
                writer, loaded = policy.ranks.writer, policy.model.loaded
                writer.write(message.folder, message.step, loaded, policy, {}, {}, self.others)
            case Finish():
                self.stacks[POLICY].ranks.writer.finish()
            case _:
                raise AssertionError(f"rank 0 has sent {message}")


def follow(start: Callable[[Start], RankModels], ranks: Ranks) -> "Summary":
    """Do what rank 0 does, message by message, until the run ends; returns its summary. Nothing is read before rank 0
    has found everything in order and says `start`, so that each problem is reported once.

    Raises:
        UserError: something is missing on this node.
    """
    from proxima.train.process_ranks import ProcessRanks

    assert isinstance(ranks, ProcessRanks)
    models = RankModels(stacks={})
    while not isinstance(message := ranks.receive(), End):
        try:
            if isinstance(message, Start):
                models = start(message)
            else:
                models.take_part(message)
        except OSError as error:
            if not isinstance(message, Save | Finish):  # for these, the writer raises it on every rank
                raise
            print(f"{message}: {error}")
        except (Refused, SharedProblem) as error:  # on every rank; rank 0 decides whether the run continues
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)  # to rank 0's log
    summary: Summary = message.outcome
    return summary


def require_folder(folder: Path) -> None:
    """Raise if this node does not see the run folder that rank 0 has created: all ranks write checkpoints."""
    seconds = 0.0
    while not folder.is_dir():
        if seconds >= FOLDER_SECONDS:
            raise UserError(f"the run folder {folder} is not visible on this node", remedy=SHARED)
        time.sleep(0.5)
        seconds += 0.5


def seen_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that rank 0 resumes from, as this node sees it.

    Raises:
        UserError: this node does not see it, and must not load other weights.
    """
    if (checkpoint := read_checkpoint(path)) is None:
        raise UserError(f"the checkpoint {path} is not visible on this node", remedy=SHARED)
    return checkpoint
