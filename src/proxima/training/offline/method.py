"""The interface between the offline loop and the method that it trains."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from proxima.data.columns import Floats
from proxima.data.flow import Prompt
from proxima.data.trajectory import Trajectory
from proxima.model.model_source import ModelSource
from proxima.model.packed_model import PackedModel
from proxima.model.pretrained import LoadedModel
from proxima.task.protocol import Row
from proxima.training.forward_stage import ForwardStage
from proxima.training.objectives.protocol import Objective
from proxima.training.stack import TrainStack

Item = TypeVar("Item")
Progress = Callable[[int, int], None]
MEASURED_AT_ONCE = 16  # held-out items between two points at which the run can be stopped


class OfflineMethod(Generic[Item]):
    """A way to train on a fixed data set. Subclass it. One object serves one run. The order of calls:

    1. Before weights are loaded: `check`; for each row of `task` and of `eval.task` `item(row, number)`; then `joined`
       with all items of `task`, and `unmeasured`.
    2. `load(None)`, or on a resume `load(folder of the checkpoint's model)`, then `model(loaded)`. The loop provides
       optimizer, schedule and micro-batches around that model: a `TrainStack`.
    3. `prepare(items, progress, stack)`, for the training items and for the held-out ones.
    4. Each step: `TrainStack.update(objective(), one update of examples_per_step items)`.
    5. Each evaluation: `measure(stack, some items)` until all are measured, then `summarise(all that it returned)`; and
       a greedy completion of each of `prompts(rows)`, under the weights of that moment.

    From 2 on, everything is called in the compute thread. All results must depend only on settings, data and weights: a
    resumed run repeats 1 to 3, and its next step must be bit-identical. A method keeps no state between steps;
    persistent state belongs in the model, the optimizer, or the run's folder.

    Args:
        settings: the config of its recipes, see `proxima.config.families`.
        source: the model.
        tokenizer: that of the model.
        context: the maximum number of tokens of a sequence, `model.max_length` or the model's own limit.

    headline: the metric of `summarise` that represents an evaluation and selects the best checkpoint; if lower is
        better, `evaluation.headline` lists it.
    marks_model: `summarise` writes to the model's config, so a checkpoint that an interrupted run wrote before the
        evaluation of its step is written again.
    """

    headline: str
    marks_model: bool = False

    def __init__(self, settings: Any, source: ModelSource, tokenizer: Any, context: int) -> None:
        self.settings = settings
        self.source = source
        self.tokenizer = tokenizer
        self.context = context

    def check(self) -> None:
        """Validate the settings before any row is read.

        Raises:
            FieldError: names the invalid setting.
        """

    def item(self, row: Row, number: int) -> Item:
        """The training item of a row; `number` is its index in the data, and serves as the group of its trajectories.

        Raises:
            FieldError: the row is unusable; names the part and the reason. By `data.unusable`, the run skips and counts
                such rows, grouped by field and reason, or is refused.
            OverLengthError: the row is too long; `data.over_length` decides whether it is skipped.
        """
        raise NotImplementedError

    def joined(self, items: list[Item]) -> list[Item]:
        """The training items, each completed from other items, which the run need not reach; by default unchanged.

        Raises:
            UserError: there is no suitable other item for one.
        """
        return items

    def load(self, path: str | None) -> LoadedModel:
        """Load the model to train: that of the source, or of a checkpoint's folder `path`. Checkpoints and `proxima
        export` save its `loaded.model` and tokenizer as a Hugging Face folder."""
        return self.source.load(path)

    def model(self, loaded: LoadedModel) -> PackedModel:
        """The model that packs and runs the items of the objective."""
        return self.source.policy(loaded)

    def notes(self, loaded: LoadedModel) -> list[str]:
        """Warnings about the data for this model, shown once it is loaded."""
        return []

    def unmeasured(self, held_out: Sequence[Item]) -> str:
        """The reason why an evaluation on these items, at least one, has no `headline`; empty if it has one."""
        return ""

    def stages(self) -> Sequence[ForwardStage]:
        """The forward stages that `prepare` has the stack run; by default none."""
        return ()

    def prepare(self, items: list[Item], progress: Progress, stack: TrainStack) -> list[Item]:
        """The items with columns computed once by a frozen model, such as reference log-probs; by default unchanged.

        Args:
            progress: called with (tokens done, tokens in all).
            stack: runs the `stages`.
        """
        return items

    def objective(self) -> Objective[Item]:
        """The loss to minimise, over the items of an update."""
        raise NotImplementedError

    def measure(self, stack: TrainStack, items: Sequence[Item]) -> list[Any]:
        """One value for each held-out item, in order, without gradient; `summarise` reads them."""
        raise NotImplementedError

    def summarise(self, measured: Sequence[Any]) -> dict[str, float]:
        """The metrics of an evaluation from all values that `measure` returned, at least one. The 95 % interval of
        `NAME`, over the items, is `NAME/low` and `NAME/high`."""
        raise NotImplementedError

    def prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        """Prompts from the first held-out rows that the model completes for inspection; by default none. The answer of
        a prompt is shown next to the completion. `eval.samples` bounds their number."""
        return []


def trained_sum(paths: Sequence[Trajectory], columns: Sequence[Floats]) -> float:
    """The sum over the trained tokens of some paths, each with its column [T]."""
    total = 0.0
    for path, column in zip(paths, columns, strict=True):
        total += float(column[path.in_loss].sum(dtype=np.float64))
    return total
