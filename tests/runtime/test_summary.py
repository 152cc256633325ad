"""What summary.json calls a run."""

import pytest

from proxima.config import resolve
from proxima.runtime.summary import algorithm_name
from tests.runtime.tiny_run import recipe


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
