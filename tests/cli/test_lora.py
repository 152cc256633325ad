"""LoRA from the command line: a run, its evaluation, its answers, its export, and what is refused in one line."""

import json
import shutil

import pytest
import torch

from proxima.model.load import load
from tests.cli.conftest import TINY, printed

pytestmark = pytest.mark.slow

ADAPTER = "model.lora={rank: 4, alpha: 8}"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, tiny_model):
    """A folder with a base model and a run that trains an adapter of it, and what its command printed."""
    top = tmp_path_factory.mktemp("adapted")
    shutil.copytree(tiny_model("llama"), top / "base")
    (top / "tiny.yaml").write_text(TINY.format(model="base"))
    return top, printed(top, "train", "tiny.yaml", "folder=run", ADAPTER, "train.optimizer.lr=0.1")


@pytest.fixture
def run(adapted, here):
    """A copy of that folder as the current one; what was printed."""
    shutil.copytree(adapted[0], here, dirs_exist_ok=True)
    for file in here.rglob("adapter_config.json"):  # which says where the base is
        file.write_text(file.read_text().replace(str(adapted[0]), str(here)))
    return adapted[1]


def test_eval_generate_and_export_take_a_run_with_an_adapter(run, proxima, here):
    assert "base 26.9 k + LoRA 4.1 k" in run
    code, _, err = proxima("eval", "run", "--out", "e")
    assert code == 0, err
    result = json.loads((here / "e" / "result.json").read_text())
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert result["model"]["name"] == "run step 2" and result["model"]["sha256"]
    assert result["suites"]["arithmetic"]["estimates"]["accuracy"]["value"] == summary["eval"]["after"]["accuracy"]
    assert proxima("export", "run", "merged") == (0, "wrote merged\n", "")
    assert proxima("export", "run", "adapter", "--adapter")[0] == 0
    words = ("2 + 2", "--json", "--max-tokens", "8", "--temperature", "0", "--dtype", "float32")
    answers = [proxima("generate", model, *words) for model in ("run", "merged", "adapter", "base")]
    assert [code for code, _, _ in answers] == [0, 0, 0, 0], answers
    texts = [json.loads(out)["completions"] for _, out, _ in answers]
    assert texts[0] == texts[1] == texts[2]
    merged, adapter = (load(str(here / name), device="cpu").model for name in ("merged", "adapter"))
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), adapter.parameters(), strict=True))
    assert proxima("train", "tiny.yaml", "folder=again", "model.path=adapter", "train.steps=1")[0] == 0


def test_a_changed_or_missing_base_is_one_line(run, proxima, here):
    for command in (("eval", "run"), ("generate", "run", "hi"), ("export", "run", "out")):
        with (here / "base" / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x01")
        code, _, err = proxima(*command)
        assert code == 2 and "was made for a different base than" in err.splitlines()[-1], err
        assert "model.safetensors differs; restore that file of" in err.splitlines()[-1]
    shutil.rmtree(here / "base")
    for command in (("eval", "run"), ("generate", "run", "hi"), ("export", "run", "out")):
        code, _, err = proxima(*command)
        assert code == 2 and err.splitlines()[-1].endswith(
            "does not exist; restore it, or write where it is as base_model_name_or_path into adapter_config.json"
        ), err
