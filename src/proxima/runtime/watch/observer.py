"""The `Observer` of a run: the loop reports to it, and knows no terminals, files or browsers.

Records are the lines of metrics.jsonl as dictionaries. An observer must not fail the run: `Tee` drops a failing one and
warns through the others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal

from proxima.config.outcomes import Outcome
from proxima.data.flow import Group

Stage = Literal["check", "tokenize", "load", "prepare", "generate", "score", "train", "evaluate", "checkpoint"]
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts known at the start of a run."""

    version: str  # of proxima
    algorithm: str  # the preset's name, or the surrogate's kind; on a fixed data set the name of its family
    model: str  # name or last folder of the path
    seed: int
    folder: Path
    steps: int  # of the whole run
    composition: str  # of a step: from its prompts or examples to its updates, in words
    parameters: int = 0  # of the model; 0 if unknown
    adapter: int = 0  # parameters of the adapter, which alone is trained; 0: there is none
    device: str = "cpu"  # of the forward pass, as the next two
    threads: int = 0
    dtype: str = "float32"  # `bfloat16 autocast` where the weights have another
    resumed_at: int = 0  # the last finished step when this process resumed the run; 0 for a new run
    parts: tuple[str, ...] = ()  # of the data sets that the tasks read: `task = 448 of 500 rows; 52 are held out by …`
    replay_of: Path | None = None  # the folder of the run whose rollouts are trained on; None: they are generated
    chosen: Sequence[Outcome] = ()  # what the fields that the recipe leaves to the machine have become


class Observer:
    """Ignores everything; override what is of interest.

    Called in order: `started`, then `progress`, `evaluated`, `sampled`, `step` and `warning`, then `ending` and
    `finished` (also after a failure). All calls come from the thread of the event loop. `progress` and `warning` may
    come before `started`, while the model loads; if that fails, nothing else comes.
    """

    def started(self, info: RunInfo) -> None:
        """The run starts, or resumes (`info.resumed_at`)."""

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        """Within a step or an evaluation: `done` of `total` `unit` (completions, tokens …). Called often: be fast."""

    def evaluated(self, record: Record) -> None:
        """An evaluation is finished; `record` is its line of metrics.jsonl (kind `eval`)."""

    def sampled(self, groups: Sequence[Group]) -> None:
        """Unscored completions of held-out prompts, after the `evaluated` of training on a fixed data set."""

    def step(self, record: Record) -> None:
        """A step is finished; `record` is its line of metrics.jsonl (kind `train`)."""

    def synced(self, record: Record) -> None:
        """The engine has new weights, and has measured that it computes with them: `version`, `notes` (lines for the
        user) and `sync/` figures."""

    def warning(self, text: str) -> None:
        """Something that affects the result: what it means and what to do, in one line."""

    def lasting(self, text: str) -> None:
        """A warning about a state, repeated after each step in which it persists. Views print it from time to time."""
        self.warning(text)

    def ending(self) -> Mapping[str, str]:
        """The run has ended. Returns where it can be looked at, by name: URLs, paths, or commands, for summary.json."""
        return {}

    def warned(self) -> Sequence[Record]:
        """The warnings so far, for summary.json; see `WarningList`."""
        return ()

    def finished(self, summary: Record) -> None:
        """The run has ended; `summary` is the content of summary.json."""


class WarningList:
    """Warnings with the steps after which each came first and last. Those that differ only in their numbers are one."""

    MOST = 50

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}

    def add(self, text: str, step: int, times: int = 1, last: int | None = None) -> None:
        """The first `MOST` are kept; a later one of the same kind counts up `times`."""
        kind = warning_kind(text)
        if last is None:
            last = step
        record = self._records.get(kind)
        if record:
            record |= {"last": max(record["last"], last), "times": record["times"] + times}
        elif len(self._records) < self.MOST:
            self._records[kind] = {"step": step, "last": last, "text": text, "times": times}

    def records(self) -> list[dict[str, Any]]:
        """`step`, `last`, `text` and `times` of each, in the order in which they came."""
        return [dict(record) for record in self._records.values()]


def warning_kind(text: str) -> str:
    """The text without its numbers: the same for warnings that differ only in these."""
    return re.sub(r"\d[\d.,]*", "0", text)


class Tee(Observer):
    """Forwards to several observers, in order. One that raises is dropped and the others get a warning. A
    KeyboardInterrupt passes through."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def ending(self) -> Mapping[str, str]:
        every = dict[str, str]()
        for links in self._tell("ending"):
            every |= links
        return every

    def _tell(self, event: str, *facts: object) -> list[Any]:
        """Notify all, and return their answers."""
        answers = []
        for observer in list(self._observers):
            try:
                answers.append(getattr(observer, event)(*facts))
            except Exception as error:
                self._observers.remove(observer)
                failure = f"{type(observer).__name__} failed in {event} ({type(error).__name__}: {error})"
                self.warning(f"{failure} and is disabled; the run continues")
        return answers


for _event in ("started", "progress", "evaluated", "sampled", "step", "synced", "warning", "lasting", "finished"):
    setattr(Tee, _event, partialmethod(Tee._tell, _event))
