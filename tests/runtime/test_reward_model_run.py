"""RL with a reward model as the reward: the scores of a run, its resume, and what is refused before it."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from proxima.config import check, resolve
from proxima.config.estimate import batch_of
from proxima.config.memory_size import memory_of
from proxima.config.model_size import model_facts
from proxima.data import UserError
from proxima.model import load_scalar_model, save
from proxima.model.pretrained import load_tokenizer
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from tests.runtime.tiny_run import assert_same, go, recipe, traces
from tests.tiny import END


@pytest.fixture(scope="module")
def scorer(tiny_model, tmp_path_factory):
    loaded = load_scalar_model(str(tiny_model("qwen2")), device="cpu", new_head=0.3, seed=2)
    return str(save(loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("reward-model")))


def scored_by(scorer, model, **changes):
    reward = {"kind": "model", "path": scorer, "compute_dtype": "float32", "device": "cpu"}
    return recipe(model, reward=[reward, {"kind": "tests.runtime.tiny_run:Even", "weight": 0}], **changes)


def test_a_run_is_scored_by_the_model_and_resumes_to_the_bit(scorer, tiny_model, tmp_path):
    tree = scored_by(scorer, tiny_model("llama"))
    go(tmp_path / "whole", tree)
    rows = read_rows(sorted(RunFolder(tmp_path / "whole").rollouts.iterdir())[0])
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    end = load_tokenizer(scorer).convert_tokens_to_ids(END)
    for row in rows[:6]:
        tokens = [*row["prompt_tokens"], *row["tokens"], *([end] if row["finish_reason"] == "length" else [])]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([tokens])).logits
        assert row["reward"] == pytest.approx(float(expected), abs=3e-5)
    assert np.std([row["reward"] for row in rows]) > 0.05
    go(tmp_path / "parts", {**tree, "train": {**tree["train"], "steps": 3}})
    whole = traces(tmp_path / "whole")
    for later in (2, 3):  # as after a kill
        shutil.rmtree(RunFolder(tmp_path / "parts").checkpoint(later))
    go(tmp_path / "parts", tree, resume=True)
    assert_same(traces(tmp_path / "parts"), whole)


def test_a_resume_with_another_reward_model_is_refused(scorer, tiny_model, tmp_path):
    other = tmp_path / "scorer"
    loaded = load_scalar_model(scorer, device="cpu")
    save(loaded.model, loaded.tokenizer, other)
    tree = scored_by(str(other), tiny_model("llama"), train__steps=1)
    go(tmp_path / "run", tree)
    with torch.no_grad():
        loaded.model.score.weight += 1
    save(loaded.model, loaded.tokenizer, other)
    with pytest.raises(UserError, match=r"reward.0.path: model.safetensors: changed since the run"):
        go(tmp_path / "run", tree, resume=True)


def test_the_reward_model_is_checked_with_the_recipe(scorer, tiny_model):
    def problems(**fields):
        reward = {"kind": "model", "path": scorer, **fields}
        return [str(problem) for problem in check(resolve({**recipe(tiny_model("llama")), "reward": [reward]}))]

    assert problems() == []
    (line,) = problems(path=str(tiny_model("llama")))
    assert line.startswith("reward.0.path=") and "has no scalar head" in line
    (line,) = problems(normalize=True)
    assert line.startswith("reward.0.normalize=true") and line.endswith("or set normalize=false")
    sets = [{"name": "own", "task": {"kind": "arithmetic"}, "reward": [{"kind": "model", "path": "/nowhere"}]}]
    tree = recipe(tiny_model("llama"), eval__sets=sets)
    (line,) = (str(problem) for problem in check(resolve(tree)))
    assert line.startswith("eval.sets.0.reward.0.path=/nowhere") and "does not exist" in line


def test_explain_counts_the_weights_of_reward_models(scorer, tiny_model):
    facts = model_facts(str(tiny_model("llama")))
    config = resolve(scored_by(scorer, tiny_model("llama"))).config
    memory = memory_of(config, facts, batch_of(config, 20))
    weights = AutoModelForSequenceClassification.from_pretrained(scorer).parameters()
    assert memory["reward models"] == 4 * sum(p.numel() for p in weights)
    plain = resolve(recipe(tiny_model("llama"))).config
    assert "reward models" not in memory_of(plain, facts, batch_of(plain, 20))
