"""The ranks other than rank 0: they hold the same models and compute what rank 0 tells them to."""

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from proxima.data import UserError
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread
from proxima.train import ForwardStage, LogProbStage, TrainStack
from proxima.train.forward_stage import by_column
from proxima.train.ranks import Ranks, Refused, SharedProblem
from proxima.train.stack import POLICY

if TYPE_CHECKING:
    from proxima.runtime.state.summary import Summary
    from proxima.train.node_folders import NodeFolders
    from proxima.train.process_ranks import ProcessRanks


FOLDER_SECONDS = 10.0  # for a shared file system to show a new folder


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
    """Execute rank 0's calls until the run ends; returns its summary. Nothing is read before rank 0 has found
    everything in order, so that each problem is reported once.

    Raises:
        UserError: something is missing on this node.
    """
    from proxima.train.node_folders import NodeFolders
    from proxima.train.process_ranks import ProcessRanks

    assert isinstance(ranks, ProcessRanks)
    with closing(NodeFolders(ranks)) as folders:
        return _follow(make_work, ranks, folders)


def _follow(make_work: Callable[[], RankWorkload], ranks: "ProcessRanks", folders: "NodeFolders") -> "Summary":
    work: RankWorkload | None = None
    parts = RankParts(stacks={})
    while True:
        call = ranks.receive()
        if call.name == "end":
            summary: Summary = call.part
            return summary
        if call.name == "preflight":
            require_folder(call.part)
            work = make_work()
            ranks.gather(work.hashes() if os.environ.get("LOCAL_RANK", "0") == "0" else None)
            continue
        if call.name == "load":
            work, checkpoint = work or make_work(), call.part
            loaded = work.load(None if checkpoint is None else str(checkpoint / "model"))
            parts = work.rank_parts(loaded, ComputeThread(), ranks, checkpoint)
            continue
        if call.name == "folder":
            folders.follow(call.part)
            continue
        try:
            obey(call.target, call.name, call.part, parts)
        except OSError as error:
            if call.name not in ("checkpoint", "finish"):  # for these, the writer raises it on every rank
                raise
            print(f"{call.name}: {error}")
        except (Refused, SharedProblem) as error:  # on every rank; rank 0 decides whether the run continues
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)  # to rank 0's log
            continue


def require_folder(folder: Path) -> None:
    """Raise if this node does not see the run folder that rank 0 has created: all ranks write checkpoints."""
    seconds = 0.0
    while not folder.is_dir():
        if seconds >= FOLDER_SECONDS:
            remedy = "set folder=PATH on a file system that all nodes share"
            raise UserError(f"the run folder {folder} is not visible on this node", remedy=remedy)
        time.sleep(0.5)
        seconds += 0.5


def obey(target: str, name: str, part: Any, parts: RankParts) -> None:
    """Execute a call from rank 0 with this rank's part."""
    stack = parts.stacks.get(target)
    if name == "update" and stack is not None:
        stack.update(*part)
    elif name == "columns" and stack is not None:
        column, trajectories = part
        stack.columns(parts.stage(target, column), trajectories)
    elif name == "stages":
        parts.late.update(by_column(parts.late_stages()))
    elif name == "gather" and stack is not None:
        stack.gathered()
    elif name == "release" and stack is not None:
        stack.release()
    elif name == "restore":
        from proxima.train.checkpoint_restore import restore

        restore(part, parts.stacks[POLICY], parts.others)
    elif name == "checkpoint":
        folder, step = part
        policy = parts.stacks[POLICY]
        policy.ranks.writer.write(folder, step, policy.model.loaded, policy, {}, {}, parts.others, wait=False)
    elif name == "finish":
        parts.stacks[POLICY].ranks.writer.finish()
    else:
        raise ValueError(f"rank 0 asked for {name!r} of {target!r}, which this rank does not know")
