"""The figures of a step that the lines of a run and its live view show."""

from collections.abc import Callable
from typing import NamedTuple

from proxima.runtime.watch.observer import Record
from proxima.view.formatting import count, fixed, percent, rate


class StepFigure(NamedTuple):
    """A number of a step's record, and how it is written."""

    label: str
    key: str
    write: Callable[[float | None], str]
    width: int = 0  # of its column in the lines; 0: without a column, shown only if the step has recorded it

    def text(self, record: Record) -> str:
        return self.write(record.get(self.key))

    def is_recorded(self, record: Record) -> bool:
        return record.get(self.key) is not None


ROLLOUT_FIGURES = (  # of a step that generates what it trains on
    StepFigure("reward", "reward/mean", fixed, 5),
    StepFigure("length", "length/mean", lambda v: fixed(v, 1), 5),
    StepFigure("turns", "episode/turns/mean", lambda v: fixed(v, 1)),
    StepFigure("failed", "episode/failed", count),
    StepFigure("kl", "approx_kl", lambda v: fixed(v, 4), 6),
    StepFigure("masked", "masked_fraction", percent, 5),
    StepFigure("explained", "value/explained_variance", fixed),
    StepFigure("gen", "tokens_per_second/generate", rate, 9),
    StepFigure("train", "tokens_per_second/train", rate, 9),
)
ASYNC_FIGURES = (  # of one that generates during training
    StepFigure("queue", "async/queue", count),
    StepFigure("running", "async/running", count),
    StepFigure("oldest", "age/max", count),
    StepFigure("trainer idle", "idle/trainer", percent),
    StepFigure("engine idle", "idle/engine", percent),
)
EXAMPLE_FIGURES = (  # of one on a fixed data set
    StepFigure("loss", "loss", lambda v: fixed(v, 4), 6),
    StepFigure("accuracy", "accuracy", lambda v: fixed(v, 3)),
    StepFigure("grad norm", "grad_norm", lambda v: fixed(v, 3), 6),
    StepFigure("lr", "lr", lambda v: f"{v or 0:.2e}", 8),
    StepFigure("epoch", "epoch", lambda v: fixed(v, 3), 5),
    StepFigure("train", "tokens_per_second/train", rate, 9),
)
LIVE_FIGURES = (  # of a step that generates, in the live view alone
    StepFigure("accuracy", "accuracy", lambda v: fixed(v, 3)),
    StepFigure("entropy", "entropy/mean", lambda v: fixed(v, 3)),
    StepFigure("grad norm", "grad_norm", lambda v: fixed(v, 3)),
)


def step_figures(record: Record) -> tuple[StepFigure, ...]:
    """Return the figures of a step, by what it trains on."""
    if "examples" in record:
        return EXAMPLE_FIGURES
    return ROLLOUT_FIGURES + ASYNC_FIGURES if "async/queue" in record else ROLLOUT_FIGURES
