"""The picture of timeline.json: which steps, which spans where, also of a file that a kill tore; and in the report."""

import re

from proxima.data.episode import EpisodeLife
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.timeline import ENGINE, EPISODES, TRAINER, Lane, Timeline, TimelineSpan, timeline_spans
from proxima.view.chart import svg_file
from proxima.view.report import write_report
from proxima.view.timeline_plot import NAMES, TimelineFigure, timeline_of_run
from tests.view.synthetic import make_run
from tests.view.test_report import Page


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


def test_the_steps_of_the_picture(tmp_path):
    file = written(tmp_path / "timeline.json")
    figure = TimelineFigure.of(file, "mine")
    assert figure.title == "steps 3 to 8 of mine" and (figure.begin, figure.end) == (12.0, 35.0)
    two = timeline_of_run(file, "mine", "2:3")
    assert [n for n, _ in two.steps] == [2, 3] and {s.start for s in two.spans} == {8.0, 8.5, 9.0, 12.0, 12.5, 13.0}
    assert [(name, size) for _, name, size in two.rows] == [("trainer", 26), ("engine", 26), ("prompts", 7)]
    assert [n for n, _ in timeline_of_run(file, "mine", "7").steps] == [7]


def test_episodes_have_lanes_and_their_environments_one_beside_the_engine(tmp_path):
    """Two episodes: turns 0–1 and 2–3 of the one, 0–2 of the other, whose environment takes 2–3.5."""
    timeline = Timeline(tmp_path / "timeline.json", print)
    activity = Activity(Stopped(), 0.0, timeline)
    timeline.span("step", 0.0, 4.0, TRAINER, step=1)
    timeline.span("generating", 0.0, 4.0, ENGINE)
    activity.played(EpisodeLife(7, 0, 0.0, 3.0, [(0.0, 1.0), (2.0, 3.0)]))
    activity.played(EpisodeLife(7, 1, 0.0, 3.5, [(0.0, 2.0)]))
    activity.played(EpisodeLife(8, 0, 3.125, 3.375, [(3.25, 3.375)]))  # on the lane of the first
    timeline.close()
    figure = TimelineFigure.of(tmp_path / "timeline.json", "played")
    rows = [("engine", 26), ("environments", 26), ("episodes", 7), ("", 7)]
    assert [(name, size) for _, name, size in figure.rows] == rows
    moments = {name: [(s.start, s.end) for s in figure.spans if NAMES.get(s.lane) == name] for name in NAMES.values()}
    assert moments["engine"] == [(0.0, 3.0), (3.25, 3.375)] and moments["environments"] == [(1.0, 3.5)]
    own = [(s.name, s.start, s.end, s.facts.get("turn")) for s in figure.spans if s.lane == Lane(EPISODES, 1)]
    assert own[:3] == [("turn", 0.0, 1.0, 0), ("environment", 1.0, 2.0, None), ("turn", 2.0, 3.0, 1)]
    assert own[3:] == [("environment", 3.125, 3.25, None), ("turn", 3.25, 3.375, 0)]
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg_file(figure))
    assert {"engine", "environments", "episodes", "environment"} <= set(words)


class Stopped:
    """A clock at 0."""

    def now(self):
        return 0.0


def test_the_picture_needs_nothing_else(tmp_path):
    svg = svg_file(timeline_of_run(written(tmp_path / "timeline.json"), "a<b>", "2:3"))
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "") and "prefers-color-scheme: dark" in svg
    assert "a&lt;b&gt;" in svg and "<b>" not in svg
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"trainer", "engine", "prompts", "step 2", "step 3", "generate", "train", "queued"} <= set(words)
    # a rectangle for each span: 2 steps of generate, train, generating, and generating and queued of the prompt
    assert len(re.findall(r'<path d="[^"]*z" clip-path="[^"]*" style="fill', svg)) == 10


def test_it_is_in_the_report(tmp_path, undrawn):
    folder = make_run(tmp_path / "run", steps=2)
    assert "Steps 1 to 2" not in Page(write_report(folder.path)).words
    written(folder.timeline, steps=2, closed=False)
    assert "Steps 1 to 2 who works and who waits" in Page(write_report(folder.path)).words
