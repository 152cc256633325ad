"""The last steps of timeline.json as the viewer draws them: what works, what waits, and the stage of each prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.runtime.watch.timeline import (
    ENGINE,
    EPISODES,
    PROCESSES,
    REWARDS,
    TRAINER,
    Lane,
    TimelineSpan,
    timeline_spans,
    union,
)

STEPS, MOST_SPANS, MOST_LANES = 6, 4000, 10  # steps and spans drawn; lanes of prompts and of episodes
ENVIRONMENTS = Lane(1, 4)  # while some episode waits for its environment; derived, not in the file
NAMES = {TRAINER: "trainer", ENGINE: "engine", ENVIRONMENTS: "environments", REWARDS: "rewards"}


def last_stages(file: Path) -> list[dict[str, Any]] | None:
    """Return the spans of the last steps, lane by lane: process, activity, start and end in seconds of the run; None
    without the file."""
    if not file.is_file():
        return None
    every = list(timeline_spans(file))
    starts = [span.start for span in every if span.name == "step"]
    begin = starts[-STEPS:][0] if starts else 0.0
    last = [span._replace(start=max(span.start, begin)) for span in every if span.end > begin][-MOST_SPANS:]
    leaves = with_environments([span for span in last if not span.name.startswith(("prompt ", "episode "))])
    return [
        {
            "name": span.name,
            "process": NAMES.get(span.lane) or PROCESSES.get(span.lane.process, "").removesuffix("s"),
            "thread": "" if span.lane in NAMES else span.lane.thread,
            "start": span.start,
            "end": span.end,
            "facts": span.facts,
        }
        for span in sorted((span for span in leaves if span.lane.thread <= MOST_LANES), key=_place)
    ]


def _place(span: TimelineSpan) -> tuple[int, int]:
    """Sort key: the stages first, in the order of `NAMES`, then episodes, then prompts."""
    return (0, list(NAMES).index(span.lane)) if span.lane in NAMES else (-span.lane.process + 9, span.lane.thread)


def with_environments(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Add a lane for the times in which some episode waits for its environment. With episodes, the engine's lane shows
    the times in which one of them waits for a turn, rather than the whole time of a prompt."""
    played = [span for span in spans if span.lane.process == EPISODES]
    if not played:
        return [*spans]
    lanes = {"turn": ENGINE, "environment": ENVIRONMENTS}
    busy = [
        TimelineSpan(name, lane, start, end, {})
        for name, lane in lanes.items()
        for start, end in union((span.start, span.end) for span in played if span.name == name)
    ]
    return [*(span for span in spans if span.lane != ENGINE), *busy]
