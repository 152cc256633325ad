"""Which files can be laid over which recipe, and what is said of the others."""

import pytest

from proxima.config import ConfigError, resolve

LAYOUTS = "@layouts/qwen3_30b_128xH800 or @layouts/qwen3_30b_8xH100"


OTHERS = "the recipes {}*, and this one is {}; use " + LAYOUTS


@pytest.mark.parametrize(
    ("name", "word", "line"),
    [
        ("qwen3_30b_cppo", "@layouts/dapo_32b_8xH100", OTHERS.format("dapo_32b", "qwen3_30b_cppo")),
        ("qwen3_30b_cppo", "@layouts/qwen3_4b_8xH100", OTHERS.format("qwen3_4b", "qwen3_30b_cppo")),
        ("mine.yaml", "@layouts/qwen3_4b_8xH100", OTHERS.format("qwen3_4b", "qwen3_30b_grpo")),
        ("quickstart", "@layouts/qwen3_4b_8xH100", "is quickstart; copy it, fit the copy to your model, and"),
        ("quickstart", "@qwen3_30b_8xH10", "no such file; did you mean @layouts/qwen3_30b_8xH100?"),
        ("quickstart", "@clustr.yaml", "no such file; did you mean @cluster.yaml?"),
        ("quickstart", "@elsewhere/x", "no such file; give @FILE.yaml, or a layout: @layouts/dapo_32b_128xH800, @lay"),
        ("quickstart", "@", "no such file; give @FILE.yaml, or"),
    ],
)
def test_a_file_that_can_not_be_laid_over_it(recipe, name, word, line):
    recipe("placement: torchrun", "cluster.yaml")
    recipe("extends: qwen3_30b_grpo", "mine.yaml")
    with pytest.raises(ConfigError) as raised:
        resolve(name, [word])
    assert str(raised.value).startswith(f"{word} (command line): ") and line in str(raised.value)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("qwen3_30b_drpo", "@layouts/qwen3_30b_8xH100"),
        ("dapo_32b", "@layouts/dapo_32b_8xH100"),
        ("run.yaml", "@layouts/dapo_32b_8xH100"),  # of the user's own, whose name says nothing
        ("quickstart", "@cluster.yaml"),
    ],
)
def test_what_can(recipe, name, word):
    recipe()
    recipe("placement: {kind: ray, ranks: 8}", "cluster.yaml")
    assert resolve(name, [word]).config.placement.ranks == 8


def test_a_layout_is_no_recipe(recipe):
    with pytest.raises(ConfigError) as raised:
        resolve("layouts/qwen3_4b_8xH100")
    line = "layouts/qwen3_4b_8xH100: is a layout (a placement on a cluster), not a recipe; lay it over a "
    assert str(raised.value) == f"{line}recipe: qwen3_4b_cppo @layouts/qwen3_4b_8xH100"
    with pytest.raises(ConfigError, match=r"^qwen3_30b_8xH100: no such recipe; (?!.*layouts)"):
        resolve("qwen3_30b_8xH100")
