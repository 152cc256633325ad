"""Observers: one that fails is switched off."""

import pytest

from proxima.runtime.watch.observer import Observer, Tee


class Listener(Observer):
    def __init__(self, fails_in=None):
        self.fails_in, self.heard = fails_in, []

    def _hear(self, event, *facts):
        self.heard.append((event, *facts))
        if event == self.fails_in:
            raise RuntimeError("no paper")

    def step(self, record):
        self._hear("step", record["step"])

    def warning(self, text):
        self._hear("warning", text)

    def finished(self, summary):
        self._hear("finished", summary["status"])


def test_a_failing_observer_is_switched_off_and_the_others_hear_of_it():
    bad, good = Listener(fails_in="step"), Listener()
    tee = Tee(bad, good)
    for step in (1, 2):
        tee.step({"step": step})
    tee.progress("train", 1, 2, "tokens")
    tee.finished({"status": "done"})
    assert bad.heard == [("step", 1)]
    text = "Listener failed in step (RuntimeError: no paper) and is disabled; the run continues"
    assert good.heard == [("warning", text), ("step", 1), ("step", 2), ("finished", "done")]


def test_all_observers_failing_fails_nothing():
    first, second = Listener("step"), Listener("warning")
    tee = Tee(first, second)
    tee.step({"step": 1})
    tee.step({"step": 2})
    assert first.heard == [("step", 1)]
    assert [event for event, *_ in second.heard] == ["warning", "step"]  # it fails in that of the first, and ends here


def test_ctrl_c_goes_through():
    class Impatient(Observer):
        def step(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tee(Impatient()).step({"step": 1})
