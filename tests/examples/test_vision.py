"""`make vision-model`, and `recipes/cpu/vision.yaml` with its model, through the command line."""

import json

import pytest

from proxima.cli.main import main
from scripts import vision_model

SMALL = (
    *("train.steps=2", "train.prompts_per_step=4", "train.completions_per_prompt=4", "train.warmup_steps=1"),
    "eval.limit=4",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_model, "ENOUGH", 0.0)
        return vision_model.make_vision_model(tmp_path_factory.mktemp("vision"), hidden=32, layers=1)


def test_a_run_shows_images_and_keeps_each_once(model, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "cpu/vision", f"model.path={model}", f"folder={run}", *SMALL]) == 0
    names = (run / "images" / "index.txt").read_text().split()
    assert len(names) == len(set(names)) == len(list((run / "images").glob("*.png")))
    assert json.loads((run / "summary.json").read_text())["eval"]["after"]["questions"] == 4
    assert main(["eval", str(run), "--limit", "4"]) in (0, 1)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (("engine={kind: local_process}",), "engine"),
        (("critic={kind: head}", "algorithm=ppo"), "critic"),
        (("model.attention=padded",), "model.attention"),
    ],
)
def test_what_can_not_show_images_is_one_line(changes, field, model, tmp_path, capsys):
    assert main(["train", "cpu/vision", f"model.path={model}", f"folder={tmp_path / 'run'}", *SMALL, *changes]) == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert error.startswith(f"error: {field}")
    assert "images" in error


def test_a_text_model_is_refused(tiny_model, tmp_path, capsys):
    assert main(["train", "cpu/vision", f"model.path={tiny_model('llama')}", f"folder={tmp_path / 'run'}", *SMALL]) == 2
    assert "is a llama, which can't be shown images" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
