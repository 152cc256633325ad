"""What the command itself finds, before it starts anything on the cluster."""

import re

import pytest
import yaml

from proxima.cli.main import main
from proxima.runtime.placement import ray_supervisor
from tests.runtime.tiny_run import changed, recipe

PLACE = {"kind": "ray", "ranks": 6, "gpus_per_rank": 0}


@pytest.fixture
def refused(tiny_model, tmp_path, monkeypatch, capsys):
    """The line that a command ends with which starts no process."""
    monkeypatch.setattr(ray_supervisor, "supervise", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.chdir(tmp_path)

    def run(kind="llama", **changes):
        tree = changed(recipe(tiny_model(kind), placement=PLACE), changes)
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        assert main(["train", "mine.yaml", "folder=used"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return run


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("llama", {"tensor_parallel": 3}, "tensor_parallel=3 (mine.yaml): must divide the 4 attention heads of"),
        ("qwen3_moe", {"expert_parallel": 3}, "expert_parallel=3 (mine.yaml): must divide the 8 experts; set it to 2"),
    ],
)
def test_a_model_that_the_ranks_can_not_split(refused, tmp_path, kind, changes, line):
    err = refused(kind, **{f"placement__{name}": value for name, value in changes.items()})
    (said,) = err.splitlines()
    assert re.sub(r"yaml:\d+", "yaml", said).startswith(f"error: placement.{line}")
    assert not (tmp_path / "used").exists()


def test_a_teacher_that_they_can_not_split(refused, tiny_model):
    teacher = {"path": str(tiny_model("gpt2")), "coefficient": 0.5}
    err = refused(placement__ranks=4, placement__tensor_parallel=2, algorithm__distillation=teacher)
    assert "gpt2, of algorithm.distillation.path, has none; set it to 1\n" in err


def test_a_folder_with_a_run(refused, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").touch()
    assert "used contains a run; continue it with --resume" in refused()
