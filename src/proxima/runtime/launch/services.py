"""Services that any object of a run may need: the folder, the observer, the clock, and the thread for tensor work."""

from dataclasses import dataclass

from proxima.model.compute_thread import ComputeThread
from proxima.runtime.state.store import RunStore
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer
from proxima.train.ranks import ALONE, Ranks


@dataclass(frozen=True)
class RunServices:
    """The journal and folder of a run, its compute thread, observer, clock, and training processes."""

    store: RunStore
    compute: ComputeThread
    observer: Observer
    clock: Clock
    ranks: Ranks = ALONE
