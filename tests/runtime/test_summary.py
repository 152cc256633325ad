"""What summary.json calls a run."""

import pytest

from proxima.config import resolve
from proxima.runtime.summary import algorithm_name
from tests.runtime.tiny_run import Watcher, go, recipe, summary_of


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ({"preset": "cppo"}, "cppo"),
        ({"preset": "cppo", "surrogate": {"kind": "cppo", "delta": 0.2}}, "cppo"),
        ({"preset": "cppo", "surrogate": {"kind": "ppo_clip"}}, "cppo with surrogate ppo_clip"),
        ({"surrogate": "ppo_clip", "advantage": "grpo", "aggregate": "token_mean"}, "ppo_clip"),
    ],
)
def test_a_replaced_surrogate_is_in_the_name(tmp_path, algorithm, name):
    assert algorithm_name(resolve(recipe(tmp_path, algorithm=algorithm)).config) == name


class Warned(Watcher):
    """Views with these warnings."""

    def __init__(self, *told):
        super().__init__()
        self.told = [{"step": step, "text": text, "times": 1} for step, text in told]

    def warned(self):
        return self.told


def test_warnings_are_kept_over_a_resume(tiny_model, tmp_path):
    tree, folder = recipe(tiny_model("llama"), train__steps=1, eval__task=None, eval__every=0), tmp_path / "run"
    go(folder, tree, observer=Warned((0, "first"), (1, "17 % truncated")))
    tree["train"]["steps"] = 2
    go(folder, tree, observer=Warned((2, "18 % truncated"), (2, "last")), resume=True)
    told = [(told["step"], told["text"], told["times"]) for told in summary_of(folder)["warnings"]]
    assert told == [(0, "first", 1), (1, "17 % truncated", 2), (2, "last", 1)]
