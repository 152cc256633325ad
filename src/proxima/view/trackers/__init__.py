"""Trackers: a run's config, metrics, evaluations and summary in another tool, `monitor: [wandb, tensorboard]`.

    protocol.py           the tracker interface      tracker_observer.py   a thread per tracker that passes on records
    trackio.py, wandb.py, tensorboard.py, mlflow.py  one tool each; its package is imported when a run names it
If a tracker raises, hangs or is slow, the only consequence for the run is a warning. The tracker's id of the run and
the last step logged are stored in the run folder (trackers/NAME.json), so that a resume continues there and logs no
step twice.
Imports: the tools; `data`, `config`, `experiments`, `runtime`. Imported by `view`, and by the config through
`TRACKERS`.
To add one: a file with the spec, a line in `TRACKERS`, an extra in pyproject.toml, docs/view.md, and a test in
`tests/view/trackers` that reads the tool's data back. Out of tree: `monitor: [my_pkg.trackers:Mine]`.
"""

from proxima.data.kinds import Kinds

TRACKERS = Kinds(
    {
        "mlflow": "proxima.view.trackers.mlflow:Mlflow",
        "tensorboard": "proxima.view.trackers.tensorboard:TensorBoard",
        "trackio": "proxima.view.trackers.trackio:Trackio",
        "wandb": "proxima.view.trackers.wandb:Wandb",
    }
)

__all__ = ["TRACKERS"]
