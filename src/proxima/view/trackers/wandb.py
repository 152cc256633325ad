"""Weights & Biases."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proxima.runtime.watch.observer import Record
from proxima.view.trackers.protocol import TrackedRun, Tracker
from proxima.view.trackers.tracker_observer import PATIENCE


@dataclass(frozen=True, kw_only=True)
class Wandb(Tracker):
    """Weights & Biases: its server, or offline in the run folder until `wandb sync`.

    Args:
        project: project of the run.
        entity: user or team; null: your default.
        name: name of the run; null: that of the run folder.
        group: name under which several runs are grouped.
        tags: tags by which runs can be filtered.
        mode: null: WANDB_MODE, or online.
    """

    project: str = "proxima"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None

    package = "wandb"

    def problem(self) -> str | None:
        missing = super().problem()
        if missing is not None:
            return missing
        if self._mode == "online" and not _has_key():  # wandb would ask for one in the middle of the run
            return "has no API key: run `wandb login`, set WANDB_API_KEY, or set mode: offline"
        return None

    @property
    def _mode(self) -> str:
        return self.mode or os.environ.get("WANDB_MODE") or "online"

    def open(self, run: TrackedRun) -> "WandbSession":
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, init_timeout=PATIENCE, finish_timeout=PATIENCE, finish_timeout_raises=True
        )
        opened = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            group=self.group,
            tags=self.tags,
            mode=self._mode,
            dir=run.folder,
            id=run.identity,
            resume="allow" if run.identity else None,
            config=dict(run.config),
            allow_val_change=True,  # a resume may have more steps
            reinit="create_new",
            settings=settings,
        )
        return WandbSession(opened, offline=self._mode == "offline")


def _has_key() -> bool:
    """Return True if wandb would find an API key; `wandb.login` would ask the server, which may not answer."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb
    from requests.utils import get_netrc_auth  # reads the file that `wandb login` writes

    return get_netrc_auth(str(wandb.setup().settings.base_url)) is not None


class WandbSession:
    """A wandb run."""

    def __init__(self, run: Any, *, offline: bool) -> None:
        self.run = run
        self.identity = str(run.id)
        if offline:
            self.link = f"wandb sync {Path(run.dir).parent}"
        else:
            self.link = str(run.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self, summary: Record) -> None:
        self.run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self.run.finish(exit_code=int(summary["status"] in ("failed", "untrained")))
