"""`make vision-model`, and `recipes/cpu/vision.yaml` with its model, through the command line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from proxima.cli.main import main
from scripts import vision_model
from tests.campaigns import campaign
from tests.task.test_image_files import content
from tests.tiny_images import make_tiny_reader, picture

SMALL = (
    *("train.steps=2", "train.prompts_per_step=4", "train.completions_per_prompt=4", "train.warmup_steps=1"),
    *("task.size=8", "eval.limit=4"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_model, "ENOUGH", 0.0)
        return vision_model.make_vision_model(tmp_path_factory.mktemp("vision"), hidden=32, layers=1)


@pytest.mark.slow
def test_a_run_shows_images_and_keeps_each_once(model, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "cpu/vision", f"model.path={model}", f"folder={run}", *SMALL]) == 0
    names = (run / "images" / "index.txt").read_text().split()
    assert len(names) == len(set(names)) == len(list((run / "images").glob("*.png")))
    held_out = (run / "report.html").read_text().partition('class="qa"')[2].partition("</section>")[0]
    assert held_out.count('<img src="data:image/png;base64,') == 4
    assert json.loads((run / "summary.json").read_text())["eval"]["after"]["questions"] == 4
    assert main(["eval", str(run), "--limit", "4", "--out", str(tmp_path / "eval")]) in (0, 1)
    capsys.readouterr()


@pytest.mark.slow
def test_generate_shows_images(model, tmp_path, capsys):
    files = []
    for number in range(2):
        picture(number, 24, 24).save(tmp_path / f"{number}.png")
        files += ["--image", str(tmp_path / f"{number}.png")]
    words = ("--json", "--max-tokens", "2", "--device", "cpu")
    answers = []
    for shown in (files[:2], files[2:], files):
        marks = "<image>" * (len(shown) // 2)
        assert main(["generate", str(model), f"How many? {marks}", *shown, *words]) == 0
        (answer,) = json.loads(capsys.readouterr().out)["completions"]
        answers.append(answer["sampled_log_prob"])
    assert answers[0] != answers[1] != answers[2]
    assert main(["generate", str(model), "?", "--image", str(tmp_path / "none.png"), *words]) == 2
    assert main(["generate", str(model), "<image> <image>", *files[:2], *words]) == 2
    error = capsys.readouterr().err
    assert "is not a file" in error and "there are 1 images, and <image> stands 2 times" in error


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A data set with the columns of Geometry3K and of CLEVR's counts, as the hub has images."""
    folder = tmp_path_factory.mktemp("rows")
    images = [[{"bytes": content(picture(n, 20 + n, 24), "PNG"), "path": None}] for n in range(6)]
    table = {"images": images, "problem": [f"<image>What is {n}?" for n in range(6)], "answer": ["3"] * 6}
    for split in ("train", "test"):
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    return folder


TWO_STEPS = "tests/examples/test_vision.py::test_a_published_setting_makes_two_steps"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clevr_count", *campaign(TWO_STEPS, ["geo3k"])])
def test_a_published_setting_makes_two_steps(name, rows, tmp_path, warm_processes):
    model = make_tiny_reader("qwen2_5_vl", tmp_path / "model")
    places = [f"model.path={model}", f"task.path={rows}", f"eval.task.path={rows}", f"folder={tmp_path / 'run'}"]
    sizes = "train.steps=2 train.prompts_per_step=4 train.warmup_steps=0 eval.limit=2 sampling.max_tokens=6"
    varied = "reward.1={kind: format, pattern: '[!-?]'}"  # no random answer is right
    more = "model.max_length=200 data.system=null data.check_answers=1 engine.slots=8 --quiet"
    before = load_file(model / "model.safetensors")
    assert main(["train", name, *places, varied, *sizes.split(), *more.split()]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if step["kind"] == "train"] == [1, 2]
    after = load_file(max((tmp_path / "run" / "checkpoints").iterdir()) / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert len(list((tmp_path / "run" / "images").glob("*.png"))) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (("engine={kind: sglang}",), "engine"),
        (("model.attention=padded",), "model.attention"),
        (("placement={kind: torchrun, tensor_parallel: 2}",), "placement.tensor_parallel"),
    ],
)
def test_what_can_not_show_images_is_one_line(changes, field, model, tmp_path, capsys):
    assert main(["train", "cpu/vision", f"model.path={model}", f"folder={tmp_path / 'run'}", *SMALL, *changes]) == 2
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert error.startswith(f"error: {field}")
    assert "images" in error


def test_a_text_model_is_refused(tiny_model, tmp_path, capsys):
    assert main(["train", "cpu/vision", f"model.path={tiny_model('llama')}", f"folder={tmp_path / 'run'}", *SMALL]) == 2
    assert "is a llama, which can't be shown images" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
