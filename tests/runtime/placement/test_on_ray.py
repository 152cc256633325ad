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
    ("kind", "teacher", "changes", "line"),
    [
        ("llama", None, {"tensor_parallel": 3}, "tensor_parallel=3 (mine.yaml): must divide the 4 attention heads of"),
        ("qwen3_moe", None, {"expert_parallel": 3}, "expert_parallel=3 (mine.yaml): must divide the 8 experts; set"),
        ("llama", "gpt2", {"ranks": 4, "tensor_parallel": 2}, "gpt2, of algorithm.distillation.path, has none; set it"),
    ],
)
def test_a_model_that_the_ranks_can_not_split(refused, tiny_model, tmp_path, kind, teacher, changes, line):
    settings = {f"placement__{name}": value for name, value in changes.items()}
    if teacher:
        settings["algorithm__distillation"] = {"path": str(tiny_model(teacher)), "coefficient": 0.5}
    (said,) = refused(kind, **settings).splitlines()
    assert line in re.sub(r"yaml:\d+", "yaml", said) and said.startswith("error: placement.")
    assert not (tmp_path / "used").exists()


def test_a_folder_with_a_run(refused, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").touch()
    assert "used contains a run; continue it with --resume" in refused()
