"""An episode on the timeline: its turns, and its environment between them."""

from proxima.data.episode import EpisodeLife
from proxima.runtime.watch.timeline import EPISODES, Lane, Timeline


def write_episode(timeline: Timeline, life: EpisodeLife, start: float, lanes: list[float]) -> None:
    """Write the spans of an episode that has ended, of a run that began at `start` of the clock.

    Args:
        lanes: until when each lane has an episode, in seconds of the run; the first one that is free gets this one.
    """
    begin, end = life.begin - start, life.end - start
    number = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
    lanes[number : number + 1] = [end]
    lane, facts = Lane(EPISODES, number + 1), {"prompt": life.uid, "sample": life.sample}
    timeline.span(f"episode {life.uid}.{life.sample}", begin, end, lane, **facts)
    at = begin
    for turn, moments in enumerate(sorted(life.turns)):
        asked, answered = (max(at, moment - start) for moment in moments)  # agents may ask several at once
        if asked > at:
            timeline.span("environment", at, asked, lane, **facts)
        timeline.span("turn", asked, answered, lane, **facts, turn=turn)
        at = answered
    if end > at:
        timeline.span("environment", at, end, lane, **facts)
