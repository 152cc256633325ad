"""Trackio: Hugging Face's local-first tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxima.runtime.watch.observer import Record
from proxima.view.trackers.protocol import TrackedRun, Tracker, without_time


@dataclass(frozen=True, kw_only=True)
class Trackio(Tracker):
    """Trackio: a database on this machine, or a Hugging Face Space; `trackio show` opens it.

    Args:
        project: the project under which the dashboard lists the run.
        name: name of the run; null: that of the run folder.
        group: name under which several runs are grouped.
        space_id: `user/space` to log to; null: TRACKIO_SPACE_ID, or this machine (TRACKIO_DIR).
    """

    project: str = "proxima"
    name: str | None = None
    group: str | None = None
    space_id: str | None = None

    package = "trackio"

    def open(self, run: TrackedRun) -> "TrackioSession":
        import trackio

        for module in (trackio, trackio.run, trackio.utils):  # they print into the progress, with no option against it
            vars(module)["print"] = lambda *_, **__: None
        opened = trackio.init(
            project=self.project,
            name=run.identity or self.name or run.name,
            group=self.group,
            space_id=self.space_id,
            config=dict(run.config),
            resume="allow" if run.identity else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        space = None
        if self.space_id:
            space = f"https://huggingface.co/spaces/{self.space_id}"
        return TrackioSession(opened, space or f"trackio show --project {self.project}")


class TrackioSession:
    """A trackio run. It has no summary, so the summary's values are logged as `summary/…`."""

    def __init__(self, run: Any, link: str) -> None:
        self.run = run
        self.identity = str(run.name)
        self.link = link
        self.last = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(without_time(metrics), step=step)
        self.last = step

    def finish(self, summary: Record) -> None:
        facts = {f"summary/{name}": value for name, value in summary.items() if isinstance(value, str | int | float)}
        self.run.log(facts, step=self.last)
        self.run.finish()
