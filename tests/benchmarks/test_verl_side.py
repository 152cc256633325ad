"""verl's side of a step: a stand-in for verl shows that it is held after each step, and that nothing of it stays."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.step_vs_trl import verl_side

SETTINGS = {"prompts": 4, "completions": 2, "updates": 2, "max_tokens": 3, "steps": 3, "seed": 1, "lr": 1e-5}
SETTINGS |= {"bf16": True, "gradient_checkpointing": False, "system": "Be brief.", "high": 99, "second_high": 9}

# what verl does, as far as it concerns the side: external modules are imported, and each step is logged
STAND_IN = {
    "__init__.py": """
import importlib, os
for name in os.environ["VERL_USE_EXTERNAL_MODULES"].split(","):
    importlib.import_module(name)
""",
    "utils/__init__.py": "",
    "utils/tracking.py": """
class Tracking:
    def log(self, data, step, backend=None):
        print(step, data, flush=True)
""",
    "trainer/__init__.py": "",
    "trainer/main_ppo.py": """
import os, sys
from verl.utils.tracking import Tracking
words = dict(word.split("=", 1) for word in sys.argv[1:])
with open(os.environ["HELD_VERL_FOLDER"] + "/logged", "w") as file:
    for step in range(1, int(words["trainer.total_training_steps"]) + 1):
        file.write(str(step))
        file.flush()
        metrics = {"timing_s/step": step / 10, "critic/score/mean": 0.5, "response_length/mean": 3, "note": "text"}
        Tracking().log(data=metrics, step=step)
sys.exit("out of steps")
""",
}


@pytest.fixture
def verl(tmp_path, monkeypatch):
    for name, code in STAND_IN.items():
        file = tmp_path / "peer" / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "peer"))


def words(tmp_path, **changed):
    settings = SETTINGS | {"model": str(tmp_path)} | changed
    return verl_side.overrides(settings, tmp_path / "prompts.parquet", flash=False)


@pytest.mark.slow
def test_it_is_held_after_each_step(verl, tmp_path):
    trainer = verl_side.Trainer(words(tmp_path), tmp_path)
    try:
        assert verl_side.measured(trainer.next()) == {"seconds": 0.1, "reward": 0.5, "length": 3.0}
        time.sleep(0.2)
        assert (tmp_path / "logged").read_text() == "1"  # it has not gone on
        assert trainer.next()["timing_s/step"] == 0.2 and trainer.next()["timing_s/step"] == 0.3
        with pytest.raises(RuntimeError, match="verl ended with exit code 1 before step 4"):
            trainer.next()
    finally:
        trainer.end()


def test_one_that_is_held_ends(verl, tmp_path):
    trainer = verl_side.Trainer(words(tmp_path), tmp_path)
    trainer.next()
    trainer.end()
    assert trainer.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(trainer.process.pid, 0)


def test_the_job_in_its_words(tmp_path):
    said = dict(word.split("=", 1) for word in words(tmp_path, bf16=False))
    assert said["actor_rollout_ref.actor.ppo_mini_batch_size"] == "2"  # prompts of an update
    assert said["actor_rollout_ref.rollout.n"] == "2" and said["data.train_batch_size"] == "4"
    assert {value for name, value in said.items() if name.endswith("dtype")} == {"float32"}
    assert said["actor_rollout_ref.model.use_remove_padding"] == "False"
    assert Path(said["reward.custom_reward_function.path"]) == Path(verl_side.__file__)
    with_flash = verl_side.overrides(SETTINGS | {"model": "."}, tmp_path, flash=True)
    assert "actor_rollout_ref.model.use_remove_padding=True" in with_flash
    assert not any("attn_implementation" in word for word in with_flash)


@pytest.mark.parametrize("text, score", [("7", 1.0), ("3 + 4 = 7.", 1.0), ("7 or 8", 0.0), ("-7", 0.0), ("none", 0.0)])
def test_its_reward_reads_the_last_number(text, score):
    assert verl_side.compute_score("addition", text, "7", {}) == score


def test_its_prompts_are_those_of_the_job(tmp_path):
    datasets = pytest.importorskip("datasets")
    verl_side.write_prompts(SETTINGS, tmp_path / "prompts.parquet")
    rows = datasets.Dataset.from_parquet(str(tmp_path / "prompts.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 12
    for row in rows:
        a, b = (int(word) for word in row["prompt"][1]["content"].removesuffix("?").split() if word.isdigit())
        assert row["reward_model"]["ground_truth"] == str(a + b) and row["prompt"][0]["content"] == "Be brief."
