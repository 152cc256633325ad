"""DPO as it is typed: the run, its log and report, and explain."""

from proxima.cli.main import main
from tests.runtime.offline import tiny_dpo

METHOD = tiny_dpo  # whose recipe the fixture `file` writes


def test_a_run_with_its_log_and_its_report(file, tmp_path, capsys):
    assert main(["train", str(file), f"folder={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "step = 4 examples → micro-batches ≤ 100 tokens → 1 update" in out
    assert "eval  before   accuracy 0.500  6 examples" in out and "loss 0.6931" in out
    page = (tmp_path / "run" / "report.html").read_text()
    for name in ("rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/rejected"):
        assert f'"{name}": [' in page


def test_explain_counts_both_sides_of_a_pair(file, capsys):
    assert main(["explain", str(file)]) == 0
    out = capsys.readouterr().out
    assert "examples have about 68 tokens, the longest of those read has 69" in out
