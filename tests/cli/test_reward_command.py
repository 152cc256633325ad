"""A reward model as it is typed: the run, its table, and explain."""

from proxima.cli.main import main
from proxima.runtime.state.folder import RunFolder
from tests.runtime.offline import tiny_reward

METHOD = tiny_reward  # whose recipe the fixture `file` writes


def test_a_run_ends_with_its_table(file, tmp_path, capsys):
    assert main(["train", str(file), f"folder={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    last = [r for r in RunFolder(tmp_path / "run").read_metrics() if r["kind"] == "eval"][-1]
    *_, table = out.partition("held-out pairs")
    rows = {line[:32].strip(): line[32:].split() for line in table.splitlines() if line[:1].isalpha()}
    assert rows["accuracy"][:2] == [
        f"{last['accuracy']:.3f}",
        f"{last['accuracy/low']:.3f}–{last['accuracy/high']:.3f}",
    ]
    assert rows["length alone"][0] == "0.500" and rows["a coin"][0] == "0.500" and rows["accuracy"][-1] == "6"
    assert "right where 50-60 % sure" in table
    assert main(["train", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    assert "held-out pairs" not in capsys.readouterr().out


def test_explain_reckons_with_both_sides(file, capsys):
    assert main(["explain", str(file), "--all"]) == 0
    out = capsys.readouterr().out
    assert "4 examples → about" in out and "reward_model.center" in out
