"""report.html: the figures are in it, foreign text stays text, and it is whole or not there."""

import errno
import html.parser
import json
import re
import shutil
from dataclasses import replace

import pytest

from proxima.data import Completion, Episode, Group, Score, Span, ToolCall
from proxima.data import atomic_files as files
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_evals, write_rollouts
from proxima.train.completion_record import CompletionRecord
from proxima.view.chart import write_figure
from proxima.view.curve import LearningCurve
from proxima.view.microscope import PORT
from proxima.view.page import HERE
from proxima.view.report import batch_arithmetic, headline, write_report
from proxima.view.report_samples import held_out_questions, representative
from tests.view.synthetic import CONFIG, evals, evaluation, group, make_run, record, records
from tests.view.test_chart import paths

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
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # well nested

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with its report, whose charts are drawn."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "quickstart", steps=40)
    return folder, Page(write_report(folder.path))


def recorded(path, records, config="seed: 1\n"):
    """A run of these records alone, and its report."""
    folder = RunFolder(path)
    folder.begin()
    folder.write_config(config)
    for line in records:
        folder.append_metrics(line)
    folder.release()
    return folder, Page(write_report(folder.path))


def test_headline_and_tiles(whole):
    _, page = whole
    for text in (
        "cppo on SmolLM2-135M-Instruct",
        "done 40 of 40 steps seed 1 quickstart",
        "0.125 → 0.940 +0.815",
        "25/200 right before the first step 95 % interval 0.086 to 0.178",
        "188/200 right after step 40 95 % interval 0.898 to 0.965",
        "duration 2m 43s",
        "generate 412 tok/s",
        "train 251 tok/s",
        "completions 2,560",
        "peak memory 3.4 GiB",
        "step = 8 prompts × 8 completions = 64 sequences → micro-batches ≤ 2,048 tokens → 1 update",
    ):
        assert text in page.words
    assert not page.open


def test_curves_hold_the_records(whole):
    folder, page = whole
    titles = ["Accuracy", "Entropy", "KL", "Masked", "Length", "Truncated", "Gradient norm", "Engine against trainer"]
    titles += ["Loss", "Learning rate", "Speed", "Where the time goes", "Time per phase"]
    places = [page.words.index(f" {title} ") for title in titles]
    assert places == sorted(places)
    assert page.tags.count("svg") == page.tags.count("figure") == len(page.data["charts"]) == 12
    assert page.data["steps"] == list(range(1, 41))
    assert page.data["charts"][0] == [[f"{record(step)['reward/mean']:.3f}" for step in range(1, 41)]]
    assert page.data["charts"][3] == [[f"{100 * record(step)['masked_fraction']:.2f} %" for step in range(1, 41)]]
    assert len(page.data["charts"][-1]) == 5  # four phases and the rest
    for title in ("Reward parts", "Prompts", "Acceptance", "Generation batches", "Age", "Completions"):
        assert f" {title} " not in page.words  # its steps use what they generate
    assert [len(line) for line in paths(folder.report.read_text(), "raw")][:2] == [40, 40]


def test_questions_samples_counts_config_environment(whole):
    _, page = whole
    assert "5 of 200 held-out questions 163 became right and 0 became wrong; these come first." in page.words
    assert (
        'What is 8 + 4? expected {"value": 12} before wrong The sum of the two numbers you gave me is 23 after right 12'
        in page.words
    )
    assert len(page.data["samples"]) == 40
    first = page.data["samples"][0][0]
    assert (first["question"], first["answer"], first["of"]) == ("What is 1 + 1?", '{"value": 2}', 8)
    assert {c["mark"] for c in first["completions"]} <= {"right", "wrong"} and len(first["completions"]) == 4
    invalid = page.data["samples"][11][0]["completions"][0]
    assert (invalid["reward"], invalid["note"]) == ("invalid", "timed out after 5 s")
    skipped = sum(record(s)["skipped_zero_advantage"] for s in range(1, 41))
    assert f"advantage 0 {skipped} {100 * skipped / 2560:.1f} %" in page.words
    assert "invalid 3 0.1 %" in page.words
    assert "delta: 0.2 command line, over 0.15 of the preset" in page.words
    assert "machine.cores" in page.words and "packages.torch" in page.words


def refilled(step, new, used, uniform, carried, **more):
    counts = {
        "prompts": new,
        "completions": 8 * new,
        "prompts_generated": new,
        "prompts_used": used,
        "prompts_carried": carried,
    }
    counts |= {
        "prompts_dropped_uniform": uniform,
        "dropped/uniform_group": 8 * uniform,
        "gen_batches": 2,
        "age/mean": 0.5,
        "age/max": 1,
    }
    return record(step, **(counts | {"dropped/uniform_groups": 0, "reward/part/overlong": -0.25} | more))


def test_dynamic_sampling_pruning_and_reward_parts_are_drawn(tmp_path):
    records = [refilled(1, 100, 16, 83, 1), refilled(2, 63, 16, 38, 10) | {"dropped/pruned": 96}]
    _, page = recorded(tmp_path / "run", records)
    for title in ("Reward parts", "Completions", "Prompts", "Acceptance", "Generation batches", "Age"):
        assert f" {title} " in page.words
    # 63 + 1 that came in = 16 + 38 + 10
    assert [["16", "16"], ["83", "38"], ["1", "10"], ["100", "63"], ["0", "1"]] in page.data["charts"]
    assert [["17.0 %", f"{100 * (17 + 25) / 163:.1f} %"]] in page.data[
        "charts"
    ]  # what no selection dropped: 100 - 83, 63 - 38
    assert [["800", "504"], ["128", "32"]] in page.data[
        "charts"
    ]  # 16 groups of 8, then without the 96 that were pruned
    parts = [[f"{record(step)['reward/mean']:.3f}" for step in (1, 2)], ["-0.250", "-0.250"]]
    assert parts in page.data["charts"]


def beside(step, **more):
    """Of an asynchronous run."""
    lags = (
        {"lag/0": 0.25, "lag/1": 0.75} if step < 3 else {f"lag/{n}": share for n, share in enumerate((0.5, *[0.1] * 5))}
    )
    facts = {"async/queue": step, "async/running": 30 - step, "idle/trainer": 0.05, "idle/engine": 0.01 * step}
    return record(step, **{"age/mean": 0.5, "age/max": 2, "tokens/trained": 100 * step} | facts | lags | more)


def test_queue_ages_lags_and_idle_shares_of_an_asynchronous_run(tmp_path):
    _, page = recorded(tmp_path / "run", [beside(step) for step in (1, 2, 3)])
    section = page.words.partition("Where the time goes")[2]
    places = [section.index(f" {title} ") for title in ("Queue", "Age", "Idle", "Lag", "Time per phase")]
    assert places == sorted(places) and page.words.count(" Age ") == 1
    queue, age, idle, lag, _ = page.data["charts"][-5:]
    assert queue == [["1", "2", "3"], ["29", "28", "27"]] and age == [["0.50"] * 3, ["2.00"] * 3]
    assert idle == [["5.0 %"] * 3, ["1.0 %", "2.0 %", "3.0 %"]]
    assert [texts[0] for texts in lag] == ["25.0 %", "75.0 %", "0.0 %", "0.0 %", "0.0 %"]
    assert [texts[2] for texts in lag] == ["50.0 %", "10.0 %", "10.0 %", "10.0 %", "20.0 %"]  # lags 4 and 5 are one
    # weighted by the tokens of the steps: (100 + 200) * .25 + 300 * .5 of 600
    assert "over the run lag 0 37.5 %, lag 1 42.5 %, lag 2 5.0 %, lag 3 5.0 %, lag 4 or more 10.0 %" in page.words


def test_acceptance_is_of_the_prompts_that_were_judged(tmp_path):
    """The collector's own counts; a prompt without a score was not judged."""
    first = {"prompts_accepted": 0, "prompts_unscored": 20, "prompts_dropped_invalid": 20}
    second = {"prompts_accepted": 12, "prompts_unscored": 2, "prompts_dropped_invalid": 4}
    records = [refilled(1, 20, 0, 0, 0) | first, refilled(2, 50, 16, 30, 0) | second]
    _, page = recorded(tmp_path / "run", records)
    assert [["– %", "25.0 %"]] in page.data["charts"]
    assert [["0", "16"], ["0", "30"], ["20", "4"], ["20", "50"]] in page.data["charts"]


def test_failed_scores_are_said_at_the_top_and_before_is_no_result(tmp_path):
    folder = make_run(tmp_path / "run", steps=2, finished=False)
    folder.append_metrics(evaluation(2, "after", 0) | {"accuracy": None, "invalid": 200})
    failed = [group(uid, ["a", "b"], [True, False], failed=(0, 1)) for uid in range(3)]
    write_rollouts(folder.rollout_file(2), 2, failed, records(failed))
    page = Page(write_report(folder.path))
    assert "200 of 400 held-out answers (50.0 %) have no score." in page.words
    assert "The latest reasons: timed out after 5 s (6 ×) ." in page.words
    assert page.words.index("have no score") < page.words.index("Held-out accuracy")
    assert "0.125 → – " in page.words and "after step 2: unknown: 200 of 200 answers have no score" in page.words


def test_the_warnings_of_the_run_are_in_a_box(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    messages = [
        (0, 0, "a <b>", 1),
        (2, 4, "long", 3),
        (1, 4, "odd", 2),
        (5, 5, "late", 1),
        (1, None, "of an older run", 2),
    ]
    warnings = [dict(zip(("step", "last", "text", "times"), entry, strict=True)) for entry in messages]
    del warnings[-1]["last"]
    folder.write_summary({"status": "done", "steps": 5, "warnings": warnings})
    words = Page(write_report(folder.path)).words
    assert (
        "Warnings a <b> (before the first step) long (at steps 2 to 4, not since) odd (at steps 1 to 4 (2 times), not "
        in words
    )
    assert "late (at step 5, still at the last step) of an older run (first at step 1, 2 times)" in words
    assert words.index("25/200 right") < words.index("Warnings a <b>")  # the result comes first


def test_no_accuracy_at_all(tmp_path):
    _, page = recorded(tmp_path / "run", [evaluation(0, "before", 0) | {"accuracy": None}, record(1)])
    assert "The held-out evaluations have no score: no reward gives it." in page.words


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


def test_a_run_that_failed_before_its_first_evaluation_is_not_told_to_set_what_is_set(tmp_path):
    folder, page = recorded(tmp_path / "run", [record(1)])
    assert "There was no held-out evaluation: set eval.task" in page.words
    folder.write_config("eval:\n  task:\n    kind: arithmetic\n")
    words = Page(write_report(folder.path)).words
    assert "set eval.task" not in words and "no held-out evaluation yet" in words


def row(sample, reward, text="x"):
    return {"sample": sample, "reward": reward, "text": text}


@pytest.mark.parametrize(
    ("group", "shown"),
    [
        ([row(i, 0.0, "same") for i in range(7)] + [row(7, 1.0)], [7, 0, 1, 2]),  # two texts only: ties come too
        ([row(i, -float(i), str(i)) for i in range(8)], [0, 2, 5, 7]),
        ([row(0, 0.0, "a"), row(1, None, "b"), row(2, 1.0, "c")], [1, 2, 0]),
        ([row(i, None) for i in range(6)], [0, 1, 2, 3]),
        ([row(0, 0.0, "a"), row(1, 0.0, "a"), row(2, 0.0, "b"), row(3, 0.5, "c"), row(4, 1.0, "d")], [4, 3, 0, 2]),
    ],
)
def test_the_completions_shown_span_the_group(group, shown):
    assert [row["sample"] for row in representative(group)] == shown


def test_it_asks_the_network_for_nothing(whole):
    _, page = whole
    assert not {"img", "link", "iframe", "object"} & set(page.tags)
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset")]
    links = [value for _, name, value in page.attributes if name == "href"]  # within the page, and to a viewer here
    assert all(link.startswith(("#", f"http://127.0.0.1:{PORT}/#/0")) for link in links)
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    style = (HERE / "report.css").read_text()
    assert "url(" not in style and "@import" not in style


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


def test_hostile_text_stays_text(tmp_path):
    folder = make_run(tmp_path / HOSTILE.replace("/", "_").replace("\x1b", "")[:60], steps=2)
    evil = [group(uid, [HOSTILE, HOSTILE], [True, False], question=HOSTILE, failed=(1,)) for uid in range(3)]
    write_rollouts(folder.rollout_file(2), 2, evil, records(evil))
    write_evals(folder.eval_file(2, "after"), 2, evil)
    write_evals(folder.eval_file(0, "before"), 0, evil)
    folder.write_config(CONFIG + f"note: {json.dumps(HOSTILE)}  # {HOSTILE.splitlines()[0]}\n")
    folder.write_environment({"machine": HOSTILE, HOSTILE: [HOSTILE]})
    summary = json.loads(folder.summary.read_text())
    folder.write_summary(summary | {"status": "failed", "error": HOSTILE, "algorithm": HOSTILE, "model": HOSTILE})
    plain, page = Page(write_report(make_run(tmp_path / "plain", steps=2).path)), Page(write_report(folder.path))
    assert page.tags.count("script") == plain.tags.count("script") == 2
    assert "img" not in page.tags and "b" not in [t for t in page.tags if t not in plain.tags]
    assert page.scripts[1] == plain.scripts[1]
    assert page.data["samples"][-1][0]["completions"][0]["text"] == HOSTILE
    assert page.data["samples"][-1][0]["question"] == HOSTILE
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in page.words
    raw = folder.report.read_text(encoding="utf-8")
    assert raw.count("<script") == 2 and "alert(1)</script>" not in raw


def test_a_run_that_was_killed(tmp_path):
    folder = make_run(tmp_path / "run", steps=3, finished=False)
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind": "train", "st')
    content = folder.rollout_file(2).read_bytes()
    folder.rollout_file(2).write_bytes(content[: len(content) // 2])
    page = Page(write_report(folder.path))
    assert "unfinished 3 of 40 steps" in page.words
    assert "There is no summary.json" in page.words
    assert "Could not be read: 000002.parquet." in page.words
    assert len(page.data["samples"]) == 2
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
    assert "No step was made metrics.jsonl has no step." in page.words and page.data == {
        "steps": [],
        "charts": [],
        "samples": [],
    }
    folder.append_metrics({"kind": "train", "step": 1, "time": 3.0, "reward/mean": 0.25, "loss": float("nan")})
    page = Page(write_report(folder.path))
    assert "Mean reward, first and last step 0.25 → 0.25" in page.words
    assert page.data["charts"] == [[["0.250"]]]
    folder.append_metrics(evaluation(1, "after", 0))
    page = Page(write_report(folder.path))
    assert "0/200 right after step 1 95 % interval 0.000 to 0.019" in page.words


def test_a_long_run_stays_small(tmp_path, drawn):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.metrics.write_text("".join(json.dumps(record(step, 1000)) + "\n" for step in range(1, 1001)))
    page = Page(write_report(folder.path))
    assert page.data["charts"] and max(len(line) for line in paths(folder.report.read_text(), "(?:raw|line)")) == 400
    assert folder.report.stat().st_size < 500_000


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            {"selection": [{"kind": "drop_uniform_groups"}, {"kind": "prune", "rate": 0.75, "allocate": True}]},
            "step = 32 prompts × 8 completions = 256 sequences, 2 of 8 kept → micro-batches",
        ),
        (
            {"selection": [], "dynamic_sampling": {"oversample": 1.5}},
            "= 64 sequences, 12 prompts at a time until it is full → micro-batches",
        ),
        (None, "= 64 sequences → micro-batches"),
    ],
)
def test_the_arithmetic_has_pruning_and_dynamic_sampling(tmp_path, algorithm, words):
    train = {
        "prompts_per_step": 8,
        "completions_per_prompt": 8,
        "updates_per_step": 1,
        "epochs_per_step": 1,
        "tokens_per_micro_batch": 64,
    }
    assert words in batch_arithmetic({"train": train, "algorithm": algorithm}, RunFolder(tmp_path))
    damaged = {"train": train, "algorithm": {"selection": [{"kind": "prune", "rate": 7}]}}
    assert batch_arithmetic(damaged, RunFolder(tmp_path)) is None  # not the line of a run that prunes nothing


def test_what_is_no_run_or_is_damaged(tmp_path):
    with pytest.raises(ValueError, match="is not a run; give the folder"):
        write_report(tmp_path)
    folder = make_run(tmp_path / "run", steps=1)
    folder.summary.write_text('{"status": "do')
    with pytest.raises(ValueError, match=r"summary.json can't be read \(.*\); restore it, or delete it"):
        write_report(folder.path)


def test_a_full_disk_leaves_the_former_report(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=2)
    before = write_report(folder.path).read_bytes()
    folder.append_metrics(record(3))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(folder.path)
    assert folder.report.read_bytes() == before


def test_learning_curve(tmp_path, whole, drawn):
    folder, _ = whole
    out = write_figure(LearningCurve.of(folder.path), tmp_path / "curve.svg")
    svg = out.read_text(encoding="utf-8")
    spent = sum(record(s)["time/step"] for s in range(1, 41))
    assert f"held-out accuracy 0.125 → 0.940 of 200 questions in 40 steps, 2m {round(spent) - 120:02d}s" in svg
    assert [len(paths(svg, kind)) for kind in ("whisker", "raw", "line")] == [5, 1, 1] and svg.count("<use") == 5
    assert "<title>held-out accuracy" in svg and "prefers-color-scheme: dark" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no finished step"):
        LearningCurve.of(tmp_path / "empty")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_real_browser(tmp_path, drawn):
    """The page's own script runs under its policy and builds the samples; a hostile completion is shown, not run."""
    import subprocess

    folder = make_run(tmp_path / "run", steps=2)
    evil = [group(uid, [HOSTILE, "4"], [True, False]) for uid in range(2)]
    write_rollouts(folder.rollout_file(2), 2, evil, records(evil))
    report = write_report(folder.path)
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    dom = subprocess.run([*command, report.as_uri()], capture_output=True, text=True).stdout
    assert '<output id="shown-step">2</output>' in dom
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in dom  # inside a <pre> that the script made
    assert dom.count("<script") == 2 and "<img" not in dom


def test_no_question_changed_and_no_gain_is_not_green(tmp_path):
    folder = make_run(tmp_path / "run", steps=2, finished=False)
    folder.append_metrics(evaluation(2, "after", 25))
    write_evals(folder.eval_file(2, "after"), 2, evals(25))
    text = write_report(folder.path).read_text(encoding="utf-8")
    assert "No verdict of a question changed." in text and "these come first" not in text
    assert "<em>+0.000</em>" in text
    folder.append_metrics(evaluation(3, "after", 50))
    assert "<em class=better>+0.125</em>" in write_report(folder.path).read_text(encoding="utf-8")


def charts_of(path, records):
    """Title → (the values of each line at each step, the names of its legend, the ends of the axis), in order; how many
    are large; and the page."""
    folder, page = recorded(path, records)
    text = folder.report.read_text(encoding="utf-8")
    large = text[text.index('class="charts large"') :].partition('class="charts small"')[0].count("<figure")
    shown = {}
    for number, figure in enumerate(re.findall(r'<figure class="card" data-chart.*?</figure>', text, re.S)):
        legend = re.findall(r"</i>(.*?) <output>", figure)
        low, high = (float(re.search(rf'data-{end}="([-.\de]+)"', figure)[1]) for end in ("low", "high"))
        title = re.search("<h3>(.*?)</h3>", figure)[1]
        assert title not in shown  # no chart twice
        shown[title] = (page.data["charts"][number], legend, (low, high))
    assert len({str(values) for values, _, _ in shown.values()}) == len(shown)
    return shown, large, text


def test_three_charts_are_large_and_the_reward_is_no_second_accuracy(tmp_path):
    shown, large, _ = charts_of(tmp_path / "a", [record(step) for step in (1, 2, 3)])
    assert large == 3 and list(shown)[:4] == ["Accuracy", "Entropy", "KL", "Masked"] and "Reward" not in shown
    other = [record(step) | {"reward/mean": 0.5} for step in (1, 2)]
    shown, large, _ = charts_of(tmp_path / "b", other)
    assert large == 3 and list(shown)[:4] == ["Accuracy", "Reward", "Entropy", "KL"]
    assert shown["Reward"][2] == shown["Accuracy"][2] == (0, 1)  # not 0.25 … 0.75


def test_an_axis_ends_where_values_can(tmp_path):
    perfect = [
        record(step) | {"accuracy": 1.0, "reward/mean": 1.0 + (step == 2) / 4, "length/mean": 0.0} for step in (1, 2)
    ]
    shown, *_ = charts_of(tmp_path / "run", perfect)
    assert shown["Accuracy"][2] == (0, 1) and shown["Length"][2][0] == 0
    assert shown["Reward"][2] == (1, 1.3)  # a reward above 1: its axis is that of the values


def test_the_report_of_ppo_has_the_critic(tmp_path):
    critic = {"value/loss": 0.25, "value/mean": 0.5, "returns/mean": 0.75}
    critic |= {"value/explained_variance_prompt_mean": 0.125}
    records = [record(step) | critic | {"value/explained_variance": -3.0 + step} for step in (1, 2, 3)]
    shown, *_ = charts_of(tmp_path / "run", records)
    values, legend, ends = shown["Explained variance"]
    assert values == [["-2.000", "-1.000", "0.000"], ["0.125"] * 3]
    assert legend == ["critic", "prompt&#39;s mean"]
    assert ends == (-1, 1) and shown["Value loss"][0] == [["0.25"] * 3]
    assert shown["Values"][:2] == ([["0.500"] * 3, ["0.750"] * 3], ["critic", "returns"])


def played(uid, reward, forked=False, failure=""):
    """An episode of the group `uid`: a call, its answer, a call that can't be read, its answer, and an end."""
    facts = {"prompt_uid": uid, "sample": int(forked), "finish_reason": "stop", "temperature": 1.0}
    spans = (
        Span(
            role="assistant", tokens=2, text="let me", sampled=True, calls=(ToolCall(name="add", arguments={"a": 1}),)
        ),
        Span(role="tool", tokens=1, text="<b>2</b>"),
        Span(role="assistant", tokens=1, text="{", sampled=not forked, turn=1, unreadable=("no brace",), reward=-0.5),
        Span(role="tool", tokens=1, text="error: no brace", turn=1, error=True),
        Span(role="assistant", tokens=1, text="It is 2.", sampled=True, turn=2, reward=reward),
    )
    episode = Episode(spans=spans, reward=reward, cut="turns", attempts=2, forks=int(forked), failure=failure)
    values = {"sampled_log_prob": (-0.5,) * 6, "untruncated_log_prob": (-0.5,) * 6, "policy_version": (0,) * 6}
    sampled = tuple(span.sampled for span in spans for _ in range(span.tokens))
    main = Completion(
        **facts, **values, tokens=(1,) * 6, text="It is 2.", sampled=sampled, episode=episode, turn=int(forked)
    )
    if not forked:
        return main
    older = replace(main, turn=0, episode=replace(episode, spans=spans[:3], reward=None), tokens=(1,) * 4,
                    sampled=(False, False, False, True), sampled_log_prob=(-0.5,) * 4,
                    untruncated_log_prob=(-0.5,) * 4, policy_version=(0,) * 4, text="{")  # fmt: skip
    return replace(main, earlier=(older,))


def test_samples_of_episodes_are_shown_turn_by_turn(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    prompt = group(7, ["x"], [True]).prompt
    completions = (played(7, 0.25), played(7, 1.0, forked=True))
    scores = tuple(Score(value=value, parts={"environment": value}) for value in (0.25, 1.0))
    groups = [Group(prompt=prompt, completions=completions, scores=scores)]
    paths = [path for completion in completions for path in completion.paths]
    outcomes = {path.key: CompletionRecord(outcome="skipped_zero_advantage", advantage=0.0) for path in paths}
    write_rollouts(folder.rollout_file(1), 1, groups, outcomes)
    for label in ("before", "after"):
        write_evals(folder.eval_file(int(label == "after"), label), 1, groups)
    page = Page(write_report(folder.path))
    best, worst = page.data["samples"][0][0]["completions"]
    assert (best["name"], worst["name"], page.data["samples"][0][0]["of"]) == ("7.1.1", "7.0.0", 2)  # a row a sample
    assert [turn["role"] for turn in worst["turns"]] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn["calls"] for turn in worst["turns"][:2]] == [["add(a=1)"], []]
    assert worst["turns"][2]["unreadable"] == ["no brace"] and worst["turns"][2]["reward"] == "reward −0.50"
    assert worst["turns"][3]["error"] and worst["note"].endswith("cut by the limit of turns · begun 2 times")
    assert best["note"].endswith("begun 2 times · 1 fork")
    shown = folder.report.read_text(encoding="utf-8").partition("held-out questions</h2>")[2].partition("</section>")[0]
    assert "<code>→ add(a=1)</code>" in shown and "&lt;b&gt;2&lt;/b&gt;" in shown and '<li class="tool error">' in shown


def test_the_report_of_episodes_has_their_charts_and_links_to_each_in_the_viewer(tmp_path):
    facts = {"episode/turns/mean": 2.5, "episode/turns/max": 3, "episode/calls": 12, "episode/unreadable": 1}
    facts |= {f"episode/{name}": 0 for name in ("errors", "failed", "retried", "forks")}
    facts |= {"episode/cut": 4, "time/turns": 90.0, "time/environment": 6.0}
    shown, _, text = charts_of(tmp_path / "run", [record(step) | facts for step in (1, 2)])
    assert shown["Turns"][:2] == ([["2.5"] * 2, ["3.0"] * 2], ["mean", "longest"])
    assert shown["Tool calls"][:2] == ([["12"] * 2, ["1"] * 2], ["calls", "unreadable"])  # no line that is always 0
    assert shown["Failures in episodes"][:2] == ([["4"] * 2], ["cut by a limit"])
    assert shown["Where episodes wait"][0] == [["1m 30s"] * 2, ["6.0 s"] * 2]
    links = dict(re.findall(r'<h3>([^<]*)</h3>(?:(?!</figcaption>).)*href="([^"]*)"', text, re.DOTALL))
    viewer = f"http://127.0.0.1:{PORT}/#/0?q="
    assert links["Turns"] == f"{viewer}episode/turns" and links["Masked"] == f"{viewer}masked_fraction"
    assert links["Time per phase"] == f"{viewer}time/" and links["Where episodes wait"] == f"{viewer}time"


def example(step, **more):
    return {"kind": "train", "step": step, "time": step, "examples": 8, "loss": 0.625, "grad_norm": 1.5, **more}


def test_the_report_of_dpo_has_margins_and_accuracies(tmp_path):
    facts = {"rewards/accuracies": 0.75, "rewards/margins": 0.5, "rewards/chosen": 0.25, "rewards/rejected": -0.25}
    held_out = {"kind": "eval", "step": 2, "time": 2, "examples": 8, "accuracy": 0.625, "rewards/margins": 0.375}
    held_out |= {"answers": 8, "correct": 5}
    shown, large, _ = charts_of(tmp_path / "run", [*(example(n, **facts) for n in (1, 2)), held_out])
    assert large == 3 and list(shown)[:4] == ["Accuracy", "Margin", "Loss", "Implicit rewards"]
    assert shown["Accuracy"] == ([["0.750"] * 2], ["training", "held-out"], (0, 1))
    assert shown["Margin"][:2] == ([["0.500"] * 2], ["training", "held-out"])


def test_the_report_of_a_reward_model_has_margins_and_the_accuracy_of_length_alone(tmp_path):
    facts = {"accuracy": 0.75, "margin": 0.5, "reward_mean": 0.0, "reward_max": 1.0, "reward_min": -1.0}
    held_out = {"kind": "eval", "step": 2, "time": 2, "examples": 8, "accuracy": 0.625, "margin": 0.25}
    held_out |= {"length_only/accuracy": 0.5, "answers": 8, "correct": 5}
    shown, large, _ = charts_of(tmp_path / "run", [*(example(n, **facts) for n in (1, 2)), held_out])
    assert large == 3 and list(shown)[:4] == ["Accuracy", "Margin", "Loss", "Scores"]
    assert shown["Accuracy"][1] == ["training", "held-out", "held-out, by length alone"]
    assert shown["Margin"][:2] == ([["0.500"] * 2], ["training", "held-out"])


def test_an_accuracy_that_is_no_count_is_of_examples_without_a_verdict():
    """Ties of DPO before the first step count half."""
    tied = {"kind": "eval", "step": 0, "examples": 8, "accuracy": 0.5, "answers": 8, "correct": 0}
    (side,) = headline([tied])["sides"]
    assert (side["of"], side["when"]) == ("8 examples", "before the first step")
