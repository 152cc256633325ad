"""Recipe files that the command line lays over a recipe."""

import pytest

from proxima.config.resolution import resolve
from tests.refusals import refused


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("@layouts/qwen3_30b_8xH10", "no such recipe; did you mean layouts/qwen3_30b_8xH100?"),
        ("@clustr.yaml", "no such recipe; did you mean cluster.yaml?"),
        ("@", ".: can't be read (Is a directory); "),
    ],
)
def test_a_file_that_is_not_there(recipe, word, line):
    recipe("placement: torchrun", "cluster.yaml")
    (said,) = refused(resolve, "quickstart", [word])
    assert said.startswith(word.removeprefix("@")) and line in said


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("qwen3_30b_drpo", "@layouts/qwen3_30b_8xH100"),
        ("dapo_32b", "@layouts/dapo_32b_8xH100"),
        ("run.yaml", "@layouts/dapo_32b_8xH100"),
        ("quickstart", "@cluster.yaml"),
    ],
)
def test_a_file_that_is(recipe, name, word):
    recipe()
    recipe("placement: {kind: ray, ranks: 8}", "cluster.yaml")
    assert resolve(name, [word]).config.placement.ranks == 8
