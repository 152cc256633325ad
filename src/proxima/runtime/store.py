"""What survives the process: the journal and the files of the run folder, and what a run reads back from them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxima.data import Group, Prompt
from proxima.rollout.generator import RolloutListener
from proxima.runtime.export import best_checkpoint
from proxima.runtime.folder import RunFolder
from proxima.runtime.journal import Journal
from proxima.runtime.observer import Observer
from proxima.runtime.replay import StoredRollouts
from proxima.task.prompts import PromptSource
from proxima.train.checkpoint import checkpoints, prune


class RunStore:
    """The journal and the folder of one run.

    Args:
        journal, folder: open, and locked by this process.
    """

    def __init__(self, journal: Journal, folder: RunFolder) -> None:
        self.journal, self.folder = journal, folder

    def history(self) -> Iterator[dict[str, Any] | None]:
        """Metrics of the finished steps, newest first."""
        return (self.journal.metrics(step) for step in range(self.journal.step, 0, -1))

    def evaluated(self, step: int) -> bool:
        """True when the weights of `step` were evaluated, in this process or before a resume."""
        return any(r["kind"] == "eval" and r["step"] == step for r in self.folder.read_metrics())

    def write_evaluation(self, record: Mapping[str, Any]) -> None:
        """The evaluation's line of metrics.jsonl; the journal keeps it too, should that file be lost."""
        self.journal.set("evaluations", [*(self.journal.get("evaluations") or ()), dict(record)])
        self.folder.append_metrics(record)

    def prune_checkpoints(self, keep_last: int, *, keep_best: bool) -> None:
        """Delete all but the last checkpoints, and the one that is best on held-out questions if it is to be kept."""
        best = best_checkpoint(self.folder, checkpoints(self.folder.checkpoints)) if keep_best else None
        prune(self.folder.checkpoints, keep_last, keep=[] if best is None else [best.step])


class RolloutRecorder(RolloutListener):
    """Writes the states of a training batch's prompts to the journal, and tells the observer how far it is."""

    def __init__(self, journal: Journal, source: PromptSource | StoredRollouts, observer: Observer) -> None:
        self.journal, self.source, self.observer = journal, source, observer

    def admitted(self, prompts: Sequence[Prompt]) -> None:
        self.journal.admit(prompts, size=len(self.source.rows), cursor_state=self.source.state())
        self.journal.generating(prompt.uid for prompt in prompts)

    def rewarded(self, done: int, total: int) -> None:
        self.observer.progress("generate", done, total, "prompts")

    def scored(self, group: Group) -> None:
        self.journal.scored([group])
