"""A tracker of one's own, as a recipe names it: `tests.view.trackers.recorder:Recorder`."""

import builtins
import threading
from dataclasses import dataclass

from proxima.view.trackers.protocol import TrackedRun, Tracker

SESSIONS = []  # all that were opened
ANSWERS = threading.Event()  # what a tool that hangs waits for


@dataclass(frozen=True, kw_only=True)
class Recorder(Tracker):
    """Remembers what it is told; `fails` and `hangs` say in which call it does: open, log or finish."""

    fails: str = ""
    hangs: str = ""
    error: str = "ConnectionError"

    def open(self, run: TrackedRun) -> "RecorderSession":
        session = RecorderSession(self, run)
        session.behave("open")
        SESSIONS.append(session)
        return session


class RecorderSession:
    def __init__(self, spec, run):
        self.spec, self.run, self.identity, self.link = spec, run, run.identity or "42", "https://lab.example/42"
        self.logged, self.summary = [], None

    def behave(self, call):
        if self.spec.hangs == call:
            ANSWERS.wait()
        if self.spec.fails == call:
            raise getattr(builtins, self.spec.error)("no network")

    def log(self, metrics, step):
        self.behave("log")
        self.logged.append((step, metrics))

    def finish(self, summary):
        self.behave("finish")
        self.summary = summary
