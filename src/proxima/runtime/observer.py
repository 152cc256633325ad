"""Who watches a run: the loop tells an `Observer` what happens and knows nothing of terminals, files or browsers.

Records are the dictionaries that metrics.jsonl holds, with the same keys. An observer must not fail the run: `Tee`
takes a failing one out and says so through the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Stage = Literal["load", "generate", "score", "train", "evaluate", "checkpoint"]
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What the first lines of a run say.

    Args:
        version: of proxima.
        algorithm: the preset's name, or the surrogate's kind.
        model: name or last folder of the path.
        parameters: how many the model has; 0 if unknown.
        device, threads, dtype: where and in which dtype the forward is computed.
        seed: the run's seed.
        folder: the run folder.
        steps: steps of the whole run.
        resumed_at: the step that was finished when this process took the run up; 0 for a new run.
        prompts, completions: prompts a step, and completions a prompt.
        kept: completions of a prompt that pruning leaves; None: all.
        at_once: prompts of a generation batch under dynamic sampling; 0: as many as it takes; None: no dynamic
            sampling.
        tokens_per_micro_batch: the token budget of one forward.
        micro_batches: how many a step is expected to need; 0 if unknown.
        updates: optimizer updates a step (updates_per_step × epochs_per_step).
        questions: held-out questions of an evaluation; 0 for none.
    """

    version: str
    algorithm: str
    model: str
    seed: int
    folder: Path
    steps: int
    prompts: int
    completions: int
    kept: int | None = None
    at_once: int | None = None
    updates: int = 1
    tokens_per_micro_batch: int = 0
    micro_batches: int = 0
    parameters: int = 0
    device: str = "cpu"
    threads: int = 0
    dtype: str = "float32"
    resumed_at: int = 0
    questions: int = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of a step, to be shown: the question, what the policy wrote, what it should have said, and what it
    got."""

    question: str
    text: str
    answer: Any = None
    reward: float | None = None  # None: the score is invalid
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class Observer(Protocol):
    """Told in order: `started`, then `progress`, `evaluated`, `step` and `warning` as they come, then `finished` (also
    after a failure).

    `progress` and `warning` may come before `started`, while the model is loaded; when that fails nothing else comes.
    """

    def started(self, info: RunInfo) -> None:
        """The run begins, or goes on (`info.resumed_at`)."""
        ...

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        """Within a step or an evaluation: `done` of `total` `unit` (completions, tokens, micro-batches). Cheap; may
        come often."""
        ...

    def evaluated(self, record: Record) -> None:
        """An evaluation ended; `record` is its line of metrics.jsonl (kind `eval`)."""
        ...

    def step(self, record: Record, sample: Sample | None) -> None:
        """A step ended; `record` is its line of metrics.jsonl (kind `train`)."""
        ...

    def warning(self, text: str) -> None:
        """Something that matters for the result: what it means and what to do, in one line."""
        ...

    def finished(self, summary: Record) -> None:
        """The run ended; `summary` is what summary.json holds."""
        ...


class NullObserver:
    """Watches nothing."""

    def started(self, info: RunInfo) -> None: ...

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None: ...

    def evaluated(self, record: Record) -> None: ...

    def step(self, record: Record, sample: Sample | None) -> None: ...

    def warning(self, text: str) -> None: ...

    def finished(self, summary: Record) -> None: ...


class Tee:
    """Tells several observers, in order. One that raises is told nothing more; the others get a warning. Ctrl-C passes
    through."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def started(self, info: RunInfo) -> None:
        self._tell("started", info)

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        self._tell("progress", stage, done, total, unit)

    def evaluated(self, record: Record) -> None:
        self._tell("evaluated", record)

    def step(self, record: Record, sample: Sample | None) -> None:
        self._tell("step", record, sample)

    def warning(self, text: str) -> None:
        self._tell("warning", text)

    def finished(self, summary: Record) -> None:
        self._tell("finished", summary)

    def _tell(self, event: str, *facts: Any) -> None:
        for observer in list(self._observers):
            try:
                getattr(observer, event)(*facts)
            except Exception as error:
                self._observers.remove(observer)
                name = type(observer).__name__
                self.warning(
                    f"{name} failed in {event} ({type(error).__name__}: {error}) and is switched off; the run goes on"
                )
