"""A recipe, a run folder or a file of records from somebody else: commands that read it run nothing that it names."""

import json
import shutil
import sys
from importlib.util import find_spec

import pytest
import yaml

from proxima.config.json_schema import catalogue

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("canary").touch()
from dataclasses import dataclass
from proxima.core import PpoClip
from proxima.reward.base import WeightedReward
def f(prompt, completion): return 1.0
def g(groups): return [[1.0 for _ in group.completions] for group in groups]
@dataclass(frozen=True)
class Mine(PpoClip): pass
@dataclass(frozen=True, kw_only=True)
class Reward(WeightedReward):
    def score(self, prompt, completions): raise NotImplementedError
"""

FIELDS = {  # by what names the code: the override
    "function, a file": "reward={kind: function, path: ./evil.py:f}",
    "function, a module": "reward={kind: function, path: 'evil:f'}",
    "function_batch": "reward=[number, {kind: function_batch, path: ./evil.py:g}]",
    "reward class": "reward=evil:Reward",
    "surrogate": "algorithm.surrogate=evil:Mine",
    "advantage": "algorithm.advantage=evil:Mine",
    "aggregate": "algorithm.aggregate=evil:Mine",
    "correction": "algorithm.correction=[evil:Mine]",
    "selection": "algorithm.selection=[evil:Mine]",
    "reference_kl": "algorithm.reference_kl=evil:Mine",
    "penalty": "algorithm.penalty=[evil:Mine]",
    "preference": "algorithm.preference=evil:Mine",
    "divergence": "algorithm.distillation={path: other, divergence: evil:Mine}",
    "teacher engine": "algorithm.distillation={path: other, engine: evil:Mine}",
    "reference_engine": "algorithm.reference_engine=evil:Mine",
    "task": "task=evil:Mine",
    "eval task": "eval.task=evil:Mine",
    "eval reward": "eval.sets=[{name: more, task: {kind: arithmetic}, reward: [{kind: function, path: ./evil.py:f}]}]",
    "engine": "engine=evil:Mine",
    "critic": "critic=evil:Mine",
    "optimizer": "train.optimizer=evil:Mine",
    "monitor": "monitor=[evil:Mine]",
    "placement": "placement=evil:Mine",
    "sharding": "placement={kind: torchrun, sharding: evil:Mine}",
    "replayed run": "rollouts=evil_run",
}


@pytest.fixture
def canary(here, recipe, monkeypatch):
    """The file that an import of `evil` writes; the current folder has `evil.py`, and recipes that need none of it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("evil", None)
    (here / "evil.py").write_text(EVIL)
    tree = yaml.safe_load((here / recipe()).read_text())
    (here / "evil_run").mkdir()
    stored = tree | {"reward": [{"kind": "function", "path": "./evil.py:f"}]}
    (here / "evil_run" / "config.yaml").write_text(yaml.safe_dump(stored))
    (here / "rows.jsonl").write_text(json.dumps({"question": "a", "text": "b", "answer": "b"}) + "\n")
    return here / "canary"


def test_every_slot_is_in_the_table():
    named = " ".join(FIELDS.values()) + " loss sets"  # of DPO, below; a list of sections
    assert [name for name in catalogue() if f"{name}" not in named] == []


def test_the_loss_of_dpo(refusal, canary):
    assert "is code outside proxima" in refusal("explain", "cpu/dpo", "preference.loss=evil:Mine")
    assert not canary.exists()


SIMULATED = ("function, a file", "surrogate", "engine", "replayed run")  # read as `explain` reads them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"), [*(("explain", name) for name in FIELDS), *(("plan", name) for name in SIMULATED)]
)
def test_reading_a_recipe_runs_nothing(proxima, canary, recipe, command, name):
    code, _, err = proxima(command, "tiny.yaml", FIELDS[name])
    assert code in (0, 2) and not canary.exists(), err
    if "function" not in FIELDS[name] and "rollouts" not in FIELDS[name]:
        assert (
            code == 2 and "is code outside proxima, which this command does not run unasked; add --import-code" in err
        )


REWARDS = [{"kind": "function", "path": "./evil.py:f"}, {"kind": "function", "path": "evil:f", "name": "again"}]
REWARDS.append({"kind": "function_batch", "path": "./evil.py:g"})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"reward": REWARDS}, {"algorithm": {"preset": "cppo", "surrogate": "evil:Mine"}}])
def test_a_run_folder_is_a_recipe(proxima, canary, here, changes):
    tree = yaml.safe_load((here / "tiny.yaml").read_text()) | changes
    (here / "mine").mkdir()
    (here / "mine" / "config.yaml").write_text(yaml.safe_dump(tree))
    (here / "sweep.yaml").write_text("recipe: mine/config.yaml\nseeds: [1]\ngrid: {train.steps: [1, 2]}\n")
    for words in (
        ("explain", "mine"),
        ("explain", "mine", "--json"),
        ("explain", "mine", "--yaml"),
        ("plan", "mine", "--devices", "H100-80G"),
        ("export", "mine", "out"),
        ("generate", "mine", "hello"),
        ("compare", "mine"),
        ("plot", "threshold", "mine"),
        ("plot", "divergence", "mine"),
        ("sweep", "sweep.yaml", "--dry-run"),
        ("peers", "convert", "mine/config.yaml", "--from", "verl"),
        ("peers", "verify", "mine"),
        ("doctor", "--help"),
        ("list",),
    ):
        if "divergence" in words:
            (here / "mine" / "run.sqlite").touch()
        code, _, err = proxima(*words)
        assert code in (0, 2) and not canary.exists(), (words, err)
        (here / "mine" / "run.sqlite").unlink(missing_ok=True)


MISSING = "reward={kind: function, path: ./evil.py:missing}"
RUNNERS = {  # what must import, and does, before anything is trained or scored
    "train": ("train", "tiny.yaml", MISSING),
    "train, a module": ("train", "tiny.yaml", "reward={kind: function, path: 'evil:missing'}"),
    "eval": ("eval", "some/model", "tiny.yaml", MISSING),
    "score": ("reward", "score", "rows.jsonl", "--reward", "evil.py:missing"),
    "check": ("check", "function", "path=./evil.py:missing"),
    "explain --import-code": ("explain", "tiny.yaml", MISSING, "--import-code"),
    "plan --import-code": ("plan", "tiny.yaml", MISSING, "--import-code", "--devices", "H100-80G"),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_what_runs_the_code_refuses_a_wrong_one_first(proxima, canary, here, name):
    code, _, err = proxima(*RUNNERS[name])
    assert code == 2 and canary.exists() and err.count("\n") <= 2
    assert "which has no function 'missing'; known: " in err
    assert not (here / "runs").exists()


def test_records_by_hand_run_nothing_unasked(proxima, canary, here):
    record = {
        "name": "mine",
        "source": "by hand",
        "surrogate": {"kind": "evil:Mine"},
        "inputs": {"mask": [[1]], "log_prob": [[-0.5]], "proximal_log_prob": [[-0.5]], "advantage": [[2.0]]},
        "expected": {"loss": -2.0},
    }
    (here / "records.json").write_text(json.dumps([record]))
    _, out, _ = proxima("peers", "verify", "records.json")
    assert "add --import-code" in out and not canary.exists()
    assert "1        1" in proxima("peers", "verify", "records.json", "--import-code")[1] and canary.exists()


LIBRARIES = ("wandb", "mlflow", "trackio", "swanlab", "flash_attn", "datasets", "bitsandbytes")


@pytest.mark.slow
def test_a_module_beside_a_recipe_is_not_a_library(proxima, canary, here):
    absent = [module for module in LIBRARIES if find_spec(module) is None]
    for module in absent:
        (here / f"{module}.py").write_text("import pathlib\npathlib.Path('canary').touch()\n")
    for module in absent:
        proxima("explain", "tiny.yaml", f"monitor=[{module}]")
        assert not canary.exists(), module
    proxima("plan", "tiny.yaml", "--devices", "H100-80G")
    assert not canary.exists()


def test_a_chat_template_has_no_way_out(refusal, canary, here, tiny_model):
    folder = shutil.copytree(tiny_model("llama"), here / "model")
    attack = "{{ cycler.__init__.__globals__.os.system('touch canary') }}{{ messages }}"
    (folder / "chat_template.jinja").write_text(attack)
    refusal("generate", "model", "hello", "--max-tokens", "1")
    assert not canary.exists()
