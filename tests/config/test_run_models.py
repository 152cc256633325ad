"""A run folder as a model is the model of its newest checkpoint."""

import json

from proxima.config.resolution import resolve
from proxima.config.validate import check


def run_folder(tmp_path, steps):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("model: {path: base}\n")
    (run / "metrics.jsonl").write_text("")
    for step in steps:
        folder = run / "checkpoints" / f"{step:06d}"
        (folder / "model").mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step, "trainer": {}, "torch_rng": ""}))
    return run


def test_the_newest_checkpoint_is_the_model(tmp_path):
    run = run_folder(tmp_path, [5, 20, 10])
    newest = str(run / "checkpoints" / "000020" / "model")
    resolved = resolve("quickstart", [f"model.path={run}"])
    assert resolved.config.model.path == newest
    (entry,) = [entry for entry in resolved.entries if entry.path == "model.path"]
    assert entry.where == f"command line, newest checkpoint of {run}"
    assert resolve("quickstart", [f"model.path={newest}"]).config.model.path == newest


def test_a_run_is_an_adapter_or_a_reward_model_too(tmp_path):
    run = run_folder(tmp_path, [5])
    newest = str(run / "checkpoints" / "000005" / "model")
    rewards = f"reward=[number, {{kind: model, path: {run}}}]"
    config = resolve("quickstart", [f"model.lora.path={run}", rewards]).config
    assert config.model.lora.path == newest and config.reward[1].path == newest


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    resolved = resolve("quickstart", [f"model.path={run_folder(tmp_path, [])}"])
    said = [str(problem) for problem in check(resolved) if problem.path == "model.path"]
    assert len(said) == 1 and "is a run without a checkpoint; wait for one" in said[0]


def test_other_paths_are_left_alone(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    assert resolve("quickstart", [f"model.path={tmp_path}"]).config.model.path == str(tmp_path)
