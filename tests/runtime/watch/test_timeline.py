"""timeline.json: what both viewers accept, what is in it, and what a kill, a resume, a cap or a full disk leave."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from proxima.runtime.state.folder import RunFolder
from proxima.runtime.watch import timeline as timeline_module
from proxima.runtime.watch.activity import Activity
from proxima.runtime.watch.timeline import ENGINE, TRAINER, Timeline, rewind_timeline
from tests.manual_clock import ManualClock
from tests.runtime.interruptions import interrupt
from tests.runtime.loop.test_controller import World
from tests.runtime.tiny_run import NO_EVAL, go, recipe


def events(path, *, closed=True):
    """The events; the viewers add the bracket to an array that does not end."""
    text = path.read_text()
    assert text.endswith("\n]\n") == closed
    return json.loads(text if closed else text + "]")


def spans(timeline, lane=None, name=""):
    whole = (e for e in timeline if e["ph"] == "X" and e["name"].startswith(name))
    return [e for e in whole if lane is None or (e["pid"], e["tid"]) == lane]


def assert_nested(timeline):
    """On a lane, two spans follow each other or one holds the other: all that the format allows."""
    lanes = defaultdict(list)
    for event in spans(timeline):
        lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for lane in lanes.values():
        open_ends = []
        for start, negative in sorted(lane):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or start - negative <= open_ends[-1]
            open_ends.append(start - negative)


def steps(timeline):
    return [event["args"]["step"] for event in spans(timeline, TRAINER, "step")]


@pytest.mark.slow
def test_the_stages_of_each_step_and_the_life_of_each_prompt(tmp_path):
    world = World(tmp_path / "run", "checkpoint.every=1", engine={"seconds": 2.0}, evaluation=True)
    world.run()
    timeline = events(world.folder.timeline)
    assert_nested(timeline)
    second = 1_000_000
    shown = [f"{e['name']} {e['ts'] / second:g}+{e['dur'] / second:g}" for e in spans(timeline, TRAINER) if e["dur"]]
    first = ["evaluate 0+2", "generate 2+2", "publish 4+0.5", "step 2+2.5"]
    assert shown == [*first, "generate 4.5+2", "publish 6.5+0.5", "step 4.5+2.5", "evaluate 7+2"]
    names = {e["name"] for e in spans(timeline, TRAINER)}
    assert steps(timeline) == [1, 2] and {"train", "write", "checkpoint"} <= names
    assert [(e["ts"] / second, e["dur"] / second) for e in spans(timeline, ENGINE)] == [(2, 2), (4.5, 2)]
    for uid in range(6):
        outer, *parts = [e for e in spans(timeline) if e.get("args", {}).get("prompt") == uid]
        assert outer["name"] == f"prompt {uid}" and [e["name"] for e in parts] == ["generating", "scoring", "queued"]
        assert parts[0]["ts"] == outer["ts"] and sum(e["dur"] for e in parts) == outer["dur"]
        assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(parts))
        assert {(e["pid"], e["tid"]) for e in parts} == {(2, uid % 3 + 1)}  # the lanes of the step before are free
    published = [(e["name"], e["ts"] / second) for e in timeline if e["ph"] == "i"]
    assert published == [("weights 0", 0), ("weights 1", 4.5), ("weights 2", 7)]
    counted = [tuple(e["args"].values()) for e in timeline if e["ph"] == "C"]
    assert counted == [(3, 0), (2, 1), (1, 2), (0, 3), (0, 0)] * 2
    names = {e["args"]["name"] for e in timeline if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"run", "prompts", "trainer", "engine", "rewards", "lane 1", "lane 2", "lane 3"}


def test_prompts_that_overlap_get_lanes_of_their_own(tmp_path):
    clock = ManualClock()
    activity = Activity(clock, 0.0, Timeline(tmp_path / "timeline.json", print))
    for uid in range(3):
        activity.enqueued([uid])
        clock.advance(1)
    activity.generated(1)
    assert list(activity.generating) == [0, 2] and list(activity.scoring) == [1]
    activity.scored(1)
    clock.advance(1)
    activity.taken([1])
    activity.enqueued([3])  # lane 2 is free again
    clock.advance(1)
    activity.scored(9)  # from a checkpoint
    for uid in (0, 2, 3):
        activity.generated(uid)
        clock.advance(1)
        activity.scored(uid)
    activity.taken([0, 2, 3, 9, 77])
    activity.timeline.close()
    timeline = events(tmp_path / "timeline.json")
    assert_nested(timeline)
    lanes = {e["name"]: e["tid"] for e in spans(timeline, name="prompt ")}
    assert lanes == {"prompt 0": 1, "prompt 1": 2, "prompt 2": 3, "prompt 3": 2, "prompt 9": 4}
    assert [(e["ts"], e["dur"]) for e in spans(timeline, ENGINE)] == [(0, 7_000_000)]


def test_a_killed_run_leaves_an_array_that_continues(tmp_path):
    path = tmp_path / "timeline.json"
    first = Timeline(path, print)
    first.span("step", 0.0, 1.0, TRAINER, step=1)
    first.span("step", 1.0, 2.5, TRAINER, step=2)
    first.flush()
    assert steps(events(path, closed=False)) == [1, 2]
    path.write_text(path.read_text() + ',\n{"name":"step","ph":"X","ts":25')  # torn
    rewind_timeline(path, 2.0)
    again = Timeline(path, print)
    again.span("step", 2.0, 3.0, TRAINER, step=2)
    again.close()
    timeline = events(path)
    assert [(e["args"]["step"], e["ts"]) for e in spans(timeline)] == [(1, 0), (2, 2_000_000)]
    rewind_timeline(path, 3.0)
    assert steps(events(path, closed=False)) == [1, 2]
    assert sum(e["name"] == "thread_name" for e in events(path, closed=False)) == 1
    rewind_timeline(path, 0.0)
    assert not path.exists()


@pytest.mark.slow
def test_a_resume_doubles_no_step(tmp_path, tiny_model):
    few = {"train__prompts_per_step": 2, "train__completions_per_prompt": 2}
    tree = recipe(tiny_model("llama"), checkpoint__every=2, train__steps=4, eval__every=0, **few)
    folder = RunFolder(tmp_path / "run")
    interrupt(go, folder.path, tree, "after step 3")
    assert steps(events(folder.timeline)) == [1, 2, 3]
    go(folder.path, tree, resume=True)
    timeline = events(folder.timeline)
    assert steps(timeline) == [1, 2, 3, 4] and [e["name"] for e in timeline if e["ph"] == "i"].count("resumed") == 1
    assert [e["args"]["step"] for e in spans(timeline, TRAINER, "evaluate")] == [0, 4]
    assert_nested(timeline)
    lives = [e["name"] for e in spans(timeline, name="prompt ")]
    assert len(lives) == len(set(lives)) == 8
    go(folder.path, tree, resume=True)  # nothing is left to do
    assert steps(events(folder.timeline)) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_that_generates_asynchronously(tmp_path, tiny_model):
    tree = recipe(tiny_model("llama"), runtime__max_concurrent_rollouts=6, **NO_EVAL, train__steps=4)
    go(tmp_path / "run", tree)
    timeline = events(tmp_path / "run" / "timeline.json")
    assert_nested(timeline)
    assert steps(timeline) == [1, 2, 3, 4]
    lives = spans(timeline, name="prompt ")
    assert {e["args"]["prompt"] for e in lives} == set(range(16)) and len(lives) == 16
    updates = [e for e in spans(timeline, TRAINER, "train") if e["dur"]]
    beside = [e for e in lives if any(e["ts"] < u["ts"] < e["ts"] + e["dur"] for u in updates)]
    assert beside  # in the picture, too


@pytest.mark.slow
def test_training_on_a_fixed_data_set_has_one_too(runs):
    timeline = events(runs.finished("sft") / "timeline.json")
    assert_nested(timeline)
    names = {e["name"] for e in spans(timeline, TRAINER)}
    assert {"step", "train", "evaluate", "checkpoint", "prepare"} <= names and not spans(timeline, name="prompt")


@pytest.mark.slow
def test_a_long_run_leaves_out_single_prompts_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "MOST_BYTES", 4000)
    world = World(tmp_path / "run", "train.steps=4")
    world.run()
    timeline = events(world.folder.timeline)
    assert steps(timeline) == [1, 2, 3, 4]
    written = {e["args"]["prompt"] for e in spans(timeline, name="prompt ")}
    assert 3 <= len(written) < 12 and written == set(range(len(written)))
    left_out = [e["name"] for e in timeline if e["ph"] == "i" and "left out" in e["name"]]
    assert left_out == ["prompts are left out from here on"]
    assert sum("no longer single prompts" in text for text in world.observer.warnings) == 1


def test_a_full_disk_ends_the_timeline_and_not_the_run(tmp_path):
    world = World(tmp_path / "run")
    world.folder.timeline.mkdir()  # can't be written
    assert world.run() is True and world.journal.step == 2
    assert sum("timeline.json ends here" in text for text in world.observer.warnings) == 1
