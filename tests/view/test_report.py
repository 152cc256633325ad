"""report.html: the figures are in it, foreign text stays text, and it is whole or not there."""

import base64
import errno
import hashlib
import html.parser
import json
import re
from dataclasses import replace

import pytest

from proxima.data.flow import Completion, Group, Score
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_evals, write_rollouts
from proxima.system import atomic_files as files
from proxima.training.batch_builder import CompletionRecord
from proxima.view.chart import write_figure
from proxima.view.formatting import visible
from proxima.view.microscope import PORT
from proxima.view.microscope.viewed_run import ViewedRun
from proxima.view.report import headline, write_report
from proxima.view.report_samples import held_out_questions, representative
from scripts.learning_curve import LearningCurve
from tests.experiments.runs import make_run
from tests.view.microscope.page_runs import forked, played
from tests.view.microscope.test_stages import written
from tests.view.synthetic import evals, evaluation, group, record, records, whole_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"><!-- \u2028 {{ 7 * 7 }} &lt;b&gt; \x1b[2J'


class Page(html.parser.HTMLParser):
    """Tags in order, visible text, and the embedded data."""

    VOID = frozenset({"meta", "input", "br", "img", "link"})

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text, self.scripts, self.open = [], [], [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        self.words = re.sub(r"\s+", " ", " ".join(self.text))
        parts = re.split(r" step (\d+) (?=What|</)", self.words.partition("What the policy wrote")[2])
        self.samples = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
        self.data = json.loads(self.scripts[0])["data"] if self.scripts else {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # well nested

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with its report."""
    folder = whole_run(tmp_path_factory.mktemp("runs") / "quickstart", steps=40)
    return folder, Page(write_report(folder.path))


def recorded(path, records):
    """A run of these records alone, and its report."""
    folder = RunFolder(make_run(path, records, config="seed: 1\n", status=None))
    return folder, Page(write_report(folder.path))


@pytest.mark.slow
def test_headline_and_tiles(whole):
    _, page = whole
    for text in (
        "cppo on SmolLM2-135M-Instruct",
        "done 40 of 40 steps seed 1 quickstart",
        "0.125 → 0.940 +0.815",
        "25/200 right before the first step 95 % interval 0.086 to 0.178",
        "188/200 right after step 40 95 % interval 0.898 to 0.965",
        "duration 2m 43s",
        "generate 62 tok/s",
        "train 50 tok/s",
        "completions 2,560",
        "peak memory 3.4 GiB",
    ):
        assert text in page.words
    assert not page.open


@pytest.mark.slow
def test_the_curves_are_those_of_the_viewer(whole):
    folder, page = whole
    trend, viewed = page.data["0/trend"], ViewedRun(0, folder)
    assert (
        trend["steps"] == trend["rollout_steps"] == list(range(1, 41)) and trend["specs"]["surrogate"]["kind"] == "cppo"
    )
    for name, values in viewed.trend()["metrics"].items():
        assert trend["metrics"][name] == [pytest.approx(value, rel=1e-5) for value in values], name
    assert trend["about"] == viewed.trend()["about"] and len(trend["evals"]) == 5
    assert page.source.count(str(folder.path.parent)) == 1  # the folder that its recipe says
    assert page.data["0/timeline"] is None


def test_the_devices_and_the_syncs_are_shown_where_they_were_measured(tmp_path):
    memory = {"device/memory_allocated": 61.2 * 2**30, "device/memory_reserved": 70 * 2**30}
    memory["device/memory_planned"] = 58 * 2**30
    parts = {"sync/seconds": 1.24, "sync/send_seconds": 0.81, "sync/probe_max": 0.00314}
    measured = [{"tokens_per_second/device": speed, "device/mfu": speed / 100, **memory} for speed in (20.0, 30.0)]
    _, page = recorded(tmp_path / "run", [record(i, **each, **parts) for i, each in enumerate(measured, 1)])
    tiles = "per device 25 tok/s of the product rate 25.0 %", "GPU memory 61.2 GiB, 70.0 GiB reserved, 58.0 GiB planned"
    rows = "seconds 1.2 s 1.2 s of the last", "send_seconds 0.8 s 0.8 s of this part", "probe_max 0.00314 0.00314"
    assert all(text in page.words for text in (*tiles, *rows))
    _, page = recorded(tmp_path / "other", [record(1)])
    assert not any(text in page.words for text in ("product rate", "GPU memory", "Weight syncs"))


def test_the_timeline_has_the_last_six_steps(tmp_path):
    folder = whole_run(tmp_path / "run", steps=2)
    written(folder.timeline, closed=False)
    spans = Page(write_report(folder.path)).data["0/timeline"]
    assert [span["facts"]["step"] for span in spans if span["name"] == "step"] == [3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_questions_samples_counts_config_environment(whole):
    _, page = whole
    assert "5 of 200 held-out questions 163 became right and 0 became wrong; these come first." in page.words
    assert 'What is 8 + 4? expected {"value": 12} before wrong I believe that it is 23 after right 12' in page.words
    assert len(page.samples) == 20 and page.tags.count("details") == 22
    assert 'What is 1 + 1? view expected {"value": 2} reward ' in page.samples[1]
    assert page.samples[1].count(" reward ") == 8 and page.samples[1].count("4 of 8 completions") == 2
    assert "advantage 0 320 12.5 %" in page.words
    assert "invalid 3 0.1 %" in page.words
    assert "kind: arithmetic r.yaml:2" in page.words
    assert "machine.cores" in page.words and "packages.torch" in page.words


def test_the_samples_of_a_step_are_a_failure_and_the_best_answers(tmp_path):
    folder = whole_run(tmp_path / "run", steps=1)
    texts = [("wrong", [False], ()), ("failed", [False], (0,)), ("worse", [False], ()), ("well", [True], ())]
    groups = [group(uid, [text], right, failed=bad) for uid, (text, right, bad) in enumerate(texts)]
    write_rollouts(folder.rollout_file(1), 1, groups, records(groups))
    page = Page(write_report(folder.path))
    assert [text for text, *_ in texts if f" {text} " in f"{page.samples[1]} "] == ["failed", "well"]


@pytest.mark.slow
def test_failed_scores_are_said_at_the_top_and_before_is_no_result(tmp_path):
    folder = whole_run(tmp_path / "run", steps=2, finished=False)
    folder.append_metrics(evaluation(2, "after", 0) | {"accuracy": None, "invalid": 200})
    failed = [group(uid, ["a", "b"], [True, False], failed=(0, 1)) for uid in range(3)]
    write_rollouts(folder.rollout_file(2), 2, failed, records(failed))
    page = Page(write_report(folder.path))
    assert "200 of 400 held-out answers (50.0 %) have no score." in page.words
    assert "The latest reasons: timed out after 5 s (6 ×) ." in page.words
    assert page.samples[2].count("reward invalid ") == 4 and "timed out after 5 s view" in page.samples[2]
    assert page.words.index("have no score") < page.words.index("Held-out accuracy")
    assert "0.125 → – " in page.words and "after step 2: unknown: 200 of 200 answers have no score" in page.words


@pytest.mark.slow
def test_the_warnings_of_the_run_are_in_a_box(tmp_path):
    folder = whole_run(tmp_path / "run", steps=2)
    messages = [(0, 0, "a <b>", 1), (2, 4, "long", 3), (1, 4, "odd", 2), (5, 5, "late", 1)]
    warnings = [dict(zip(("step", "last", "text", "times"), entry, strict=True)) for entry in messages]
    folder.write_summary({"status": "done", "steps": 5, "warnings": warnings})
    words = Page(write_report(folder.path)).words
    assert (
        "Warnings a <b> (before the first step) long (at steps 2 to 4, not since) odd (at steps 1 to 4 (2 times), not "
        in words
    )
    assert "late (at step 5, still at the last step)" in words
    assert words.index("25/200 right") < words.index("Warnings a <b>")  # the result comes first


@pytest.mark.slow
def test_no_accuracy_at_all(tmp_path):
    _, page = recorded(tmp_path / "run", [evaluation(0, "before", 0) | {"accuracy": None}, record(1)])
    assert "The held-out evaluations have no score: no reward gives it." in page.words


@pytest.mark.slow
def test_the_mean_reward_stands_where_nothing_is_right_or_wrong(tmp_path):
    reward = {"reward/mean": -1.5, "reward/low": -2.0, "reward/high": -1.0}
    facts = evaluation(0, "before", 0) | reward | {"accuracy": None}
    after = {"step": 1, "label": "after", "reward/mean": -0.5, "reward/low": -0.75, "reward/high": -0.25}
    _, page = recorded(tmp_path / "run", [facts, record(1) | {"accuracy": None}, facts | after])
    words = page.words
    assert "Held-out mean reward -1.500 → -0.500 +1.000 200 questions before the first step" in words
    assert "95 % interval -2.000 to -1.000" in words and "-2.175 -0.075" in words  # the axis spans both intervals
    assert "accuracy" not in words.partition("Curves")[0]
    sides = headline([facts, facts | after])["sides"]
    assert [(side["left"], side["at"]) for side in sides] == [(8.33, 32.14), (67.86, 79.76)]


@pytest.mark.slow
def test_a_run_failed_before_its_evaluation_is_not_advised_to_set_one(tmp_path):
    folder, page = recorded(tmp_path / "run", [record(1)])
    assert "There was no held-out evaluation: set eval.task" in page.words
    folder.write_config("eval:\n  task:\n    kind: arithmetic\n")
    words = Page(write_report(folder.path)).words
    assert "set eval.task" not in words and "no held-out evaluation yet" in words


def row(sample, reward):
    return {"sample": sample, "reward": reward}


@pytest.mark.parametrize(
    ("group", "shown"),
    [([row(i, -float(i)) for i in range(8)], [0, 2, 5, 7]), ([row(0, 0.0), row(1, None), row(2, 1.0)], [1, 2, 0])],
)
def test_the_completions_shown_span_the_group(group, shown):
    assert [row["sample"] for row in representative(group)] == shown


def assert_asks_for_nothing(page, *links):
    """It fetches nothing, runs its own script alone, and leads within itself or to these `links`."""
    assert not {"img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name in ("src", "srcset") or name.startswith("on")]
    assert all(value.startswith(("#", *links)) for _, name, value in page.attributes if name == "href")
    (policy,) = [value for _, name, value in page.attributes if name == "content" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    assert "@import" not in page.source and not re.search(r"url\((?!#)", page.source)


@pytest.mark.slow
def test_it_asks_the_network_for_nothing(whole):
    assert_asks_for_nothing(whole[1], f"http://127.0.0.1:{PORT}/#/0")  # of a viewer here


def test_questions_whose_verdict_changed_come_first(tmp_path):
    folder = RunFolder(tmp_path)
    folder.evals.mkdir()
    before, after = "110000010", "111111001"  # uids 2 to 5 and 8 are gained, 7 is lost
    for step, label, rights in ((0, "before", before), (4, "after", after)):
        write_evals(
            folder.eval_file(step, label), step, [group(i, [right], [right == "1"]) for i, right in enumerate(rights)]
        )
    questions = held_out_questions(folder)
    marks = [[answer["mark"] for answer in row["answers"]] for row in questions["rows"]]
    assert marks == [["wrong", "right"]] * 3 + [["right", "wrong"]] + [["wrong", "right"]]
    assert (questions["changes"], questions["of"]) == ("5 became right and 1 became wrong; these come first.", 9)
    assert questions["rows"][0]["question"] == group(2, [], [], None).prompt.question


def test_questions_without_right_or_wrong_are_shown_with_their_rewards(tmp_path):
    folder = RunFolder(tmp_path)
    folder.evals.mkdir()
    for step, label, rewards in ((0, "before", [0.5, 0.5, 0.5, 0.5]), (4, "after", [0.5, 0.75, 0.25, 1.0])):
        plain = [group(i, ["text"], [True]) for i in range(len(rewards))]
        groups = [replace(g, scores=(Score(value=r),)) for g, r in zip(plain, rewards, strict=True)]
        write_evals(folder.eval_file(step, label), step, groups)
    questions = held_out_questions(folder)
    marks = [[answer["mark"] for answer in row["answers"]] for row in questions["rows"]]
    after = ["reward 1.000", "reward 0.750", "reward 0.250", "reward 0.500"]
    assert marks == [["reward 0.500", mark] for mark in after]
    assert questions["changes"] == "2 have a higher reward and 1 have a lower one; these come first."


@pytest.mark.slow
def test_hostile_text_stays_text(tmp_path):
    folder = whole_run(tmp_path / HOSTILE.replace("/", "_").replace("\x1b", "")[:60], steps=2)
    evil = [group(uid, [HOSTILE, HOSTILE], [True, False], question=HOSTILE, failed=(1,)) for uid in range(3)]
    write_rollouts(folder.rollout_file(2), 2, evil, records(evil))
    write_evals(folder.eval_file(2, "after"), 2, evil)
    write_evals(folder.eval_file(0, "before"), 0, evil)
    folder.write_config(folder.config.read_text() + f"note: {json.dumps(HOSTILE)}  # {HOSTILE.splitlines()[0]}\n")
    folder.write_environment({"machine": HOSTILE, HOSTILE: [HOSTILE]})
    summary = json.loads(folder.summary.read_text())
    folder.write_summary(summary | {"status": "failed", "error": HOSTILE, "algorithm": HOSTILE, "model": HOSTILE})
    plain, page = Page(write_report(whole_run(tmp_path / "plain", steps=2).path)), Page(write_report(folder.path))
    assert page.tags.count("script") == plain.tags.count("script") == 2
    assert "img" not in page.tags and "b" not in [t for t in page.tags if t not in plain.tags]
    assert page.scripts[1] == plain.scripts[1]
    assert visible(HOSTILE) in " ".join(page.text)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in page.words
    raw = folder.report.read_text(encoding="utf-8")
    assert raw.count("<script") == 2 and "alert(1)</script>" not in raw


@pytest.mark.slow
def test_a_run_that_was_killed(tmp_path):
    folder = whole_run(tmp_path / "run", steps=3, finished=False)
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind": "train", "st')
    content = folder.rollout_file(2).read_bytes()
    folder.rollout_file(2).write_bytes(content[: len(content) // 2])
    page = Page(write_report(folder.path))
    assert "unfinished 3 of 40 steps" in page.words
    assert "There is no summary.json" in page.words
    assert "Could not be read: 000002.parquet." in page.words
    assert list(page.samples) == [1, 3]
    assert "Held-out accuracy before training, the only evaluation so far 0.125" in page.words
    assert "after step" not in page.words


def test_a_run_that_ended_before_its_first_step_says_why_once(tmp_path):
    folder, _ = recorded(tmp_path / "run", [])
    folder.write_summary({"status": "failed", "steps": 0, "error": "engine.timeout: the server is gone"})
    page = Page(write_report(folder.path))
    assert "No step was made engine.timeout: the server is gone" in page.words
    assert page.words.count("the server is gone") == 1


def test_a_run_with_almost_nothing(tmp_path):
    folder, page = recorded(tmp_path / "run", [])
    assert "No step was made metrics.jsonl has no step." in page.words and "Curves" not in page.words
    folder.append_metrics({"kind": "train", "step": 1, "time": 3.0, "reward/mean": 0.25, "loss": float("nan")})
    page = Page(write_report(folder.path))
    assert "Mean reward, first and last step 0.25 → 0.25" in page.words
    assert page.data["0/trend"]["metrics"]["reward/mean"] == [0.25]
    folder.append_metrics(evaluation(1, "after", 0))
    page = Page(write_report(folder.path))
    assert "0/200 right after step 1 95 % interval 0.000 to 0.019" in page.words


def test_a_distillation_has_its_first_and_its_last_divergence(tmp_path):
    lines = [record(number, **{"distillation/divergence": gap}) for number, gap in ((1, 0.5), (2, 0.3), (3, 0.25))]
    _, page = recorded(tmp_path / "run", lines)
    assert "Divergence from the teacher, first and last step 0.50 → 0.25" in page.words


@pytest.mark.slow
def test_a_long_run_stays_small(tmp_path):
    folder, page = recorded(tmp_path / "run", [record(step, 1000) for step in range(1, 1001)])
    assert len(page.data["0/trend"]["steps"]) == 1000 and folder.report.stat().st_size < 500_000


@pytest.mark.slow
def test_a_full_disk_leaves_the_former_report(tmp_path, monkeypatch):
    folder = whole_run(tmp_path / "run", steps=2)
    before = write_report(folder.path).read_bytes()
    folder.append_metrics(record(3))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(folder.path)
    assert folder.report.read_bytes() == before


@pytest.mark.slow
def test_learning_curve(tmp_path, whole):
    folder, _ = whole
    out = write_figure(LearningCurve.of(folder.path), tmp_path / "curve.svg")
    svg = out.read_text(encoding="utf-8")
    assert "held-out accuracy 0.125 → 0.940 of 200 questions in 40 steps, 2m 08s" in svg
    assert svg.count("<use") == 5 and svg.count("opacity: 0.35") == 1 and svg.count("opacity: 0.75") == 5
    assert "<title>held-out accuracy" in svg and "prefers-color-scheme: dark" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no finished step"):
        LearningCurve.of(tmp_path / "empty")


@pytest.mark.slow
def test_no_question_changed_and_no_gain_is_not_green(tmp_path):
    folder = whole_run(tmp_path / "run", steps=2, finished=False)
    folder.append_metrics(evaluation(2, "after", 25))
    write_evals(folder.eval_file(2, "after"), 2, evals(25))
    text = write_report(folder.path).read_text(encoding="utf-8")
    assert "No verdict of a question changed." in text and "these come first" not in text
    assert "<em>+0.000</em>" in text
    folder.append_metrics(evaluation(3, "after", 50))
    assert "<em class=better>+0.125</em>" in write_report(folder.path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_samples_of_episodes_are_shown_turn_by_turn(tmp_path):
    folder = whole_run(tmp_path / "run", steps=1)
    prompt = group(7, ["x"], [True]).prompt
    plain = [Completion.of_text(7, sample, "It is 2.", range(16)) for sample in (0, 1)]
    first, second = (played(completion, lambda words: f"<b>{words}</b>") for completion in plain)
    completions = (first, forked(second))
    scores = tuple(Score(value=value, parts={"environment": value}) for value in (0.25, 1.0))
    groups = [Group(prompt=prompt, completions=completions, scores=scores)]
    paths = [path for completion in completions for path in completion.paths]
    outcomes = {path.key: CompletionRecord(outcome="skipped_zero_advantage", advantage=0.0) for path in paths}
    write_rollouts(folder.rollout_file(1), 1, groups, outcomes)
    for label in ("before", "after"):
        write_evals(folder.eval_file(int(label == "after"), label), 1, groups)
    page = Page(write_report(folder.path))
    first, second = page.source.partition('data-step="1"')[2].split('<div class="completion')[1:]
    assert (
        "/completion/7.1.1" in first and "/completion/7.0.0" in second and "2 completions" not in second
    )  # a row a sample
    assert re.findall('<li class="(.*?)"><b>(.*?)</b>', second) == [
        *(("model", "assistant"), ("given", "tool"), ("model", "assistant")),
        *(("given error", "tool"), ("model", "assistant")),
    ]
    call = "<code>→ search(query=&#34;&lt;b&gt;sum of 1 and 2&lt;/b&gt;&#34;)</code>"
    assert call in second and "unreadable call: &lt;b&gt;no closing brace" in second and "reward +0.25" in second
    shown = folder.report.read_text(encoding="utf-8").partition("held-out questions</h2>")[2].partition("</section>")[0]
    assert call in shown and "&lt;b&gt;it says&lt;/b&gt;" in shown and '<li class="given error">' in shown


def test_the_numbers_of_the_mismatch_have_a_verdict(tmp_path):
    """By the ideal ranges, with the guard of the run."""
    more = [{"mismatch/rollout_is_eff_sample_size": value, "mismatch/k3_kl": 0.03} for value in (0.9, 0.4, 0.2)]
    steps = [record(i + 1, **numbers) for i, numbers in enumerate(more)]
    run = make_run(tmp_path / "run", steps, config="algorithm:\n  mismatch: {{max_k3_kl: 0.02}}\n")
    text = Page(write_report(run)).words.partition("against ideal ranges")[2]
    assert "mismatch/rollout_is_eff_sample_size 0.2 broken > 0.8 1 1 3 1 / mean((w / mean w)²)" in text
    assert "mismatch/k3_kl 0.03 broken ≤ 0.01 0 3 3 " in text
    assert "reward/mean" not in text.partition("Resolved configuration")[0]
