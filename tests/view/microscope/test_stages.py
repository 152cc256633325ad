"""The last steps of timeline.json, lane by lane, also of a file that a kill tore."""

from proxima.data.episode import EpisodeLife
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.timeline import ENGINE, TRAINER, Lane, Timeline, TimelineSpan, timeline_spans
from proxima.view.microscope.trend import last_stages
from tests.manual_clock import ManualClock


def written(path, steps=8, closed=True):
    """Steps of 4 s: 1 s of generation, 2 s of training, 1 s between."""
    timeline = Timeline(path, print)
    for step in range(1, steps + 1):
        at = 4.0 * step
        timeline.span("generate", at, at + 1, TRAINER)
        timeline.span("generating", at, at + 1, ENGINE)
        timeline.span("prompt 1", at, at + 1, Lane(2, 1), prompt=1)
        timeline.span("generating", at, at + 0.5, Lane(2, 1), prompt=1)
        timeline.span("queued", at + 0.5, at + 1, Lane(2, 1), prompt=1)
        timeline.span("train", at + 1, at + 3, TRAINER)
        timeline.span("step", at, at + 3, TRAINER, step=step)
    timeline.close() if closed else timeline.flush()
    return path


def test_the_spans_of_a_torn_file(tmp_path):
    file = written(tmp_path / "timeline.json", steps=1, closed=False)
    with file.open("a") as text:
        text.write(',\n{"ph":"X","name":"no time"},\n17,\n{"name":"tra')
    spans = list(timeline_spans(file))
    assert len(spans) == 7 and spans[0] == TimelineSpan("generate", TRAINER, 4.0, 5.0, {})


def test_the_last_six_steps_lane_by_lane(tmp_path):
    spans = last_stages(written(tmp_path / "timeline.json"))
    assert (min(span["start"] for span in spans), max(span["end"] for span in spans)) == (12.0, 35.0)
    lanes = list(dict.fromkeys((span["process"], span["thread"]) for span in spans))
    assert lanes == [("trainer", ""), ("engine", ""), ("prompt", 1)]
    assert sum(span["name"] == "step" for span in spans) == 6
    none = tmp_path / "none.json"
    none.write_text("[")
    assert last_stages(none) == []


def test_episodes_have_lanes_and_their_environments_one_beside_the_engine(tmp_path):
    """Two episodes: turns 0–1 and 2–3 of the one, 0–2 of the other, whose environment takes 2–3.25:
    then it waits for a worker."""
    timeline = Timeline(tmp_path / "timeline.json", print)
    activity = Activity(ManualClock(), 0.0, timeline)
    timeline.span("step", 0.0, 4.0, TRAINER, step=1)
    timeline.span("generating", 0.0, 4.0, ENGINE)
    activity.played(EpisodeLife(7, 0, 0.0, 3.0, [(0.0, 1.0), (2.0, 3.0)]))
    activity.played(EpisodeLife(7, 1, 0.0, 3.5, [(0.0, 2.0)], [(3.0, 3.0), (3.25, 3.5)]))
    activity.played(EpisodeLife(8, 0, 3.125, 3.375, [(3.25, 3.375)]))  # on the lane of the first
    timeline.close()
    spans = last_stages(tmp_path / "timeline.json")
    moments = {
        lane: [(s["start"], s["end"]) for s in spans if s["process"] == lane] for lane in ("engine", "environments")
    }
    assert moments == {"engine": [(0.0, 3.0), (3.25, 3.375)], "environments": [(1.0, 3.25)]}
    own = [
        (s["name"], s["start"], s["end"], s["facts"].get("turn"))
        for s in spans
        if (s["process"], s["thread"]) == ("episode", 1)
    ]
    assert own[:3] == [("turn", 0.0, 1.0, 0), ("environment", 1.0, 2.0, None), ("turn", 2.0, 3.0, 1)]
    assert own[3:] == [("environment", 3.125, 3.25, None), ("turn", 3.25, 3.375, 0)]
