"""Recipes by name, in a folder without a checkout: which one is meant, and `proxima init`."""

import json
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.system.user_files import shipped_folder
from tests.reward.make import completions, prompt


@pytest.mark.slow
def test_a_name_is_a_recipe_of_proxima(here, proxima):
    resolved = resolve("cpu/dapo")
    assert resolved.config.algorithm.preset == "dapo" and resolved.recipe == "cpu/dapo"
    assert resolved.entry("reward.1.kind").source == "cpu/dapo:8"
    assert resolved.entry("train.steps").source.startswith("quickstart:")  # which it extends
    code, out, err = proxima("explain", "cpu/dapo", "--yaml")
    assert (code, err) == (0, "") and out.startswith("# Resolved from cpu/dapo;")
    code, out, _ = proxima("explain", "quickstart", "--json")
    assert json.loads(out)["header"].startswith("A first run: SmolLM2-135M-Instruct learns to add")
    last = "it is not downloaded yet; `proxima train` downloads it (93 MB)"
    assert any(note.endswith(last) for note in json.loads(out)["notes"])


def test_a_file_of_that_name_wins_and_it_is_said(here, proxima, recipe):
    recipe(name="quickstart.yaml")
    code, out, err = proxima("explain", "quickstart", "--yaml")
    assert code == 0 and "slots: 8 " in out
    assert err == "note: quickstart is quickstart.yaml of this folder, not the recipe that comes with proxima\n"
    assert proxima("explain", "quickstart.yaml", "--yaml")[2] == ""  # not ambiguous
    assert proxima("explain", "cpu/dapo", "--yaml")[2] == ""
    (here / "cpu").mkdir()  # a folder is no recipe
    assert resolve("cpu/dapo").recipe == "cpu/dapo"


def test_in_the_folder_of_the_recipes_the_file_is_the_recipe(monkeypatch, proxima):
    monkeypatch.chdir(shipped_folder())
    code, _, err = proxima("explain", "quickstart", "--yaml")
    assert (code, err) == (0, "")


def test_a_sweep_by_name(here, proxima):
    code, out, err = proxima("sweep", "sweeps/grpo_cppo", "--dry-run")
    assert (code, err) == (0, "")
    assert "runs/grpo_cppo/algorithm=cppo/seed-2" in out
    (here / "mine.yaml").write_text("recipe: quickstart\nset: {algorithm: dapo, train.steps: 3}\n")
    code, out, err = proxima("sweep", "mine.yaml", "--dry-run")
    assert (code, err) == (0, "") and 'algorithm.preset="dapo"\' train.steps=3' in out


@pytest.mark.parametrize("words", [["--algorithm=grpo", "--train.steps=7"], ["algorithm=grpo", "--train.steps=7"]])
def test_a_field_with_dashes_is_the_field(here, proxima, words):
    code, out, err = proxima("explain", "quickstart", "--yaml", *words)
    assert (code, err) == (0, "")
    assert "preset: grpo " in out and "steps: 7 " in out


@pytest.mark.slow
def test_init_writes_what_runs_and_overwrites_nothing(here, done, proxima, refusal, monkeypatch, tiny_model):
    out = done("init", "mine")
    assert out.endswith("\ncd mine && proxima train recipe.yaml\n")
    files = {path.name for path in (here / "mine").iterdir()}
    assert files == {"recipe.yaml", "reward.py", "train.jsonl", "test.jsonl"}
    assert out.splitlines()[:4] == [f"wrote mine/{name}" for name in sorted(files)]
    monkeypatch.chdir(here / "mine")
    texts = [Path(name).read_text().splitlines() for name in ("train.jsonl", "test.jsonl")]
    questions = [{json.loads(line)["question"] for line in lines} for lines in texts]
    assert questions[0].isdisjoint(questions[1]) and [len(part) for part in questions] == [48, 24]
    words = ["train.steps=1", "train.prompts_per_step=2", f"model.path={tiny_model('llama')}", "eval.limit=4"]
    words.append("reward.1={kind: format, pattern: '[!-?]', weight: 0.1}")  # so tiny a model is never right
    code, _, err = proxima("train", "recipe.yaml", *words, "engine.dtype=float32", "folder=run", "--quiet")
    assert (code, err) == (0, "")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["eval"]["after"]["questions"] == 4 and summary["eval"]["after"]["accuracy"] is not None
    Path("reward.py").write_text("mine")
    files = "recipe.yaml, reward.py, test.jsonl, train.jsonl"
    assert refusal("init") == f"error: {files}: exists; nothing was written; give another folder"
    assert Path("reward.py").read_text() == "mine"


def test_the_starters_reward():
    from proxima.cli.starter.reward import brief_answer

    texts = completions("Yes.", "Yes, it is.", "No.", "")
    values = [brief_answer(prompt("yes"), completion) for completion in texts]
    assert [(round(value["value"], 3), value["correct"]) for value in values] == [
        (1.0, True),
        (0.667, True),
        (0.0, False),
        (0.0, False),
    ]
