"""The example of docs/rewards.md: its functions score as the page shows, and its recipe trains on its data."""

import json
import re
import shlex
from pathlib import Path

import pytest

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.reward.function import Function
from tests.docs.printed import ROOT, section

PAGE = section("docs/rewards.md", "A reward of your own")


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_the_command_of_the_page_prints_what_the_page_shows(capsys):
    (command,) = re.findall(r"^    proxima (reward score .*)$", PAGE.replace("\\\n", " "), re.MULTILINE)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_functions_of_the_page_are_those_of_the_example(tmp_path):
    near, brief = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "page.py").write_text(near + "\n\n" + brief)
    for name in ("near", "brief"):
        ours, theirs = (
            Function(path=f"{file}:{name}") for file in (tmp_path / "page.py", "examples/own_reward/my_reward.py")
        )
        assert ours.call == theirs.call
        for completion, gold in (("12", "12"), ("It is 13.", "12"), ("a long text without any number", "12")):
            given = {"completion": completion, "gold": gold, "difficulty": 2}
            given = given if name == "near" else {"completions": [completion]}
            assert ours.function(**given) == theirs.function(**given)


def test_no_question_is_both_trained_and_held_out():
    config = resolve("examples/own_reward/recipe.yaml").config
    sets = [
        [json.loads(line) for line in Path(task.path).read_text().splitlines()]
        for task in (config.task, config.eval.task)
    ]
    questions = [{row["question"] for row in rows} for rows in sets]
    assert [len(rows) for rows in sets] == [160, 60] and not questions[0] & questions[1]
    assert all(str(eval(row["question"][8:-1])) == row["gold"] for rows in sets for row in rows)
