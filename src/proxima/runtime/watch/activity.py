"""The current activity of a run: the stage of the loop, and the state of each prompt.

The stall watch reads it; what ends is written to the timeline.
"""

import heapq
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from proxima.data.episode import EpisodeLife
from proxima.data.flow import prompt_name
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.timeline import ENGINE, EPISODES, PROMPTS, REWARDS, TRAINER, Lane, Timeline


@dataclass
class PromptLife:
    """The times at which a prompt changed state, in seconds of the run; None: not yet."""

    lane: int
    enqueued: float
    generated: float | None = None
    scored: float | None = None


@dataclass
class RunningStage:
    """A running stage: its name, its start time, attributes of its span, such as the step, and its progress in words,
    which may be empty."""

    name: str
    since: float
    facts: dict[str, Any] = field(default_factory=dict)
    done: str = ""


class Activity:
    """Collects events of the loop and of the rollout, and writes those that have ended to the timeline. The run took
    `spent` seconds before this process."""

    def __init__(self, clock: Clock, spent: float, timeline: Timeline) -> None:
        self.clock = clock
        self.timeline = timeline
        self._start = clock.now() - spent
        self.stages: list[RunningStage] = []  # the innermost last
        self.generating: dict[int, float] = {}  # uid → since when; completions are missing
        self.scoring: dict[int, float] = {}  # likewise; rewards are missing
        self.moved_at = self.now()
        self._lives: dict[int, PromptLife] = {}  # of these, and of those that wait for their step
        self._free: list[int] = []  # lanes
        self._episode_lanes: list[float] = []  # until when each has an episode
        self._busy_since: dict[Lane, float] = {}
        self._counted = {"running": 0, "queue": 0}
        if spent:
            timeline.mark("resumed", self.now())

    def now(self) -> float:
        """Seconds since the run began, over all resumes."""
        return self.clock.now() - self._start

    def moved(self) -> float:
        """Note that something was finished just now; returns the time."""
        self.moved_at = self.now()
        return self.moved_at

    @contextmanager
    def stage(self, name: str, **facts: object) -> Iterator[None]:
        """A stage of the loop, within those that are running."""
        stage = RunningStage(name, self.moved(), facts)
        self.stages.append(stage)
        try:
            yield
        finally:
            self.stages.remove(stage)
            self.timeline.span(name, stage.since, self.moved(), TRAINER, **facts)
            self.timeline.flush()

    def advanced(self, done: int, total: int, unit: str) -> None:
        """Note how much of its work the innermost stage has done."""
        self.moved()
        self.stages[-1].done = f"{done:,} of {total:,} {unit}"

    def published(self, version: int) -> None:
        """Note that the engine has the weights `version`."""
        self.timeline.mark(f"weights {version}", self.moved(), version=version)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def enqueued(self, uids: Iterable[int]) -> None:
        """Note that the engine gets these prompts next."""
        at = self.moved()
        for uid in uids:
            lane = heapq.heappop(self._free) if self._free else len(self._lives) + 1
            self._lives[uid] = PromptLife(lane, at)
            self.generating[uid] = at
        self._changed(at)

    def generated(self, uid: int) -> None:
        """Note that all completions of the prompt have arrived."""
        at = self.moved()
        if self.generating.pop(uid, None) is not None:
            self._lives[uid].generated = at
            self.scoring[uid] = at
            self._changed(at)

    def scored(self, uid: int) -> None:
        """The scores are final: the group waits for its step. A prompt that was not enqueued came from elsewhere."""
        if uid not in self._lives:
            self.enqueued([uid])
        at = self.moved()
        self._lives[uid].scored = at
        self.generating.pop(uid, None)
        self.scoring.pop(uid, None)
        self._changed(at)

    def taken(self, uids: Iterable[int]) -> None:
        """A step has taken the groups, or dropped them."""
        at = self.moved()
        for uid in uids:
            life = self._lives.pop(uid, None)
            if life is not None:
                heapq.heappush(self._free, life.lane)
                if self.timeline.has_room(at):
                    self._write(uid, life, at)
        self._changed(at)

    def played(self, life: EpisodeLife) -> None:
        """Note an episode that has ended: its turns, and its environment between them."""
        if self.timeline.has_room(self.moved()):
            write_episode(self.timeline, life, self._start, self._episode_lanes)

    def _changed(self, at: float) -> None:
        self._mark_busy(ENGINE, "generating", at, busy=bool(self.generating))
        self._mark_busy(REWARDS, "scoring", at, busy=bool(self.scoring))
        running = len(self.generating) + len(self.scoring)
        counted = {"running": running, "queue": len(self._lives) - running}
        if counted != self._counted and self.timeline.has_room(at):
            self._counted = counted
            self.timeline.count("prompts", at, **counted)

    def _mark_busy(self, lane: Lane, name: str, at: float, *, busy: bool) -> None:
        """Begin or end the span of something that works now and then."""
        if busy:
            self._busy_since.setdefault(lane, at)
            return
        since = self._busy_since.pop(lane, None)
        if since is not None:
            self.timeline.span(name, since, at, lane)

    def _write(self, uid: int, life: PromptLife, end: float) -> None:
        lane = Lane(PROMPTS, life.lane)
        self.timeline.span(prompt_name(uid), life.enqueued, end, lane, prompt=uid)
        begin = life.enqueued
        for name, until in (("generating", life.generated), ("scoring", life.scored), ("queued", end)):
            if until is not None and life.generated is not None:
                self.timeline.span(name, begin, until, lane, prompt=uid)
                begin = until


def write_episode(timeline: Timeline, life: EpisodeLife, start: float, lanes: list[float]) -> None:
    """Write the spans of an episode that has ended: its turns, its waits for a place to play, and its environment
    between them. The run began at `start` of the clock.

    Args:
        lanes: until when each lane has an episode, in seconds of the run; the first one that is free gets this one.
    """
    begin = life.begin - start
    end = life.end - start
    number = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
    lanes[number : number + 1] = [end]
    lane = Lane(EPISODES, number + 1)
    facts = {"prompt": life.uid, "sample": life.sample}
    timeline.span(f"episode {life.uid}.{life.sample}", begin, end, lane, **facts)
    parts = list[tuple[float, float, str, dict[str, int]]]()
    for turn, (first, last) in enumerate(sorted(life.turns)):
        parts.append((first, last, "turn", {"turn": turn}))
    for first, last in life.queued:
        if last > first:
            parts.append((first, last, "queued", {}))
    at = begin
    for first, last, name, more in sorted(parts, key=itemgetter(0, 1)):
        # agents may request several at once
        waits = max(at, first - start)
        ends = max(at, last - start)
        if waits > at:
            timeline.span("environment", at, waits, lane, **facts)
        timeline.span(name, waits, ends, lane, **facts, **more)
        at = ends
    if end > at:
        timeline.span("environment", at, end, lane, **facts)
