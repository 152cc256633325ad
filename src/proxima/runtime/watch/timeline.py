"""timeline.json: what happened when, as Chrome trace events. `proxima view` and the report draw it;
https://ui.perfetto.dev and chrome://tracing open it.

A JSON array of one event a line. Both viewers read an array that does not end, so the file of a killed run opens, too.
Events are complete spans (`X`) on lanes where they nest, marks (`i`), counters (`C`) and names (`M`), in microseconds
since the run began, over all resumes.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from proxima.data.json_reader import load_json
from proxima.system.atomic_files import write_atomic

MOST_BYTES = 64 * 2**20  # from here on the file has no prompts any more


class Lane(NamedTuple):
    """A line of the picture: a thread of a process, in the format's terms."""

    process: int
    thread: int


RUN = 1
PROMPTS = 2
EPISODES = 3
PROCESSES = {RUN: "run", PROMPTS: "prompts", EPISODES: "episodes"}
TRAINER = Lane(RUN, 1)
ENGINE = Lane(RUN, 2)
REWARDS = Lane(RUN, 3)
NAMES = {TRAINER: "trainer", ENGINE: "engine", REWARDS: "rewards"}


class Timeline:
    """Appends events to the file, which is created by the first one; events that it has are kept. What is written is on
    its way to the disk at each `flush`. A full disk ends the timeline, never the run. `warn` is called when the
    timeline ends, or leaves something out."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self.warn = warn
        self._waiting: list[str] = []
        self._named: set[Lane] = set()
        self._size = path.stat().st_size if path.exists() else 0
        self._ended = False
        self._full = self._size >= MOST_BYTES

    def span(self, name: str, start: float, end: float, lane: Lane, **facts: object) -> None:
        """Add an event from `start` to `end`, in seconds of the run. On a lane, spans nest or follow each other."""
        first = _microseconds(start)
        last = _microseconds(end)
        self._name(lane)
        self._add({"name": name, "ph": "X", "ts": first, "dur": last - first} | _place(lane) | _args(facts))

    def mark(self, name: str, at: float, **facts: object) -> None:
        """Add an event of the whole run at a moment."""
        self._add({"name": name, "ph": "i", "s": "p", "ts": _microseconds(at)} | _place(TRAINER) | _args(facts))

    def count(self, name: str, at: float, **values: int) -> None:
        """The values of counters from now on."""
        self._add({"name": name, "ph": "C", "ts": _microseconds(at)} | _place(Lane(PROMPTS, 0)) | {"args": values})

    def has_room(self, at: float) -> bool:
        """True if prompts are still written. The first time that they are not, a note goes to the file and a warning to
        the user."""
        if not self._full and self._size >= MOST_BYTES:
            self._full = True
            self.mark("prompts are left out from here on", at)
            self.warn(
                f"{self.path.name} has {MOST_BYTES // 2**20} MiB: from here on it records the stages of the steps, "
                "but no longer single prompts"
            )
        return not self._full

    def flush(self) -> None:
        """Append the events since the last flush."""
        if not self._waiting or self._ended:
            return
        events = ",\n".join(self._waiting)
        self._waiting = []
        before = ",\n" if self._size else "[\n"
        self._append(before + events)

    def close(self) -> None:
        """End the array: the file is plain JSON now."""
        self.flush()
        if self._size and not self._ended:
            self._append("\n]\n")
        self._ended = True

    def _append(self, text: str) -> None:
        try:
            with self.path.open("ab") as file:
                self._size += file.write(text.encode())
        except OSError as error:
            self._ended = True
            self.warn(f"{self.path.name} ends here ({error}); the run continues")

    def _name(self, lane: Lane) -> None:
        if lane in self._named:
            return
        self._named.add(lane)
        if lane.thread == 1:
            self._add(_metadata("process_name", lane, name=PROCESSES[lane.process]))
        self._add(_metadata("thread_name", lane, name=NAMES.get(lane, f"lane {lane.thread}")))
        self._add(_metadata("thread_sort_index", lane, sort_index=lane.thread))

    def _add(self, event: dict[str, Any]) -> None:
        if not self._ended:
            self._waiting.append(_encoded(event))


def rewind_timeline(path: Path, seconds: float) -> None:
    """Keep the events that had ended `seconds` after the run began, and open the array for more; 0 deletes the file."""
    kept = []
    if path.exists() and seconds > 0:
        for event in _events(path):
            if event.get("ts", 0) + event.get("dur", 0) <= 1e6 * seconds + 1:
                kept.append(_encoded(event))
    if kept:
        events = dict.fromkeys(kept)  # each resume names the lanes again
        write_atomic(path, "[\n" + ",\n".join(events))
    else:
        path.unlink(missing_ok=True)


class TimelineSpan(NamedTuple):
    """A span of the file, from `start` to `end` in seconds of the run."""

    name: str
    lane: Lane
    start: float
    end: float
    facts: dict[str, Any]


def timeline_spans(path: Path) -> Iterator[TimelineSpan]:
    """The spans in the order of the file, also of a run that was killed or has not ended."""
    for event in _events(path):
        with suppress(KeyError, TypeError):  # a damaged line
            start = event["ts"] / 1e6
            lane = Lane(event["pid"], event["tid"])
            yield TimelineSpan(event["name"], lane, start, start + event["dur"] / 1e6, event.get("args", {}))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals, ascending, those that touch as one."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Each event of the file, without incomplete and damaged ones."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                event = load_json(line.strip().removesuffix(","))
                if not isinstance(event, dict):
                    continue
                times = [event.get("ts", 0), event.get("dur", 0)]
                if all(isinstance(time, int | float) for time in times):
                    yield event


_encoded = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder for each event


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


def _place(lane: Lane) -> dict[str, int]:
    return {"pid": lane.process, "tid": lane.thread}


def _args(facts: dict[str, Any]) -> dict[str, Any]:
    if not facts:
        return {}
    return {"args": facts}


def _metadata(kind: str, lane: Lane, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M"} | _place(lane) | {"args": args}
