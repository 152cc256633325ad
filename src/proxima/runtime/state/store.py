"""State that survives the process: the journal and the files of the run folder, and how a run reads them back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from proxima.data.flow import Group, Key, Prompt
from proxima.rollout.generator import RolloutListener
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.replay import StoredRollouts
from proxima.runtime.state.rollouts import write_evals, write_rollouts
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.disk import Disk
from proxima.runtime.watch.observer import Observer
from proxima.system.damage import Checksum
from proxima.task.mix import TaskSource
from proxima.task.prompts import PromptSource
from proxima.training.batch_builder import CompletionRecord
from proxima.training.checkpoint import CheckpointContents, write_checkpoint
from proxima.training.ranks import ALONE, Finish, Message, Ranks, Save


class RunStore:
    """Storage for the state of a loop that survives the process: the journal and the folder of the run, open, and
    locked by this process. The simulator's keeps only the records of metrics.jsonl, in memory.

    What is written waits while the `disk` is full. `activity` is what the run does at this moment. The loop calls the
    methods that write completions and checkpoints in the compute thread.
    """

    def __init__(
        self, journal: Journal, folder: RunFolder, disk: Disk, activity: Activity, ranks: Ranks = ALONE
    ) -> None:
        self.journal = journal
        self.folder = folder
        self.disk = disk
        self.activity = activity
        self.ranks = ranks

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        self.folder.append_metrics(record)

    def write_rollouts(self, step: int, groups: Sequence[Group], records: Mapping[Key, CompletionRecord]) -> None:
        """Write the completions of a step; see `rollouts.write_rollouts`."""
        file = self.folder.rollout_file(step)
        write_rollouts(file, step, groups, records)
        self._wrote(file, step)

    def write_evals(self, step: int, label: str, groups: Sequence[Group], sources: Sequence[TaskSource] = ()) -> None:
        """Write the completions of an evaluation, of a task with these sources; see `RunFolder.eval_file` for the
        label."""
        file = self.folder.eval_file(step, label)
        write_evals(file, step, groups, sources)
        self._wrote(file, step)

    def _wrote(self, file: Path, step: int) -> None:
        self.journal.checksums.files[f"{file.parent.name}/{file.name}"] = step, Checksum.of(file)

    def write_checkpoint(self, step: int, contents: CheckpointContents) -> None:
        """Write the checkpoint of a step; see `checkpoint.write_checkpoint`."""
        place = self.folder.checkpoints
        writer = self.ranks.writer
        write = writer.write if writer else write_checkpoint
        with self._on_every_rank(Save(place, step)):
            write(place, step, contents)

    def finish_checkpoint(self) -> None:
        """Wait for a checkpoint that is still being written; in the compute thread."""
        writer = self.ranks.writer
        if writer is not None and writer.unfinished:
            with self._on_every_rank(Finish()):
                writer.finish()

    @contextmanager
    def _on_every_rank(self, message: Message) -> Iterator[None]:
        with self.ranks.call(message):
            try:
                yield
            except OSError:  # which the writer raises on every rank
                self.ranks.in_call = False
                raise


class RolloutRecorder(RolloutListener):
    """Writes the states of a training batch's prompts to the journal and the timeline, and reports its
    progress to the observer."""

    def __init__(self, store: RunStore, source: PromptSource | StoredRollouts, observer: Observer) -> None:
        self.store = store
        self.source = source
        self.observer = observer

    def enqueued(self, prompts: Sequence[Prompt]) -> None:
        journal = self.store.journal
        uids = [prompt.uid for prompt in prompts]
        self.store.disk.enqueue(partial(journal.enqueue, size=len(self.source.rows)), prompts)
        self.store.disk.enqueue(journal.generating, uids)
        if not self.source.replays:  # those of a replay go to no engine
            self.store.activity.enqueued(uids)

    def generated(self, uid: int) -> None:
        self.store.activity.generated(uid)

    def rewarded(self, done: int, total: int) -> None:
        self.observer.progress("generate", done, total, "prompts")

    def scored(self, group: Group) -> None:
        self.store.disk.enqueue(self.store.journal.scored, [group])
        self.store.activity.scored(group.prompt.uid)

    def taken(self, uids: Iterable[int]) -> None:
        self.store.activity.taken(uids)
