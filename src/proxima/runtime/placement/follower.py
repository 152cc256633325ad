"""The ranks other than rank 0: they hold the same models and take part in what rank 0 does."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from proxima.core.metrics import Metrics
from proxima.data import UserError
from proxima.runtime.state.summary import Summary
from proxima.training.checkpoint import CheckpointContents
from proxima.training.forward_stage import ForwardStage, LogProbStage
from proxima.training.process_ranks import ProcessRanks
from proxima.training.ranks import (
    End,
    Fill,
    Finish,
    Gather,
    Lend,
    Message,
    OfStack,
    Ranks,
    Refused,
    Release,
    Save,
    SharedProblem,
    Stages,
    Start,
    Update,
)
from proxima.training.stack import POLICY, TrainStack

T = TypeVar("T")
FOLDER_SECONDS = 10.0  # for a shared file system to show a new folder
SHARED = "set folder=PATH on a file system that all nodes share"


@dataclass(frozen=True, kw_only=True)
class RankModels:
    """The objects that a rank computes with: the trained models by the name of their stack, and each stack's forward
    stages; `late_stages` builds the stages that rank 0 may never ask for."""

    stacks: Mapping[str, TrainStack]
    stages: dict[str, Sequence[ForwardStage]] = field(default_factory=dict)
    late_stages: Callable[[], Sequence[ForwardStage]] = tuple

    @property
    def others(self) -> dict[str, TrainStack]:
        """The stacks other than the policy's."""
        return {name: stack for name, stack in self.stacks.items() if name != POLICY}

    def stage(self, target: str, column: str) -> ForwardStage:
        """The stage that fills a column; by default, one that computes the log-probs of the trained model."""
        for stage in self.stages.get(target, ()):
            if stage.column == column:
                return stage
        return LogProbStage(column, self.stacks[target].model)

    def take_part(self, message: Message) -> None:
        """Do what rank 0 does with its stacks and checkpoints."""
        name = message.stack if isinstance(message, OfStack) else POLICY
        stack = self.stacks[name]
        match message:
            case Update():
                goes_on = _asked_of_rank_zero if message.may_stop else None
                stack.update(message.objective, None, planned=message.planned, should_continue=goes_on)
            case Fill():
                stack.columns(self.stage(message.stack, message.column), None)
            case Gather():
                stack.gathered()
            case Lend():
                stack.follow_lender()
            case Release():
                stack.release()
            case Stages():
                self.stages[message.stack] = self.late_stages()
            case Save():
                assert stack.ranks.writer is not None
                contents = CheckpointContents(stack=stack, others=self.others)
                stack.ranks.writer.write(message.folder, message.step, contents)
            case Finish():
                assert stack.ranks.writer is not None
                stack.ranks.writer.finish()
            case _:
                raise AssertionError(f"rank 0 has sent {message}")


def _asked_of_rank_zero(items: Sequence[Any], metrics: Metrics) -> bool:
    """What other ranks say of whether updates go on; rank 0 decides."""
    return True


def follow(start: Callable[[Start], RankModels], ranks: Ranks) -> Summary:
    """Do what rank 0 does, message by message, until the run ends; returns its summary. Nothing is read before rank 0
    has found everything in order and says `start`, so that each problem is reported once.

    Raises:
        UserError: something is missing on this node.
    """
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


def read_when_visible(what: str, path: Path, read: Callable[[Path], T | None]) -> T:
    """The content that this node reads at a path that rank 0 has written: all ranks write checkpoints there, none may
    load other weights.

    Raises:
        UserError: this node does not see it.
    """
    deadline = time.monotonic() + FOLDER_SECONDS
    while not (content := read(path)):
        if time.monotonic() > deadline:
            raise UserError(f"the {what} {path} is not visible on this node", remedy=SHARED)
        time.sleep(0.5)
    return content
