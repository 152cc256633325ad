"""Services that any object of a run may need: the folder, the observer, and the thread for tensor work."""

from contextlib import ExitStack
from dataclasses import dataclass

from proxima.model.compute_thread import ComputeThread
from proxima.runtime.state.store import RunStore
from proxima.runtime.watch.observer import Observer


@dataclass(frozen=True)
class RunServices:
    """The journal and folder of a run, its compute thread and observer; what is `opened` is closed when it ends, the
    last first."""

    store: RunStore
    compute: ComputeThread
    observer: Observer
    opened: ExitStack
