"""What summary.json calls a run."""

import json
import shutil

import pytest

from proxima.config.resolution import resolve
from proxima.data import UserError
from proxima.model.pretrained import LoadedModel
from proxima.runtime.state.run_checkpoints import find_checkpoint
from proxima.runtime.state.summary import algorithm_name
from tests.runtime.tiny_run import Watcher, evals_of, go, recipe, summary_of


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ({"preset": "cppo"}, "cppo"),
        ({"preset": "cppo", "surrogate": {"kind": "cppo", "delta": 0.2}}, "cppo"),
        ({"preset": "cppo", "surrogate": {"kind": "ppo_clip"}}, "cppo with surrogate ppo_clip"),
        ({"preset": "distill", "distillation": {"path": "teacher"}}, "distill"),
        ({"surrogate": "ppo_clip", "advantage": "grpo", "aggregate": "token_mean"}, "ppo_clip"),
    ],
)
def test_a_replaced_surrogate_is_in_the_name(tmp_path, algorithm, name):
    assert algorithm_name(resolve(recipe(tmp_path, algorithm=algorithm)).config) == name


class Warned(Watcher):
    """Views with these warnings."""

    def __init__(self, *warnings):
        super().__init__()
        self.told = [{"step": step, "text": text, "times": 1} for step, text in warnings]

    def warned(self):
        return self.told


@pytest.mark.slow
def test_warnings_are_kept_over_a_resume(tiny_model, tmp_path):
    tree, folder = recipe(tiny_model("llama"), train__steps=1, eval__task=None, eval__every=0), tmp_path / "run"
    go(folder, tree, observer=Warned((0, "first"), (1, "17 % truncated")))
    tree["train"]["steps"] = 2
    go(folder, tree, observer=Warned((2, "18 % truncated"), (2, "last")), resume=True)
    warnings = [(warning["step"], warning["text"], warning["times"]) for warning in summary_of(folder)["warnings"]]
    assert warnings == [(0, "first", 1), (1, "17 % truncated", 2), (2, "last", 1)]


@pytest.mark.slow
def test_the_best_that_was_not_kept_is_refused(runs, tmp_path):
    folder = shutil.copytree(runs.finished("plain"), tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "000002")
    lines = [record | {"accuracy": {0: 1.0, 2: 0.75, 3: 0.5}[record["step"]]} for record in evals_of(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    with pytest.raises(UserError, match="the best evaluation is that of step 2, whose checkpoint was not kept"):
        find_checkpoint(folder, "best")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("keep_best: false", "keep_best: true"))
    assert find_checkpoint(folder, "best").step == 3
    model = LoadedModel(model=None, tokenizer=None, path=str(find_checkpoint(folder).model))
    assert model.name == "run step 3"
