"""The lines of a run, character by character, on a clock that stands still."""

import io
import time
from pathlib import Path

import pytest

from proxima.evaluation.headline import Headline
from proxima.runtime.watch.observer import WarningList
from proxima.view.log_lines import (
    LogFile,
    LogLines,
    closing_line,
    of_questions,
    prompts_used,
    sampling_figures,
    why_unknown,
)
from proxima.view.run_views import RunViews, lines_to, warnings_about
from tests.manual_clock import ManualClock
from tests.terminal import Terminal
from tests.view.synthetic import evaluation, info, record, whole_run


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def clock():
    return ManualClock("2026-09-02T12:04:31+00:00")


@pytest.fixture
def lines():
    return []


@pytest.fixture
def plain(lines, clock):
    return LogLines(lines.append, clock)


def quiet(step, **more):
    """A record with round numbers and nothing to remark on."""
    facts = {
        "reward/mean": 0.172,
        "length/mean": 8.06,
        "approx_kl": 0.00018,
        "masked_fraction": 0.0044,
        "time/step": 4.06,
    }
    speeds = {"tokens_per_second/generate": 290.2, "tokens_per_second/train": 430.4}
    return {"kind": "train", "step": step, "time": 4.06 * step, **facts, **speeds, **more}


BESIDE = {"async/queue": 12, "async/running": 30, "age/max": 2, "idle/trainer": 0.031, "idle/engine": 0.004}


def test_what_only_some_runs_have_in_their_lines(plain, lines):
    plain.step(quiet(1))
    plain.step(quiet(2, **{"value/explained_variance": 0.4211}))
    plain.step(quiet(3, **BESIDE))
    plain.step(quiet(4, **{"reward/solver": 0.25, "reward/part/math": 0.5, "reward/invalid": 0}))
    devices = {"tokens_per_second/device": 12.4, "device/mfu": 0.314, "device/memory_allocated": 61.2 * 2**30}
    devices["device/memory_planned"] = 58 * 2**30
    plain.step(quiet(5, **devices))
    assert "430 tok/s  per device 12 tok/s  mfu 31.4 %  memory 61.2 GiB  planned 58.0 GiB  4.1 s" in lines[4]
    assert "tok/s  solver 0.25  4.1 s" in " ".join(lines[3].split(" ")) and "part" not in lines[3]
    assert "explained" not in lines[0] and "idle" not in lines[0]
    assert "masked 0.4 %  explained 0.42  gen" in lines[1]
    assert "430 tok/s  queue 12  running 30  oldest 2  trainer idle 3.1 %  engine idle 0.4 %  4.1 s" in lines[2]


def test_a_run(plain, lines, clock):
    plain.started(info(Path("runs/add-7f3c")))
    clock.advance(18)
    plain.evaluated(evaluation(0, "before", 25))
    clock.advance(4)
    plain.step(quiet(1))
    plain.step(quiet(2, **{"time/step": 3.06}))
    several = {"accuracy/low": 0.44, "accuracy/high": 0.56, "pass@2": 0.6, "pass@16": 0.75}
    plain.evaluated(evaluation(20, "step", 100) | several)
    plain.step(quiet(40))
    plain.evaluated(evaluation(40, "after", 188))
    plain.finished(
        {
            "status": "done",
            "steps": 40,
            "seconds": 195.2,
            "eval": {label: {"metric": "accuracy", "value": v} for label, v in (("before", 0.125), ("after", 0.94))},
        }
    )
    assert lines == [
        "12:04:31  proxima 0.1.0  cppo  SmolLM2-135M-Instruct 134.5 M  cpu 2 threads bfloat16  seed 1              "
        "   runs/add-7f3c",
        "12:04:31  step = 8 prompts × 8 completions = 64 sequences → micro-batches ≤ 2,048 tokens → 1 update",
        "12:04:49  eval  before   accuracy 0.125   25/200  95 % 0.086–0.178                                      "
        "              18 s",
        "12:04:53  step   1/40   reward  0.17  length   8.1  kl 0.0002  masked 0.4 %  gen 290 tok/s  train 430 "
        "tok/s  4.1 s  eta 2m 38s",
        "12:04:53  step   2/40   reward  0.17  length   8.1  kl 0.0002  masked 0.4 %  gen 290 tok/s  train 430 "
        "tok/s  3.1 s  eta 2m 15s",
        "12:04:53  eval  step 20  accuracy 0.500  100/200  95 % 0.440–0.560  pass@16 0.750  +0.375               "
        "              18 s",
        "12:04:53  step  40/40   reward  0.17  length   8.1  kl 0.0002  masked 0.4 %  gen 290 tok/s  train 430 "
        "tok/s  4.1 s",
        "12:04:53  eval  after    accuracy 0.940  188/200  95 % 0.898–0.965  +0.815                              "
        "              18 s",
        "12:04:53  done: 40 steps in 3m 15s  accuracy 0.125 → 0.940 (+0.815)  runs/add-7f3c/report.html",
    ]


def test_ends_that_are_not_done(plain, lines):
    plain.started(info(Path("runs/a"), resumed_at=12))
    plain.finished({"status": "stopped", "steps": 14, "seconds": 61.0})
    plain.finished({"status": "failed", "steps": 14, "seconds": 61.0, "error": "RuntimeError: out of\nmemory"})
    assert [line[10:] for line in lines[1:]] == [
        "step = 8 prompts × 8 completions = 64 sequences → micro-batches ≤ 2,048 tokens → 1 update",
        "resumed after step 12/40",
        "stopped: 14 of 40 steps in 1m 01s  resume: proxima train runs/a --resume",
        "failed: 14 of 40 steps in 1m 01s  RuntimeError: out of⏎memory  resume: proxima train runs/a --resume",
    ]


def test_an_evaluation_without_a_right_or_wrong_shows_its_reward(plain, lines):
    plain.started(info(Path("runs/a")))
    facts = {"kind": "eval", "accuracy": None, "correct": 0, "questions": 4, "answers": 4, "invalid": 0}
    before = facts | {"label": "before", "step": 0, "reward/mean": 0.25, "reward/low": 0.1, "reward/high": 0.4}
    plain.evaluated(before)
    plain.evaluated(before | {"label": "after", "step": 9, "reward/mean": 0.5, "invalid": 1})
    assert lines[-2][10:] == "eval  before   reward 0.250  4 questions  95 % 0.100–0.400"
    failed = "1 of 4 answers have no score; why: `error` in evals/*.parquet"
    assert lines[-1][10:] == f"eval  after    reward 0.500  4 questions  95 % 0.100–0.400  +0.250  {failed}"


def test_a_record_that_lacks_numbers_keeps_its_columns(plain, lines):
    plain.started(info(Path("runs/a")))
    plain.step({"kind": "train", "step": 3, "time": 9.0, "reward/mean": None})
    line = "step   3/40   reward     –  length     –  kl      –  masked   – %  gen   – tok/s  train   – tok/s      –"
    assert lines[-1][10:] == line


def test_progress_speaks_only_after_a_minute_of_silence(plain, lines, clock):
    plain.started(info(Path("runs/a")))
    plain.progress("generate", 100, 4096, "completions")
    clock.advance(59)
    plain.progress("generate", 900, 4096, "completions")
    assert len(lines) == 2
    clock.advance(2)
    plain.progress("generate", 1000, 4096, "completions")
    plain.progress("generate", 1001, 4096, "completions")
    assert lines[2:] == ["12:05:32        generate  1,000/4,096 completions"]


def test_remarks_say_what_it_means_and_what_to_do():
    def remarks(**more):
        return warnings_about({**quiet(13), "completions": 64, **more})

    assert remarks() == []
    (nothing,) = remarks(**{"updates": 1, "tokens/trained": 0})
    assert nothing.startswith("every advantage is 0 (mean reward 0.17), so the step taught nothing and only momentum")
    (nothing,) = remarks(**{"updates": 1, "tokens/trained": 0, "episode/cut": 0.0, "reward/mean": 0.0})
    assert "check that the environment gives a reward" in nothing
    assert remarks(**{"updates": 1, "tokens/trained": 1}) == remarks(**{"updates": 0, "tokens/trained": 0}) == []
    (cut,) = remarks(truncated_fraction=0.82)
    assert "82.0 % of the completions reached the length limit" in cut
    assert "expected and fades, otherwise raise sampling.max_tokens" in cut
    episodes = {"truncated_fraction": 1.0, "episode/cut": 8.0, "episode/cut/context": 2.0, "episode/cut/turns": 6.0}
    reached = "a limit (turns 75.0 %, context 25.0 %); raise episode.turns, model.max_length"
    assert remarks(**episodes) == [f"100.0 % of the episodes reached {reached}"]
    assert "60.0 % of the tokens left the trust region" in remarks(masked_fraction=0.6)[0]
    assert remarks(**{"masked_fraction": 0.8, "correction/rejected_fraction": 0.76}) == []  # the correction's, not its


def test_a_lasting_state_is_printed_every_ten_steps_and_counted_at_each(tmp_path):
    stream = io.StringIO()
    views = RunViews(stream, ["train.warmup_steps=9: never ends"])
    views.started(info(tmp_path))
    for step in range(1, 31):
        views.step({**quiet(step), "truncated_fraction": 0.51 if step < 25 else 0.0})
        if step in (3, 4):
            views.lasting(f"step {step}: the engine differs by 0.{step} nats")
    printed = [line for line in stream.getvalue().splitlines() if "WARNING" in line]
    said = ["train.wa", "51.0 % o", "step 3: ", "51.0 % o", "51.0 % o"]
    assert [line.partition("WARNING ")[2][:8] for line in printed] == said
    warned = [(warning["step"], warning["last"], warning["times"]) for warning in views.warned()]
    assert warned == [(0, 0, 1), (1, 24, 24), (3, 4, 2)]
    assert views.warned()[0]["text"] == "train.warmup_steps=9: never ends"


def test_at_most_fifty_warnings_are_kept():
    warnings = WarningList()
    for number in range(60):
        warnings.add(f"step {number}: {'x' * number}", number)
    assert [record["step"] for record in warnings.records()] == list(range(50))


def test_log_file_appends_over_resumes(tmp_path, clock):
    for resumed in (0, 12):
        log = LogFile(clock)
        log.started(info(tmp_path, resumed_at=resumed))
        log.step(quiet(resumed + 1))
        assert f"step {resumed + 1:>3}/40" in (tmp_path / "log.txt").read_text(
            encoding="utf-8"
        )  # there at once, not at the end
        log.finished({"status": "stopped", "steps": 1, "seconds": 4.0})
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == lines[5] == "2026-09-02, UTC+0000"
    assert len(lines) == 11 and lines[8] == "12:04:31  resumed after step 12/40"


def test_an_ascii_stream_gets_question_marks_not_a_crash(clock):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    lines_to(stream, clock).started(info(Path("runs/a")))
    assert b"8 prompts ? 8 completions = 64 sequences" in raw.getvalue()


def test_a_terminal_has_the_progress_below_the_lines(clock):
    stream = Terminal()
    lines = lines_to(stream, clock)
    lines.progress("load", 0, 1, "models")  # an error would follow it on a line of its own
    lines.started(info(Path("runs/a")))
    before = stream.getvalue()
    assert before.startswith("12:04:31  loading model\n") and "\r" not in before
    clock.advance(2)
    lines.progress("generate", 0, 64, "completions")
    clock.advance(2)
    lines.progress("generate", 16, 64, "completions")
    drawn = stream.getvalue().removeprefix(before)
    assert drawn.startswith("generate  16/64 completions   8.0/s   eta 6.0 s  ━━━━━━╌") and "\n" not in drawn
    lines.step(quiet(1))
    after = stream.getvalue().removeprefix(before + drawn)
    assert after.startswith(f"\r{' ' * len(drawn)}\r12:04:35  step   1/40") and after.endswith("\n")


@pytest.mark.slow
def test_all_watchers_together(tmp_path):
    """As the loop uses them: the lines on the stream and in log.txt, and the report when the last line names it."""
    folder, stream = whole_run(tmp_path / "run", steps=2), io.StringIO()
    observer = RunViews(stream)
    observer.progress("load", 0, 1, "models")
    observer.warning("3 prompts are too long")
    observer.started(info(folder.path, steps=2))
    observer.step(record(1))
    assert not folder.report.exists()
    observer.finished({"status": "done", "steps": 2, "seconds": 9.0})
    assert "cppo" in folder.report.read_text(encoding="utf-8")
    printed, logged = stream.getvalue().splitlines(), folder.log.read_text(encoding="utf-8").splitlines()
    strip = [line.split("  ", 1)[1] for line in printed]
    assert strip == [line.split("  ", 1)[1] for line in logged[1:]]
    assert strip[:2] == ["loading model", "WARNING 3 prompts are too long"]
    assert strip[-1].endswith("report.html") and len(strip) == 6
    silent = RunViews(None)
    silent.started(info(folder.path, resumed_at=2))
    silent.finished({"status": "stopped", "steps": 2, "seconds": 9.0})
    assert len(folder.log.read_text(encoding="utf-8").splitlines()) == 12
    for resumed, warned in ((1, True), (2, False)):  # a run that has ended has heard the notes
        stream = io.StringIO()
        views = RunViews(stream, ["train.warmup_steps=9: never ends"])
        views.started(info(folder.path, steps=2, resumed_at=resumed))
        views.finished({"status": "done", "steps": 2, "seconds": 9.0})
        assert ("WARNING train.warmup_steps" in stream.getvalue()) == warned


def test_a_report_that_fails_does_not_fail_the_run(tmp_path):
    stream = io.StringIO()
    observer = RunViews(stream)
    observer.started(info(tmp_path))  # no run is there
    observer.finished({"status": "done", "steps": 40, "seconds": 9.0})
    assert "WARNING ReportFile failed in finished (UserError:" in stream.getvalue()
    assert "done: 40 steps" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("used", "generated", "carried", "dropped", "text"),
    [
        (16, 16, 0, {}, ""),
        (16, 45, 0, {"uniform": 29}, "prompts 45 new = 16 used + 29 uniform"),
        (16, 63, 10, {"uniform": 38}, "prompts 63 new + 1 carried in = 16 used + 38 uniform + 10 carried over"),
        (16, 20, 3, {"uniform": 0, "stale": 2}, "prompts 20 new + 1 carried in = 16 used + 2 stale + 3 carried over"),
        (3, 3, 1, {}, "prompts 3 new + 1 carried in = 3 used + 1 carried over"),
    ],
)
def test_a_step_says_when_it_used_others_than_it_generated(used, generated, carried, dropped, text):
    """The two sides are the same number."""
    facts = {"prompts_used": used, "prompts_generated": generated, "prompts_carried": carried}
    assert prompts_used(facts | {f"prompts_dropped_{reason}": n for reason, n in dropped.items()}) == text
    assert prompts_used({}) == ""


@pytest.mark.parametrize(
    ("failed", "said"),
    [(0, "no reward gives it"), (4, "4 of 4 answers have no score"), (1, "1 of 4 answers have no score")],
)
def test_an_evaluation_without_accuracy_says_why(failed, said):
    record = evaluation(0, "before", 0, questions=4) | {"accuracy": None, "invalid": failed}
    assert why_unknown(record) == said
    lines = []
    LogLines(lines.append).evaluated(record)
    assert said in lines[0] and ("; why: `error` in evals/*.parquet" in lines[0]) == bool(failed)


def test_a_resume_knows_the_last_evaluation_and_that_the_run_had_ended(tmp_path, plain, lines):
    folder = whole_run(tmp_path / "run", steps=2, finished=False)
    plain.started(info(folder.path, steps=4, resumed_at=2))
    plain.evaluated(evaluation(4, "after", 45))
    assert "+0.100" in lines[-1]
    plain.started(info(folder.path, steps=2, resumed_at=2))
    assert lines[-1].endswith("already finished: 2 steps; raise train.steps to continue")


def test_an_error_that_says_how_to_resume_is_not_followed_by_another_way():
    summary = {"status": "failed", "steps": 0, "error": "continue with --resume eval.metric=reward"}
    assert "resume: " not in closing_line(summary, info(Path("runs/a")))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"examples": 8, "answers": 8, "correct": 6, "accuracy": 0.75}, "6/8"),
        (
            {"examples": 8, "answers": 8, "correct": 0, "accuracy": 0.5},
            "8 examples",
        ),  # ties of DPO before the first step
        ({"examples": 12, "accuracy": 0.5}, "12 examples"),  # KTO
    ],
)
def test_the_count_beside_an_accuracy_of_pairs(record, said):
    assert of_questions(record, Headline("accuracy")) == said


def test_an_interval_below_zero_has_no_dash_beside_its_minus():
    bounds = {"reward": -0.1, "reward/low": -0.2, "reward/high": -0.05}
    assert sampling_figures(bounds, Headline("reward")) == "95 % -0.200 to -0.050"
