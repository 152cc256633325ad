"""What `run_eval` reports while it runs."""

from collections.abc import Mapping
from typing import Any, Literal


class EvalObserver:
    """Ignores everything; override what is of interest."""

    def progress(self, stage: Literal["load", "evaluate"], done: int, total: int, unit: str) -> None:
        """Within the loading, or a suite: `done` of `total` `unit`. Called often: be fast."""

    def warning(self, text: str) -> None:
        """Something that affects the result: what it means and what to do, in one line."""

    def suite_started(self, name: str, questions: int, answers: int) -> None:
        """The model answers a suite next: `answers` completions to `questions` questions."""

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        """A suite is finished; `facts` is its part of result.json."""
