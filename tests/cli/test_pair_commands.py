"""DPO and a reward model as they are typed: the run, its log, table and report, and explain."""

import pytest
import yaml

from proxima.cli.main import main
from proxima.runtime.state.folder import RunFolder
from tests.runtime.offline import tiny_dpo, tiny_reward

pytestmark = pytest.mark.slow


@pytest.fixture
def typed(tiny_model, tmp_path, capsys):
    """`typed("train", tiny_dpo, …)`: what a command prints of that recipe for a tiny model."""

    def run(command, method, *words):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(method.recipe(tiny_model("llama"), tmp_path / "rows")))
        assert main([command, str(tmp_path / "mine.yaml"), *words]) == 0
        return capsys.readouterr().out

    return run


def test_a_run_of_dpo_with_its_log_and_its_report(typed, tmp_path):
    out = typed("train", tiny_dpo, f"folder={tmp_path / 'run'}")
    assert "step = 4 examples → micro-batches ≤ 100 tokens → 1 update" in out
    assert "eval  before   accuracy 0.500  6 examples" in out and "loss 0.6931" in out
    page = (tmp_path / "run" / "report.html").read_text()
    for name in ("rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/rejected"):
        assert f'"{name}": [' in page


def test_a_run_of_a_reward_model_ends_with_its_table(typed, tmp_path, capsys):
    out = typed("train", tiny_reward, f"folder={tmp_path / 'run'}")
    last = [r for r in RunFolder(tmp_path / "run").read_metrics() if r["kind"] == "eval"][-1]
    *_, table = out.partition("held-out pairs")
    rows = {line[:32].strip(): line[32:].split() for line in table.splitlines() if line[:1].isalpha()}
    bounds = f"{last['accuracy/low']:.3f}–{last['accuracy/high']:.3f}"
    assert rows["accuracy"][:2] == [f"{last['accuracy']:.3f}", bounds] and rows["accuracy"][-1] == "6"
    assert rows["length alone"][0] == "0.500" and rows["a coin"][0] == "0.500"
    assert "right where 50-60 % sure" in table
    assert main(["train", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    assert "held-out pairs" not in capsys.readouterr().out


def test_explain_counts_both_sides_of_a_pair(typed):
    assert "examples have about 68 tokens, the longest of those read has 69" in typed("explain", tiny_dpo)
    out = typed("explain", tiny_reward, "--all")
    assert "4 examples → about" in out and "reward_model.center" in out
