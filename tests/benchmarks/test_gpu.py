"""The file that a GPU's parts are written to, and that their commands are commands."""

import importlib
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, harness


class Parsed(Exception):
    """A benchmark has understood its options."""


def words_of(part, tiny_model, tmp_path):
    fills = {
        "model": str(tiny_model("llama")),
        "out": str(tmp_path / "out.json"),
        "folder": str(tmp_path),
        "python": "python",
    }
    return [word.format(**fills) for word in f"{part.command} {part.tiny}".split()]


@pytest.mark.parametrize("name", gpu.PARTS)
def test_a_part_is_a_command_of_today(name, tiny_model, tmp_path, monkeypatch):
    words = words_of(gpu.PARTS[name], tiny_model, tmp_path)
    if words[1] == "pytest":
        assert (gpu.ROOT / words[-1] / "test_gpu.py").is_file()
    elif words[1] == "proxima.cli.main":
        from proxima.config.validate import load_recipe

        config = load_recipe(str(gpu.ROOT / words[3]), [word for word in words[4:] if "=" in word]).config
        assert config.train.steps == 2 and config.folder == str(tmp_path / "run")
    else:

        def parsed(path):
            raise Parsed

        module = importlib.import_module(f"{words[1]}.run")
        monkeypatch.setattr(module, "need_model", parsed)
        monkeypatch.setattr(module, "peer_python", lambda _: sys.executable, raising=False)
        more = ["--peer-python", "python"] if {"trl", "verl"} & set(gpu.PARTS[name].needs) else []
        monkeypatch.setattr(sys, "argv", [name, *words[2:], *more])
        with pytest.raises(Parsed):
            module.main()


@pytest.mark.slow
def test_every_part_has_its_result_or_its_reason(tmp_path, monkeypatch, capsys):
    scripts = {
        "good": "import json; json.dump({'ratio': 3.5}, open(__import__('sys').argv[1], 'w'))",
        "says": "print('3 passed in 1 s')",
        "broken": "print('about to'); raise ValueError('17 rows\\n  are too many')",
        "slow": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
    }
    for name, code in scripts.items():
        (tmp_path / f"{name}.py").write_text(code)
    parts = {name: gpu.Part(f"{tmp_path}/{name}.py {{out}}", 0.01 if name == "slow" else 30) for name in scripts}
    parts["absent"] = gpu.Part("-m nothing", 1, needs=("no_such_package",))
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "need_model", lambda path: path)
    monkeypatch.setattr(harness, "commit", lambda: "none")
    monkeypatch.setattr(gpu, "with_weights", lambda model, place: model)
    out, logs = tmp_path / "gpu.json", tmp_path / "logs"
    words = ["--rehearse", "--model", str(tmp_path), "--json-out", str(out), "--logs", str(logs), "--only", *parts]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    assert gpu.main() == 0
    output = json.loads(out.read_text())
    assert output["rehearsal"] and output["parts"]["good"]["result"] == {"ratio": 3.5}
    assert output["parts"]["says"]["result"] == "3 passed in 1 s"
    reasons = {name: entry["reason"] for name, entry in output["parts"].items() if "reason" in entry}
    assert reasons == {
        "broken": "exit code 1: ValueError: 17 rows",
        "slow": "not done after 0.01 minutes",
        "absent": "no_such_package is not installed",
    }
    assert json.loads((logs / "parts.json").read_text()) == output["parts"]
    assert (logs / "says.txt").read_text() == "3 passed in 1 s\n" and "Traceback" in (logs / "broken.txt").read_text()
    shown = capsys.readouterr().out
    assert "| good   |" in shown and "ratio 3.5" in shown and "Traceback" not in shown


def test_a_folder_without_weights_gets_random_ones(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    whole, shape = tiny_model("llama"), tmp_path / "shape"
    assert gpu.with_weights(whole, tmp_path) == whole
    shutil.copytree(whole, shape, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "place").mkdir()
    made = gpu.with_weights(shape, tmp_path / "place")
    sizes = [sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(m).parameters()) for m in (whole, made)]
    assert sizes[0] == sizes[1] and {f.name for f in shape.iterdir()} < {f.name for f in made.iterdir()}


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "--rehearse" in output.err


def test_the_demo_is_told_by_its_accuracy():
    result = {"eval": {"before": {"accuracy": 0.1}, "after": {"accuracy": 0.9}}, "mfu": 0.5}
    assert gpu.outcome({"result": result}) == "mfu 0.5, before 0.1, after 0.9"


def test_a_result_is_named_after_the_machine(monkeypatch):
    monkeypatch.setattr(harness, "date", SimpleNamespace(today=lambda: "2026-01-02"))
    monkeypatch.setattr(harness, "machine", lambda: {"cores": 2})
    assert harness.result_name() == "2026-01-02_2-cores.json"
    monkeypatch.setattr(harness, "machine", lambda: {"cores": 16, "gpus": ["NVIDIA H200", "NVIDIA H200"]})
    assert harness.result_name() == "2026-01-02_16-cores_nvidia-h200.json"
