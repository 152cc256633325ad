"""MLflow: a tracking server, or a database on this machine."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxima.experiments.run_reader import flat
from proxima.runtime.watch.observer import Record
from proxima.view.trackers.protocol import TrackedRun, Tracker, without_time

LONGEST_VALUE = 500  # characters of a parameter, on every kind of server
PARAMETERS_AT_ONCE = 100  # of a call
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "untrained": "FAILED"}


@dataclass(frozen=True, kw_only=True)
class Mlflow(Tracker):
    """MLflow: a tracking server, or mlflow.db in the current folder; `mlflow ui` opens it.

    Args:
        project: the experiment.
        name: name of the run; null: that of the run folder.
        uri: address of the server or database; null: MLFLOW_TRACKING_URI, or mlflow's default.
    """

    project: str = "proxima"
    name: str | None = None
    uri: str | None = None

    package = "mlflow"

    def open(self, run: TrackedRun) -> "MlflowSession":
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):  # they log each table of a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri)
        if run.identity is not None:
            client.update_run(run.identity, status="RUNNING")
            return MlflowSession(client, client.get_run(run.identity).info)
        existing = client.get_experiment_by_name(self.project)
        if existing is None:
            experiment = client.create_experiment(self.project)
        else:
            experiment = existing.experiment_id
        opened = client.create_run(experiment, run_name=self.name or run.name).info
        parameters = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in flat(dict(run.config))]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            client.log_batch(opened.run_id, params=parameters[start : start + PARAMETERS_AT_ONCE])
        return MlflowSession(client, opened)


class MlflowSession:
    """An mlflow run."""

    def __init__(self, client: Any, run: Any) -> None:
        self.client = client
        self.identity = str(run.run_id)
        uri = str(client.tracking_uri)
        server = uri.startswith(("http://", "https://"))
        page = f"{uri.rstrip('/')}/#/experiments/{run.experiment_id}/runs/{run.run_id}"
        if server:
            self.link = page
        else:
            self.link = f"mlflow ui --backend-store-uri {uri}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = without_time(metrics)
        named = [(re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")), value) for name, value in values.items()]
        self.client.log_batch(self.identity, metrics=[Metric(name, value, now, step) for name, value in named])

    def finish(self, summary: Record) -> None:
        for name, value in flat(dict(summary)):
            self.client.set_tag(self.identity, f"summary.{name}", str(value))
        self.client.set_terminated(self.identity, STATUS[str(summary["status"])])
