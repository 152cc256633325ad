"""The example of code against unit tests: its answers score as they should, and its recipe trains."""

import json
from pathlib import Path

import pytest

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.runtime.launch.run import train
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/unit_tests/recipe.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_first_answer_of_each_task_is_right_and_the_second_wrong(capsys, tmp_path):
    """That of the fifth never ends and has half a second; the others have all the time that a busy machine may take."""
    rows = [json.loads(line) for line in (ROOT / "examples/unit_tests/answers.jsonl").read_text().splitlines()]
    endless = rows[4] | {"completion": [rows[4]["completion"].pop()]}
    verdicts = {300: ["yes", "no"] * 4 + ["yes"] + ["yes", "no"] * 3, 0.5: ["no"]}
    for seconds, asked in ((300, rows), (0.5, [endless])):
        (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
        command = ["reward", "score", str(tmp_path / "answers.jsonl"), "--answer", "tests", "--reward", RECIPE]
        assert main([*command, f"reward.seconds={seconds}"]) == 0
        table = capsys.readouterr().out.splitlines()[1:]
        assert [line.split()[2] for line in table[: len(verdicts[seconds])]] == verdicts[seconds]


def test_the_recipe_trains_two_steps(tiny_model, tmp_path):
    sizes = ["train.steps=2", "train.prompts_per_step=2", "train.completions_per_prompt=2", "sampling.max_tokens=8"]
    model = [f"model.path={tiny_model('llama')}", "model.device=cpu", "model.max_length=256", "runtime.threads=1"]
    resolved = resolve(RECIPE, [*sizes, *model, f"folder={tmp_path / 'run'}"])
    with pytest.raises(RunEnded, match="no step of 2 trained anything"):  # a random model passes no test
        train(resolved.config, resolved=resolved)
    steps = [record for record in RunFolder(tmp_path / "run").read_metrics() if record["kind"] == "train"]
    assert [(step["reward/invalid"], step["reward/part/unit_tests"]) for step in steps] == [(0, 0.0)] * 2
