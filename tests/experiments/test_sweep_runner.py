"""Running a sweep, with small programs in the place of training: what is begun, what is left, and how it ends."""

import contextlib
import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.config.resolution import resolve
from proxima.config.validate import load_recipe
from proxima.experiments.run_progress import RunProgress, RunState
from proxima.experiments.run_reader import Metrics
from proxima.experiments.sweep_file import read_sweep
from proxima.experiments.sweep_plan import PlannedRun, Sweep, SweepCell, plan_runs
from proxima.experiments.sweep_runner import read_progress, run_sweep, train_command
from proxima.view.sweep_progress import SweepLines, tally, time_left
from tests.manual_clock import ManualClock

# A run: `behaviour` says how it ends, or that it waits for another one. It appends to `times` when it begins and ends.
PROGRAM = """
import json, os, pathlib, signal, sys, time
folder, times, behaviour, steps = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def log(word):
    with times.open("a") as file:
        file.write(f"{word} {folder}\\n")
def summary(status, **more):
    (folder / "summary.json").write_text(json.dumps({"status": status, "steps": steps, **more}))
def stop(number, frame):
    summary("stopped")
    log("end")
    sys.exit(130)
signal.signal(signal.SIGINT, signal.SIG_IGN if behaviour == "stubborn" else stop)
log("begin")
deadline = time.monotonic() + 120  # beyond which nobody else comes
while behaviour == "meets" and times.read_text().count("begin") < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
(folder / "threads").write_text(os.environ.get("OMP_NUM_THREADS", "none"))
records = [{"kind": "eval", "step": 0, "time": 0, "accuracy": 0.1}]
for s in range(1, steps + 1):
    records.append({"kind": "train", "step": s, "time": s, "reward/mean": s / 10, "time/step": 2.0})
records += [{"kind": "eval", "step": steps, "time": 9, "accuracy": 0.5 + int(folder.name[-1]) / 100}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
if behaviour == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour in ("waits", "stubborn"):
    time.sleep(3600)
if behaviour == "fails":
    summary("failed", error="ValueError: no luck")
    print("Traceback\\nValueError: no luck", file=sys.stderr)
log("end")
if behaviour == "fails":
    sys.exit(1)
summary("done", warnings=[{"step": 1, "text": "too long", "times": 2}] if behaviour == "warns" else [])
"""


SETTINGS = {"task": "arithmetic", "reward": "number", "algorithm": "cppo", "train": {"steps": 3}}
RESOLVED = resolve({"model": {"path": "models/m"}, **SETTINGS})


def planned(cell, folder, *, seed=1, steps=3, threads=None, resolved=None):
    run = {"recipe": Path("r.yaml"), "overrides": (), "steps": steps, "threads": threads, "resolved": resolved}
    return PlannedRun(cell=cell, seed=seed, folder=folder, **run)


def sweep_of(cells, folder=Path("runs/s"), *, seeds=(1,), jobs=1):
    named = tuple(SweepCell(name=name) for name in cells)
    place = {"file": Path("s.yaml"), "recipe": Path("r.yaml"), "folder": folder, "settings": {"jobs": jobs}}
    return Sweep(seeds=seeds, jobs=jobs, cells=named, all_cells=named, **place)


class Ear:
    """Hears everything; `on` maps a word to what is done when it is heard."""

    def __init__(self, **on):
        self.heard, self.on = [], on

    def started(self, sweep, progresses):
        self.heard.append(f"started {len(progresses)}")

    def changed(self, progress, records):
        if not records or progress.state is not RunState.RUNNING:
            self.say(f"{progress.state} {progress.run.cell}")

    def tick(self):
        self.say("tick")

    def warning(self, text):
        self.say("warning")

    def finished(self, progresses):
        self.say("finished")

    def say(self, text):
        if text != "tick":
            self.heard.append(text)
        for word, act in self.on.items():
            if text.startswith(word):
                act(self)


@pytest.fixture
def lab(tmp_path):
    """`lab(a="done", b="fails")` makes a sweep of these cells; `.run(ear)` runs it."""

    def make(jobs=1, seeds=(1,), threads=None, **cells):
        folder = tmp_path / "sweep"
        sweep = sweep_of(cells, folder, seeds=seeds, jobs=jobs)
        runs = [
            planned(c, folder / c / f"seed-{s}", seed=s, threads=threads, resolved=RESOLVED)
            for s in seeds
            for c in cells
        ]

        def command(run):
            return [sys.executable, "-S", "-c", PROGRAM, str(run.folder), str(tmp_path / "times"), cells[run.cell], "3"]

        def run(ear=None, **more):
            return run_sweep(sweep, runs, ear or Ear(), command=command, poll=0.02, **more)

        return SimpleNamespace(run=run, runs=runs, sweep=sweep, folder=folder, times=tmp_path / "times")

    return make


def states(progresses):
    return {s.run.cell: str(s.state) for s in progresses}


def most_at_once(times):
    running, most = 0, 0
    for line in times.read_text().splitlines():
        running += 1 if line.startswith("begin") else -1
        most = max(most, running)
    return most


@pytest.mark.slow
def test_the_warnings_of_a_run_are_reported_at_its_end(lab):
    made, text = lab(a="warns", b="done"), io.StringIO()
    made.run(SweepLines(text))
    messages = [line.partition("  ")[2] for line in text.getvalue().splitlines() if "WARNING" in line]
    assert messages == [f"WARNING  a seed 1: 1 warning: too long; see {made.folder / 'a' / 'seed-1' / 'report.html'}"]


@pytest.mark.slow
def test_all_are_run_and_the_second_time_none(lab):
    made = lab(seeds=(1, 2), a="done", b="done")
    ear = Ear()
    progresses = made.run(ear)
    assert [(s.run.name, s.state, s.step, s.reward, s.evaluated[-1][1], s.seconds) for s in progresses][:2] == [
        ("a seed 1", RunState.DONE, 3, 0.3, 0.51, 6.0),
        ("b seed 1", RunState.DONE, 3, 0.3, 0.51, 6.0),
    ]
    assert ear.heard == ["started 4", *["running a", "done a", "running b", "done b"] * 2, "finished"]
    assert most_at_once(made.times) == 1
    facts = json.loads((made.folder / "sweep.json").read_text())
    assert [run["folder"] for run in facts["runs"]] == ["a/seed-1", "a/seed-2", "b/seed-1", "b/seed-2"]
    assert facts["settings"] == {"jobs": 1} and facts["machine"]["cores"] >= 1 and facts["packages"]["torch"]
    again = Ear()
    assert all(s.before and s.state is RunState.DONE and s.evaluated for s in made.run(again))
    assert again.heard == ["started 4", "finished"]
    assert len(made.times.read_text().splitlines()) == 8


@pytest.mark.slow
def test_two_side_by_side_with_their_threads(lab, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = lab(jobs=2, threads=4, a="meets", b="meets", c="done")
    made.run()
    assert most_at_once(made.times) == 2
    assert (made.folder / "a" / "seed-1" / "threads").read_text() == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (made.folder / "a" / "seed-1" / "summary.json").unlink()
    made.run()
    assert (made.folder / "a" / "seed-1" / "threads").read_text() == "1"


@pytest.mark.slow
def test_a_failure_costs_one_cell_and_keeps_its_output(lab):
    made = lab(a="fails", b="done", c="dies")
    first = {s.run.cell: s for s in made.run()}
    assert states(first.values()) == {"a": "failed", "b": "done", "c": "failed"}
    assert first["a"].error == f"exit code 1: ValueError: no luck; see {made.folder}/a/seed-1/output.txt"
    assert first["c"].error.startswith("SIGKILL, which the kernel sends when memory runs out: no output; see ")
    ear = Ear()
    second = {s.run.cell: s for s in made.run(ear)}
    assert "running a" not in ear.heard and "running c" in ear.heard  # the killed one said nothing of having failed
    assert second["a"].error == "ValueError: no luck; run it again with --retry-failed"
    ear = Ear()
    made.run(ear, retry_failed=True)
    assert "running a" in ear.heard and "running b" not in ear.heard
    said = made.folder / "a" / "seed-1" / "output.txt"
    assert said.read_text() == "Traceback\nValueError: no luck\n" * 2
    (silent,) = lab(a="dies").run(retry_failed=True)
    assert "no output" in silent.error  # the last word is of this time


def test_a_run_that_says_nothing_of_being_done_is_not_done(lab):
    made = lab(a="done")
    made.runs[0].folder.mkdir(parents=True)
    for text in ('{"status": "stopped"}', "{", "[]"):
        (made.runs[0].folder / "summary.json").write_text(text)
        assert read_progress(made.runs[0]).state is RunState.WAITING


def interrupt(ear):
    """As soon as the runs have said that they can be interrupted."""
    if ear.times.exists() and ear.times.read_text().count("begin") == ear.wanted and not ear.done:
        ear.done = True
        os.kill(os.getpid(), signal.SIGINT)


def ear_that_interrupts(made, wanted, **more):
    ear = Ear(tick=interrupt, **more)
    ear.times, ear.wanted, ear.done = made.times, wanted, False
    return ear


@pytest.mark.slow
def test_ctrl_c_reaches_the_runs_once_and_nothing_else_begins(lab):
    made = lab(jobs=2, a="waits", b="waits", c="done")
    ear = ear_that_interrupts(made, 2)
    before = signal.getsignal(signal.SIGINT)
    assert states(made.run(ear)) == {"a": "stopped", "b": "stopped", "c": "waiting"}
    assert ear.heard.count("warning") == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((made.folder / "a" / "seed-1" / "summary.json").read_text())["status"] == "stopped"
    assert [read_progress(run).state for run in made.runs] == [RunState.WAITING] * 3  # the same command goes on


@pytest.mark.slow
def test_the_second_ctrl_c_kills(lab):
    made = lab(a="stubborn", b="done")
    ear = ear_that_interrupts(made, 1, warning=lambda ear: os.kill(os.getpid(), signal.SIGINT))
    assert states(made.run(ear)) == {"a": "stopped", "b": "waiting"}


@pytest.mark.slow
def test_one_sweep_at_a_time_in_a_folder(lab):
    made, seen = lab(a="done"), []

    def another(ear):
        with pytest.raises(
            ValueError, match="another sweep is using .*sweep; wait for it, stop it, or use another --folder"
        ):
            made.run()
        seen.append(True)

    made.run(Ear(running=another))
    assert seen == [True]
    made.run()


@pytest.fixture
def elsewhere():
    """`elsewhere(folder)` has the lock of a run, as another process that runs it; `let_go()` ends that."""
    with contextlib.ExitStack() as stack:

        def begin(folder):
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((folder / ".lock").open("wb")), fcntl.LOCK_EX)
            record = {"kind": "train", "step": 2, "time": 1, "reward/mean": 0.7, "time/step": 2.0}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")

        def let_go(folder, outcome="done"):
            if outcome == "done":
                (folder / "summary.json").write_text(json.dumps({"status": "done", "steps": 3}))
            stack.close()

        yield SimpleNamespace(begin=begin, let_go=let_go)


@pytest.mark.slow
@pytest.mark.parametrize(("outcome", "heard"), [("done", ["done a"]), ("killed", ["waiting a", "running a", "done a"])])
def test_a_run_that_continues_elsewhere_is_followed_and_not_started_again(lab, elsewhere, outcome, heard):
    made = lab(a="done")
    folder = made.runs[0].folder
    elsewhere.begin(folder)
    (folder / "output.txt").write_text("what it said\n")
    ear = Ear(tick=lambda ear: ear.heard[-1] == "running a" and elsewhere.let_go(folder, outcome))
    (progress,) = made.run(ear)
    assert ear.heard == ["started 1", "warning", "running a", *heard, "finished"]
    assert (progress.state, progress.step) == (RunState.DONE, 2 if outcome == "done" else 3)
    assert made.times.exists() == (outcome == "killed")
    assert (folder / "output.txt").read_text().startswith("what it said\n")


@pytest.mark.slow
def test_ctrl_c_leaves_what_runs_elsewhere(lab, elsewhere):
    made = lab(jobs=2, a="done", b="waits")
    elsewhere.begin(made.runs[0].folder)
    ear = ear_that_interrupts(made, 1)
    assert states(made.run(ear)) == {"a": "waiting", "b": "stopped"}
    assert not (made.runs[0].folder / "summary.json").exists()


@pytest.mark.slow
def test_the_folder_is_taken_between_our_look_and_our_run(lab, elsewhere):
    """As `train` says it: exit code 2, and another process has the folder."""
    made = lab(a="done")
    folder, begun = made.runs[0].folder, []

    def command(run):
        if not begun:
            elsewhere.begin(folder)
        begun.append(run)
        return [sys.executable, "-S", "-c", "import sys; sys.exit('error: in use' and 2)"]

    ear = Ear(warning=lambda ear: elsewhere.let_go(folder))
    (progress,) = run_sweep(made.sweep, made.runs, ear, command=command, poll=0.02)
    assert (progress.state, len(begun)) == (RunState.DONE, 1)


@pytest.mark.slow
def test_a_run_that_can_not_begin_costs_no_other(lab, monkeypatch):
    """The disk fills up while `a` runs: `b` fails, in a line, and `a` and `c` are done."""
    made = lab(jobs=2, a="done", b="done", c="done")
    made.runs[1].folder.parent.mkdir(parents=True)
    made.runs[1].folder.write_text("a file")
    progresses = {s.run.cell: s for s in made.run()}
    assert states(progresses.values()) == {"a": "done", "b": "failed", "c": "done"}
    assert progresses["b"].error.startswith("could not start: [Errno 17] File exists")

    made.runs[1].folder.unlink()
    (made.runs[2].folder / "summary.json").unlink()
    real = subprocess.Popen

    def popen(command, **more):
        if "/b/" in " ".join(command[4:5]):  # of whatever this process starts meanwhile
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(command, **more)

    monkeypatch.setattr("proxima.experiments.sweep_runner.subprocess.Popen", popen)
    progresses = {s.run.cell: s for s in made.run()}
    assert states(progresses.values()) == {"a": "done", "b": "failed", "c": "done"}
    assert progresses["b"].error == "could not start: [Errno 28] No space left on device"


def full(ear):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_full_disk_for_the_sweeps_own_lines_costs_no_run(lab):
    made = lab(a="done", b="done")
    assert states(made.run(Ear(running=full, tick=full, done=full))) == {"a": "done", "b": "done"}


def test_an_error_of_our_own_lets_the_runs_write_a_checkpoint(lab):
    made = lab(a="waits")

    def broken(ear):
        if made.times.exists():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made.run(Ear(tick=broken))
    assert json.loads((made.runs[0].folder / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_a_run_begins_with_the_config_that_was_planned(sweep_file, tmp_path):
    """An edit of the recipe after the planning reaches no run; the same values as by the recipe and the command line
    that is printed."""
    sweep = read_sweep(sweep_file("seeds: [1, 2]\ngrid: {train.optimizer.lr: [1e-4, 2e-4]}\n"))
    runs = plan_runs(sweep)
    as_printed = [load_recipe(str(run.recipe), run.overrides).config for run in runs]
    given = []

    def command(run):
        (tmp_path / "tiny.yaml").write_text("nonsense: 1\n")
        given.append(train_command(run))
        return [sys.executable, "-S", "-c", "pass"]

    run_sweep(sweep, runs, Ear(), command=command, poll=0.01)
    assert [words[3:] for words in given] == [
        ["train", f"{run.folder}/planned.yaml", "--resume", "--quiet"] for run in runs
    ]
    assert [load_recipe(words[4]).config for words in given] == as_printed == [run.resolved.config for run in runs]


def test_metrics_are_read_as_they_grow(tmp_path):
    tail, file = RunProgress(planned("a", tmp_path, steps=10)), tmp_path / "metrics.jsonl"
    assert tail.poll() == []
    file.write_text('{"kind": "train", "step": 1, "reward/mean": 0.5, "time/step": 4}\n{"kind": "tr')
    assert [r["step"] for r in tail.poll()] == [1]
    with file.open("a") as more:
        more.write('ain", "step": 2, "reward/mean": 0.6, "time/step": 2}\nnot json\n')
    assert [r["step"] for r in tail.poll()] == [2]
    assert (tail.step, tail.seconds, tail.remaining) == (2, 6.0, 24.0)
    assert (tail.poll(), tail.step) == ([], 2)  # a damaged line hides nothing that stands before it
    other = tmp_path / "other"
    other.write_text('{"kind": "train", "step": 1, "reward/mean": 0.5, "time/step": 4}\n')
    other.replace(file)  # a resume rewinds the file
    assert [r["step"] for r in tail.poll()] == [1]
    assert (tail.step, tail.seconds) == (1, 4.0)


def progress(cell, state, times=(), steps=10, reward=None, evals=(), **more):
    train = [{"kind": "train", "step": i, "time/step": time, "reward/mean": reward} for i, time in enumerate(times, 1)]
    return RunProgress(
        planned(cell, Path(cell), steps=steps), state=state, metrics=Metrics.of([*train, *evals]), **more
    )


def test_time_left():
    done = progress("a", RunState.DONE, [2.0] * 10)
    running = progress("b", RunState.RUNNING, [4.0] * 5)
    waiting = progress("c", RunState.WAITING)
    assert time_left([done, running, waiting], 1) == pytest.approx(20 + (20 + 40) / 2)
    assert time_left([done, running, waiting], 2) == pytest.approx(25)
    assert time_left([done, running], 4) == pytest.approx(20)  # no job helps another
    assert time_left([waiting], 1) is None
    assert tally([done, running, waiting], 1) == "1/3 done, 1 running, 1 waiting   eta 50 s"


def test_lines_say_each_event_and_the_state_each_minute(tmp_path, monkeypatch):
    clock, out = ManualClock("2026-01-01T12:00:00+00:00"), io.StringIO()
    monkeypatch.setattr("proxima.view.sweep_progress.time_of_day", lambda wall: wall[11:19])
    lines = SweepLines(out, clock)
    single = progress(
        "a", RunState.RUNNING, [4.0] * 5, reward=0.25, evals=[{"kind": "eval", "step": 0, "accuracy": 0.1}]
    )
    failed = progress("b", RunState.FAILED, error="exit code 1: \x1b[2Jbad")
    lines.started(sweep_of("ab", jobs=2), [single, failed])
    lines.changed(single, [{"kind": "train", "step": 5}])
    lines.changed(single, [{"kind": "eval", "step": 5, "accuracy": 0.75}])
    lines.tick()
    clock.advance(61)
    lines.tick()
    lines.tick()
    last = {"kind": "train", "step": 10, "time/step": 0.0, "reward/mean": 0.25}
    ended = [last, {"kind": "eval", "step": 10, "accuracy": 0.9}]
    single.state = RunState.DONE
    single.metrics = Metrics.of([*single.metrics.train, *single.metrics.evals, *ended])
    lines.changed(single, [])
    assert out.getvalue().splitlines() == [
        "12:00:00  sweep s  2 cells × 1 seed = 2 runs, 2 side by side  runs/s",
        "12:00:00  failed before  b seed 1  exit code 1: ␛[2Jbad",
        "12:00:00  eval     a seed 1  step 5/10  accuracy 0.750",
        "12:01:01  0/2 done, 1 running, 1 failed   eta 20 s   a seed 1 step 5/10",
        "12:01:01  done     a seed 1  step 10/10  reward 0.250  held-out accuracy 0.100 → 0.900  20 s",
    ]
