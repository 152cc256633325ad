"""Says through the others, once the run has begun, what was odd about its config."""

from collections.abc import Sequence

from proxima.runtime.observer import NullObserver, Observer, RunInfo


class Reminder(NullObserver):
    """Tells `observer` the `remarks` as warnings, so that they stand in the log too. `began` says whether the run has
    begun."""

    def __init__(self, observer: Observer, remarks: Sequence[str]) -> None:
        self.observer, self.remarks, self.began = observer, remarks, False

    def started(self, info: RunInfo) -> None:
        self.began = True
        for remark in self.remarks:
            self.observer.warning(remark)
