"""Collects the reports of an engine during a run: weight syncs, and servers that join or fail."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from proxima.data import UserError
from proxima.engine.http.client import ServerError
from proxima.engine.protocol import Engine, Health

RESUME = "repair the engine and resume (--resume)"


class EngineWatch:
    """Reads `Health.detail`: `sync` (figures of the last publish), `replicas` (counts since the start), `events` (lines
    for the user since the start), `log` (where to look, if not in the engine's log in the run folder, whose name is
    `log` here), `exits` (how often the process has exited) and `exit_reason` (of the last exit). `metrics` are those of
    the present step, whose beginning clears them.
    """

    def __init__(self, log: str) -> None:
        self.log = log
        self.metrics: dict[str, float] = {}
        self._exits = self._seen = 0
        self._counts: dict[str, float] = {}

    async def published(self, engine: Engine, version: int) -> dict[str, Any]:
        """The measurements of the engine at a weight sync: numbers under `sync/` and `version`; empty for an engine
        that measures nothing."""
        sync = (await engine.health()).detail.get("sync") or {}
        self.metrics |= {f"sync/{name}": value for name, value in _numbers(sync).items()}
        return {"version": version, **self.metrics} if sync else {}

    def health_warnings(self, health: Health) -> list[str]:
        """Warnings about what has happened since the last call, even if it only cost time and no completion."""
        detail = health.detail
        warnings, events = list[str](), detail.get("events") or ()
        exits = int(detail.get("exits", 0))
        if (more := exits - self._exits) > 0:
            times = "once" if more == 1 else f"{more} times"
            reason = f" ({detail['exit_reason']})" if detail.get("exit_reason") else ""
            ended = f"the engine's process ended {times} and was replaced{reason}"
            warnings.append(f"{ended}; what it had not finished is generated again. See {self.log}")
        self._exits = max(self._exits, exits)
        warnings += map(str, events[self._seen :])
        self._seen = max(self._seen, len(events))
        counts = {f"replicas/{name}": value for name, value in _numbers(detail.get("replicas") or {}).items()}
        grown = {key: value - self._counts.get(key, 0) for key, value in counts.items()}
        self._counts = counts
        for key, value in counts.items():
            now = key in ("replicas/ready", "replicas/of")
            self.metrics[key] = value if now else self.metrics.get(key, 0.0) + grown[key]
        if (lost := grown.get("replicas/lost", 0)) > 0:
            text = "1 server response was" if lost == 1 else f"{lost:g} server responses were"
            warnings.append(f"{text} unusable, and requested again; see {detail.get('log') or self.log}")
        return warnings


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turn the error of a server, after all retries, into a `UserError`."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, ServerError):
            raise
        raise UserError(str(error), remedy=RESUME) from error


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers: NaN is a figure that was not measured."""
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
