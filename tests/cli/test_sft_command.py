"""SFT as it is typed: the run, its log, report and tracker, explain, compare and a sweep."""

import importlib
import json
import re
import shutil

import pytest
import yaml

from tests.cli.conftest import printed
from tests.prepare.published import write_parquet
from tests.runtime.offline import tiny_sft


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """A folder with a recipe and its run, read-only by agreement, what the command printed and what a tracker got."""
    top = tmp_path_factory.mktemp("sft")
    recorder = importlib.import_module("tests.view.trackers.recorder")  # as the recipe imports it
    monitor = "monitor=[tests.view.trackers.recorder:Recorder]"
    (top / "mine.yaml").write_text(yaml.safe_dump(tiny_sft.recipe(tiny_model("llama"), top / "rows")))
    out = printed(top, "train", "mine.yaml", "folder=runs/b", monitor)
    return top, out, recorder.SESSIONS[-1].logged


@pytest.fixture
def run(finished, here):
    """A copy of them in the current folder."""
    shutil.copytree(finished[0], here, dirs_exist_ok=True)
    return "runs/b"


@pytest.mark.slow
def test_the_log_the_report_and_the_tracker_of_a_run(finished):
    top, out, logged = finished
    assert "step = 4 examples → micro-batches ≤ 100 tokens → 1 update" in out
    assert "eval  before   loss 6.862  5 examples  95 % 6.739–6.985" in out
    assert "sample  What is 50 + 2? → " in out and "step   4/4   loss 4.3" in out
    assert "loss 6.862 → 4.790 (−2.072)" in out
    assert "reward" not in out and "kl " not in out
    page = (top / "runs/b/report.html").read_text()
    assert "Held-out loss" in page and "class=better>−2.072" in page and "What is 50 + 2?" in page
    assert "no score" not in page and "Mean reward" not in page and "<dt>completions</dt>" not in page
    names = {name for _, metrics in logged for name in metrics}
    assert {"loss", "epoch", "lr"} <= {name.rpartition("train/")[2] for name in names}, names
    assert any(name.endswith("loss/low") for name in names), names


@pytest.mark.slow
def test_a_resume_by_the_folder_alone(run, done, proxima):
    out = done("train", run, "--resume", "train.steps=5", "--quiet")
    assert "done  5 steps" in out
    code, _, err = proxima("eval", run, "--out", "eval")
    assert code == 2 and "--task gsm8k" in err


def test_a_named_set_is_sampled_as_the_command_line_says(run, done, here):
    """The recipe's own `eval` section is that of SFT, which knows no sampling; the values are not its own."""
    write_parquet(here / "data/amc23/test.parquet", [{"question": "What is 1 + 1?", "answer": "2"}])
    words = "--task amc23 --max-tokens 5 --temperature 0.7 --top-p 0.9 --samples 2 --out o runtime.threads=1"
    assert "2 samples per question at temperature 0.7, top_p 0.9, up to 5 tokens" in done("eval", run, *words.split())


def test_a_run_answers_a_task_of_the_command_line(run, done, here):
    words = (
        "eval.task={kind: arithmetic, size: 9, split: test}",
        "eval.limit=2",
        "reward=number",
        "eval.sampling.max_tokens=3",
    )
    done("eval", run, *words, "runtime.threads=1", "--out", "o")
    suite = json.loads((here / "o" / "result.json").read_text())["suites"]["arithmetic"]
    assert (suite["questions"], suite["sampling"]["max_tokens"], suite["sampling"]["temperature"]) == (2, 3, 0.0)


@pytest.mark.slow
def test_explain_shows_the_batch_and_a_plan_memory_and_time(run, done):
    out = done("explain", "mine.yaml")
    assert "4 examples → about 2 micro-batches of ≤ 100 tokens → 1 update" in out
    assert "examples have about 42 tokens" in out
    out = done("explain", "mine.yaml", "--json")
    assert json.loads(out)["batch"]["examples"] == 4
    out = done("plan", "mine.yaml", "--devices", "2xH100-80G")
    assert "layout   2 ranks (full), on 2xH100-80G\n" in out and "memory   fits: " in out
    assert "for examples of 42 tokens on average" in out and "generate" not in out and " steps, without" in out


@pytest.mark.slow
def test_a_sweep_and_its_comparison(run, here, done, proxima):
    (here / "sweep.yaml").write_text("recipe: mine.yaml\nseeds: [1, 2]\ngrid: {train.optimizer.lr: [1e-9, 3e-3]}\n")
    out = done("sweep", "sweep.yaml", "--dry-run")
    assert "proxima train " in out
    assert proxima("train", "mine.yaml", "folder=runs/a", "train.optimizer.lr=1e-9", "--quiet")[0] == 0
    code, out, _ = proxima("compare", "runs/a", run)
    out = " ".join(out.split())
    assert code == 0 and all(name in out for name in ("loss before", "best", "training loss", "train tok/s")), out
    assert "reward" not in out and "a 1 6.862 6.862 6.862 7.0" in out and "b 1 6.862 4.790 4.790 4." in out, out
    page = re.sub(r"<style>.*?</style>", "", (here / "compare.html").read_text(), flags=re.DOTALL)
    assert '"title": "loss"' in page and "Training figures" in page and "reward" not in page.lower()
