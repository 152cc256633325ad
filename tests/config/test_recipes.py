"""Every recipe in the folder resolves, says what it is, and stands in the table."""

import os
from pathlib import Path

import pytest

from proxima.config import check, dump, resolve

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("**/*.yaml"))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(FOLDER.parent)


def test_there_are_recipes():
    assert {"quickstart", "gsm8k", "gsm8k_cppo"} <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_resolves_and_is_complete(recipe, tmp_path):
    resolved = resolve(recipe)
    paths_elsewhere = ("model.path", "task.path", "eval.task.path")  # models and data need not be on this machine
    assert [str(p) for p in check(resolved) if p.path not in paths_elsewhere] == []
    again = tmp_path / "config.yaml"
    again.write_text(dump(resolved), encoding="utf-8")
    assert resolve(again).config == resolved.config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_stands_in_the_table(recipe):
    assert f"[`{recipe.name}`]({os.path.relpath(recipe, FOLDER)})" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_quickstart_asks_held_out_questions_that_it_does_not_train_on():
    config = resolve(FOLDER / "quickstart.yaml").config
    train, held_out = config.task.rows(config.seed), config.eval.task.rows(config.seed)

    def questions(rows):
        return {rows[i].messages[-1]["content"] for i in range(len(rows))}

    assert len(held_out) >= 200
    assert config.eval.limit >= 200
    assert questions(train).isdisjoint(questions(held_out))


def test_gsm8k_cppo_differs_in_the_algorithm_alone():
    grpo, cppo = (resolve(FOLDER / f"{name}.yaml") for name in ("gsm8k", "gsm8k_cppo"))
    apart = {e.path.partition(".")[0] for e, f in zip(grpo.entries, cppo.entries, strict=False) if e.path != f.path or e.value != f.value}
    assert "algorithm" in apart
    assert (cppo.config.task, cppo.config.train, cppo.config.reward) == (grpo.config.task, grpo.config.train, grpo.config.reward)
