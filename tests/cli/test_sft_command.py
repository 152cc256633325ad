"""`proxima sft` as it is typed: the run, its log and report, the wrong command, explain, compare and a sweep."""

import importlib
import json
import re

import pytest

from proxima.cli.main import main
from tests.runtime.offline import tiny_sft

METHOD = tiny_sft  # whose recipe the fixture `file` writes


def test_a_run_with_its_log_and_its_report(file, tmp_path, capsys):
    assert main(["sft", str(file), f"folder={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "step = 4 examples → micro-batches ≤ 100 tokens → 1 update" in out
    assert "eval  before   loss 6.862  5 examples  95 % 6.739–6.985" in out
    assert "sample  What is 50 + 2? → " in out and "step   4/4   loss 4.3" in out
    assert "loss 6.862 → 4.790 (−2.072)" in out
    assert "reward" not in out and "kl " not in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Held-out loss" in page and "class=better>−2.072" in page and "What is 50 + 2?" in page
    assert "no score" not in page and "Mean reward" not in page and "<dt>completions</dt>" not in page


def test_the_wrong_command_names_the_right_one(file, tmp_path, capsys):
    assert main(["train", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"is a recipe of `proxima sft`, because it has a section 'sft'; run proxima sft {file}" in error
    assert main(["sft", "quickstart"]) == 2
    error = capsys.readouterr().err
    assert "is a recipe of `proxima train`, because it has no section 'sft'; run proxima train" in error
    assert error.endswith(", or write `sft: {}` into it\n")


def test_a_resume_by_the_folder_alone(file, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["sft", str(file), f"folder={run}", "train.steps=2", "--quiet"]) == 0
    assert main(["train", run, "--resume"]) == 2
    assert f"run proxima sft {run} --resume\n" in capsys.readouterr().err
    assert main(["sft", run, "--resume", "train.steps=3", "--quiet"]) == 0
    assert "done  3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs=2", "train.epochs=2"),
        ("sft.loss_on=prompt", "sft.loss_on=prompt"),
        ("sft.completion=answer", "sft.completion=answer (command line): names no column: every row would have this"),
        ("sft.completion={answer", "sft.completion={answer (command line): is not a template: expected '}'"),
        ("train.prompts_per_step=3", "'train' has no field 'prompts_per_step'"),
        ("train.examples_per_step=0", "train.examples_per_step=0 (command line): must be >= 1"),
        ("eval.samples=-1", "eval.samples=-1"),
        ("algorithm=grpo", "has no field 'algorithm'"),
    ],
)
def test_bad_values_are_one_line(override, message, file, capsys):
    assert main(["sft", str(file), override]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_explain_shows_batch_memory_and_time(file, capsys):
    assert main(["explain", str(file)]) == 0
    out = capsys.readouterr().out
    assert "4 examples → about 2 micro-batches of ≤ 100 tokens → 1 update" in out
    assert "examples have about 42 tokens" in out and "memory   about " in out and " a step, " in out
    assert main(["explain", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["examples"] == 4


def test_a_sweep_and_its_comparison(file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text("recipe: mine.yaml\nseeds: [1, 2]\ngrid: {train.optimizer.lr: [1e-9, 3e-3]}\n")
    assert main(["sweep", "sweep.yaml", "--dry-run"]) == 0
    assert "proxima sft " in capsys.readouterr().out
    for lr, name in (("1e-9", "a"), ("3e-3", "b")):
        assert main(["sft", str(file), f"folder=runs/{name}", f"train.optimizer.lr={lr}", "--quiet"]) == 0
    assert main(["compare", "runs/a", "runs/b"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(name in out for name in ("loss before", "best", "training loss", "train tok/s")), out
    assert "reward" not in out and "a 1 6.862 6.862 6.862 7.0" in out and "b 1 6.862 4.790 4.790 4." in out, out
    page = re.sub(r"<style>.*?</style>", "", (tmp_path / "compare.html").read_text(), flags=re.DOTALL)
    assert "Training loss" in page and "Training figures" in page and "reward" not in page.lower()


def test_the_run_can_be_evaluated_by_its_name(file, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["sft", str(file), f"folder={run}", "train.steps=1", "--quiet"]) == 0
    assert main(["eval", run, "--out", str(tmp_path / "eval")]) == 2
    assert "--task gsm8k" in capsys.readouterr().err


def test_a_tracker_gets_steps_and_evaluations(file, tmp_path):
    recorder = importlib.import_module("tests.view.trackers.recorder")  # as the recipe imports it
    kind = "tests.view.trackers.recorder:Recorder"
    assert main(["sft", str(file), f"folder={tmp_path / 'run'}", "train.steps=1", f"monitor=[{kind}]", "--quiet"]) == 0
    names = {name for _, metrics in recorder.SESSIONS[-1].logged for name in metrics}
    assert {"loss", "epoch", "lr"} <= {name.rpartition("train/")[2] for name in names}, names
    assert any(name.endswith("loss/low") for name in names), names


def test_a_sweep_runs(file, tmp_path, monkeypatch, capsys, warm_processes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text("recipe: mine.yaml\nseeds: [1]\nset: {train.steps: 2}\n")
    assert main(["sweep", "sweep.yaml"]) == 0
    assert main(["compare", "runs/sweep"]) == 0
    out = capsys.readouterr().out
    assert "loss before" in out and "5.825" in out, out


@pytest.mark.parametrize(
    ("name", "recipe"), [("sft", "cpu/sft"), ("reward_model", "cpu/reward"), ("lora", "quickstart")]
)
def test_list_says_where_the_fields_of_a_section_are(name, recipe, capsys):
    assert main(["list", name]) == 2
    assert f"is a section, not a slot: its fields are in docs/reference.md, and in `proxima explain {recipe}`" in (
        capsys.readouterr().err
    )
