"""TensorBoard: event files in the run folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxima.runtime.watch.observer import Record
from proxima.view.trackers.protocol import TrackedRun, Tracker, TrackerSession


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Tracker):
    """TensorBoard: event files, in the run folder unless `folder` names another place.

    Args:
        folder: parent folder, with a subfolder named after each run; null: trackers/tensorboard in the run folder.
    """

    folder: str | None = None

    package = "tensorboard"

    def open(self, run: TrackedRun) -> "TensorBoardSession":
        if self.folder is None:
            place = run.folder / "tensorboard"
        else:
            place = Path(self.folder).expanduser() / run.name
        session = TensorBoardSession(place)
        if run.identity is None:
            session.write_text("config", run.config)
        return session


class TensorBoardSession(TrackerSession):
    """The event files of a run."""

    def __init__(self, place: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(place))
        self.identity = str(place)
        self.link = f"tensorboard --logdir {place}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def write_text(self, tag: str, facts: Mapping[str, object]) -> None:
        """Log nested facts as a block of JSON, on the text tab."""
        text = json.dumps(facts, indent=2, default=str).replace("\n", "\n    ")
        self.writer.add_text(tag, f"    {text}", 0)

    def finish(self, summary: Record) -> None:
        self.write_text("summary", summary)
        self.writer.close()
