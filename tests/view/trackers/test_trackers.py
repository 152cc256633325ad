"""Trackers beside a run: what they get, and that they can't hurt it. Tools that aren't installed are skipped."""

import importlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import proxima
from proxima.view.trackers.mlflow import Mlflow
from proxima.view.trackers.tensorboard import TensorBoard
from proxima.view.trackers.tracker_observer import TrackerObserver
from proxima.view.trackers.trackio import Trackio
from proxima.view.trackers.wandb import Wandb
from tests.experiments.runs import answered, make_run, step
from tests.manual_clock import ManualClock
from tests.runtime import tiny_run
from tests.runtime.tiny_run import recipe
from tests.view.synthetic import info
from tests.view.trackers.read_back import READERS

RECORDER = "tests.view.trackers.recorder:Recorder"
recorder = importlib.import_module("tests.view.trackers.recorder")  # as the recipe imports it
DONE = {"status": "done", "steps": 3, "seconds": 9.0, "eval": {"after": {"accuracy": 0.5}}, "error": None}


@pytest.fixture(autouse=True)
def fresh():
    recorder.SESSIONS.clear()
    recorder.ANSWERS.clear()
    yield
    recorder.ANSWERS.set()


@pytest.fixture
def folder(tmp_path):
    """A run that has begun and recorded nothing."""
    return make_run(tmp_path / "mine", [], steps=3)


def track(folder, spec, records, *, status="done", patience=3000.0, opens=False):
    """Tell an observer of these records; its warnings, and the links. Status None: the run is killed. `opens`: it goes
    on only when the tool has opened the run."""
    warnings = []
    observer = TrackerObserver(spec, warnings.append, patience=patience)
    observer.started(info(folder, steps=3))
    while opens and not observer.link:
        time.sleep(0.001)
    with (folder / "metrics.jsonl").open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            observer.evaluated(record) if record["kind"] == "eval" else observer.step(record)
    links = observer.ending()
    if status is not None:
        observer.finished({**DONE, "status": status})
    return warnings, links


def test_what_a_tracker_gets(folder):
    records = [answered(0, 0.125, "before"), step(1), step(2, reward=None), answered(2, 0.25)]
    warnings, links = track(folder, recorder.Recorder(), records)
    (session,) = recorder.SESSIONS
    assert (warnings, links) == ([], {RECORDER: "https://lab.example/42"})
    assert (session.run.name, session.run.folder, session.run.identity) == ("mine", folder / "trackers", None)
    assert session.run.config["algorithm"]["surrogate"] == {"kind": "cppo"}
    assert [number for number, _ in session.logged] == [0, 1, 2, 2]
    evaluated, trained = session.logged[0][1], session.logged[1][1]
    assert evaluated == {"eval/time": 99.0, "eval/accuracy": 0.125, "eval/questions": 100.0, "eval/correct": 1.0}
    assert (trained["reward/mean"], trained["time/step"]) == (0.5, 2.0) and not {"kind", "step", "label"} & set(trained)
    assert "reward/mean" not in session.logged[2][1]  # null
    assert session.summary == DONE
    state = json.loads((folder / "trackers" / f"{RECORDER.replace(':', '.')}.json").read_text())
    assert state == {"identity": "42", "link": "https://lab.example/42", "logged": {"eval": 2, "train": 2}, "failed": 0}


def test_a_resume_continues_there_and_logs_no_step_twice(folder):
    track(folder, recorder.Recorder(), [step(1), answered(1, 0.25), step(2), step(3)], status=None)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")  # back to the checkpoint of step 1
    track(folder, recorder.Recorder(), [step(2), answered(2, 0.5), step(3), step(4)])
    first, again = recorder.SESSIONS
    assert again.run.identity == first.identity == "42"
    assert [number for number, _ in first.logged] == [1, 1, 2, 3]
    assert [number for number, _ in again.logged] == [2, 4]  # the evaluation of step 2, and the new step


@pytest.mark.parametrize("error", ["ConnectionError", "SystemExit", "KeyboardInterrupt"])
def test_a_tracker_that_fails_or_exits_is_one_warning_and_counted(folder, error):
    warnings, links = track(folder, recorder.Recorder(fails="log", error=error), [step(1), step(2), step(3)])
    what = f"failed: {error}: no network; the run continues, and its own metrics are in the run folder"
    assert warnings == [f"monitor {RECORDER} {what}"]
    assert links == {RECORDER: "https://lab.example/42 (3 records failed)"}
    assert recorder.SESSIONS[0].summary == DONE  # it is closed all the same
    assert json.loads(next((folder / "trackers").glob("*.json")).read_text())["failed"] == 3


def test_a_tracker_that_can_not_be_opened_gets_all_at_a_resume(folder):
    warnings, links = track(folder, recorder.Recorder(fails="open"), [step(1), step(2)])
    assert len(warnings) == 1 and links == {RECORDER: "ConnectionError: no network (2 records failed)"}
    warnings, _ = track(folder, recorder.Recorder(), [step(3)])
    # a tool that another test left hanging may open its run now
    (session,) = (session for session in recorder.SESSIONS if session.run.folder == folder / "trackers")
    assert not warnings and [number for number, _ in session.logged] == [1, 2, 3]
    assert session.run.identity is None


@pytest.mark.parametrize("call", ["open", "log", "finish"])
def test_a_tracker_that_hangs_is_left_behind(folder, call):
    spec, opens = recorder.Recorder(hangs=call), call != "open"
    warnings, links = track(folder, spec, [step(1), step(2)], patience=0.05, opens=opens)
    assert warnings == [
        f"monitor {RECORDER} has not answered for 0 s; the run continues, and its own metrics are in the run folder"
    ]
    assert links == {RECORDER: "no answer" if call == "open" else "https://lab.example/42"}


def test_a_tracker_that_hangs_is_noticed_during_the_run(folder):
    warnings, clock = [], ManualClock("2026-09-02T12:00:00+00:00")
    observer = TrackerObserver(recorder.Recorder(hangs="open"), warnings.append, patience=30, clock=clock)
    observer.started(info(folder))
    while observer._busy_since is None:  # the thread begins
        pass
    observer.step(step(1))
    assert not warnings
    clock.advance(31)
    observer.step(step(2))
    observer.step(step(3))
    assert len(warnings) == 1 and "has not answered for 30 s" in warnings[0]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed(tiny_model, tmp_path, monkeypatch):
    """Tracked, broken and resumed, its numbers are those of a run that nobody tracked."""

    def interrupt(prompt, completion):
        if (prompt.uid, completion.sample) == (4, 0):  # of the second step
            os.kill(os.getpid(), signal.SIGINT)

    tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"), train__steps=2)
    plain = proxima.train({**tree, "folder": str(tmp_path / "plain")}, quiet=True)
    monkeypatch.setattr(tiny_run, "HOOK", interrupt)
    with pytest.raises(KeyboardInterrupt):
        proxima.train(tree, {"monitor": RECORDER}, quiet=True)
    monkeypatch.setattr(tiny_run, "HOOK", None)
    run = proxima.train(tmp_path / "run", resume=True, quiet=True)
    first, again = (
        entry for entry in recorder.SESSIONS if run.folder in entry.run.folder.parents
    )  # a hung tool of another test may come late
    assert first.summary["status"] == "stopped" and first.run.config["train"]["steps"] == 2
    assert [number for number, _ in first.logged] == [0, 1]
    assert [number for number, _ in again.logged] == [2, 2] and again.summary["status"] == "done"
    assert run.summary["links"] == {RECORDER: again.link, "report": str(run.report)}
    assert tiny_run.traces(run.folder) == tiny_run.traces(plain.folder)
    assert RECORDER in (run.folder / "log.txt").read_text().splitlines()[-1]


def test_a_missing_package_is_one_line_before_the_model_loads(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.view.trackers.protocol.find_spec", lambda name: None)
    tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"))
    with pytest.raises(proxima.UserError) as caught:
        proxima.train(tree, ["monitor=[tensorboard, mlflow]"])
    assert str(caught.value).splitlines() == [
        f"monitor.{i}.kind={kind} (overrides): needs the package {kind}: pip install 'proxima-rl[{kind}]', "
        "or monitor=[] without it"
        for i, kind in enumerate(("tensorboard", "mlflow"))
    ]
    assert not (tmp_path / "run").exists()


def test_a_tool_is_named_once(tiny_model, tmp_path):
    tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"))
    with pytest.raises(proxima.UserError, match=r"monitor.1.kind=.*Recorder \(overrides\): is named twice; keep one"):
        proxima.train(tree, {"monitor": [RECORDER, RECORDER]})


TOOLS = {
    "mlflow": lambda place: Mlflow(uri=f"sqlite:///{place}/mlflow.db"),
    "tensorboard": lambda place: TensorBoard(),
    "trackio": lambda place: Trackio(group="g"),
    "wandb": lambda place: Wandb(mode="offline", entity="lab"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TOOLS))
def test_what_the_tool_has_stored(kind, folder, tmp_path, monkeypatch):
    """Config, every step once, evaluations and summary of a run that was interrupted, read back from the tool."""
    pytest.importorskip(kind)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    spec = TOOLS[kind](tmp_path)
    before = [answered(0, 0.125, "before", **{"pass@4": 0.5}), step(1), step(2, reward=0.25)]
    warnings, _ = track(folder, spec, before, status="stopped")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    more, links = track(folder, spec, [step(2, reward=0.25), step(3, reward=0.75), answered(3, 0.5, "after")])
    assert warnings == more == [] and links[kind]
    result = READERS[kind](spec, folder)
    assert result["metrics"]["reward/mean"] == [(1, 0.5), (2, 0.25), (3, 0.75)]
    assert result["metrics"]["eval/accuracy"] == [(0, 0.125), (3, 0.5)]
    assert result["metrics"]["eval/pass_at_4" if kind == "mlflow" else "eval/pass@4"] == [(0, 0.5)]
    assert "cppo" in result["config"] and "done" in result["summary"]


def test_the_example_of_the_page_works(folder, tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "view.md").read_text(encoding="utf-8")
    (tmp_path / "lines_of_the_page.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    sys.path.insert(0, str(tmp_path))
    try:
        from lines_of_the_page import Lines
    finally:
        sys.path.remove(str(tmp_path))
    _, links = track(folder, Lines(path=str(tmp_path / "all.jsonl")), [step(1)])
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert (lines[0]["run"], lines[0]["step"], lines[0]["reward/mean"]) == ("mine", 1, 0.5)
    assert lines[1] == {"run": "mine", "step": 3, "status": "done"}
    assert list(links.values()) == [str(tmp_path / "all.jsonl")]


def test_wandb_without_a_key_is_refused_and_the_server_is_not_asked(tmp_path, monkeypatch):
    """At a port where nobody listens: a question would raise."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert Wandb().problem() == "has no API key: run `wandb login`, set WANDB_API_KEY, or set mode: offline"
    assert Wandb(mode="offline").problem() is None
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert Wandb().problem() is None
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {'0' * 40}\n")
    assert Wandb().problem() is None
