"""The quarter of an hour on a GPU: its one limit, what it writes, its exit codes, and that its parts are commands."""

import importlib
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import harness
from benchmarks.gpu import all_parts, forecast, schedule, updates
from benchmarks.gpu.record import Record, earlier, exit_code, lines_of
from benchmarks.gpu.schedule import LONGER, QUARTER, Part, Schedule
from benchmarks.gpu.sizes import WHOLE, config_of
from proxima_plan.devices import device_kinds


class Parsed(Exception):
    """A benchmark has understood its options."""


@pytest.mark.parametrize("name", schedule.PARTS)
def test_a_part_is_a_command_of_today(name, tiny_model, tmp_path, monkeypatch):
    part = schedule.PARTS[name]
    words = schedule._words(part, tmp_path / "gpu.jsonl", 60.0, str(tiny_model("llama")), tmp_path, True)
    if words[1] == "pytest":
        assert (schedule.ROOT / words[-1] / "test_gpu.py").is_file()
    elif words[1] == "proxima.cli.main":
        from proxima.config.validate import load_recipe

        config = load_recipe(str(schedule.ROOT / words[3]), [word for word in words[4:] if "=" in word]).config
        assert config.train.steps == 2 and config.folder == str(tmp_path / "run")
    elif name in QUARTER:
        monkeypatch.setattr(sys, "argv", words[1:])
        record, rehearse = importlib.import_module(words[1]).part_options(name)
        assert record.file == tmp_path / "gpu.jsonl" and 50 < record.left < 60 and rehearse
    else:

        def parsed(path):
            raise Parsed

        module = importlib.import_module(f"{words[1]}.run")
        monkeypatch.setattr(module, "need_model", parsed)
        monkeypatch.setattr(module, "peer_python", lambda _: sys.executable, raising=False)
        more = ["--peer-python", "python"] if {"trl", "verl"} & set(part.needs) else []
        monkeypatch.setattr(sys, "argv", [name, *words[2:], *more])
        with pytest.raises(Parsed):
            module.main()


def test_all_parts_share_one_limit():
    """What a part does not use is the next ones'; none takes from those after it."""
    now = 0.0
    parts = {"first": Part("", 1), "second": Part("", 3), "rest": Part("")}
    shared = Schedule(400.0, parts, clock=lambda: now)
    assert [shared.left(name) for name in parts] == [100.0, 400.0, 400.0]
    now = 30.0
    assert [shared.left(name) for name in parts] == [70.0, 370.0, 370.0]
    now = 401.0
    assert all(shared.left(name) < 0 for name in parts)
    assert sum(part.minutes for part in QUARTER.values()) == all_parts.MINUTES
    even = Schedule(400.0, {**LONGER, **parts}, even=True, clock=lambda: now)
    assert all(even.left(name) == 400.0 for name in parts)


def test_a_case_is_measured_left_out_or_has_failed(tmp_path):
    file = tmp_path / "gpu.jsonl"
    record, done = Record("part", file, 5.0), []
    record.case("too long", 6.0, lambda: done.append("too long"))
    record.case("broken", 1.0, lambda: done[3])
    record.case("good", 1.0, lambda: record.figure("good", 1234.5, "tokens/s", predicted=0.123456, goal=0.4))
    record.leave_out("absent", "no package")
    too_long, broken, good, absent = (
        {key: value for key, value in line.items() if key not in ("at", "part")} for line in lines_of(file)
    )
    assert too_long == {"name": "too long", "left_out": "needs 6 s, and 5 are left", "for_time": True} and not done
    assert broken == {"name": "broken", "failed": "IndexError: list index out of range"}
    assert good == {"name": "good", "value": 1234, "unit": "tokens/s", "predicted": 0.1235, "goal": 0.4}
    assert earlier(file, "part", "good") == 1234 and earlier(file, "other", "good") is None
    assert [exit_code(own) for own in ([good, absent], [good, too_long], [too_long, broken])] == [0, 3, 1]


PROGRAMS = {
    "own": "import sys\nfrom pathlib import Path\nfrom benchmarks.gpu.record import part_options\n"
    "record, rehearse = part_options('own')\nrecord.figure('speed', 7.0, 'x', predicted=7.5)",
    "good": "import json; json.dump({'ratio': 3.5, 'n': 2}, open(__import__('sys').argv[1], 'w'))",
    "says": "print('3 passed in 1 s')",
    "broken": "print('about to'); raise ValueError('17 rows\\n  are too many')",
    "slow": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])",
}


@pytest.fixture
def visit(tmp_path, monkeypatch):
    """Runs some parts and returns the exit code and the lines of the file, which goes on where the last visit ended."""
    parts = {}
    for name, code in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(code)
        parts[name] = Part(f"{tmp_path}/{name}.py {'{own}' if name == 'own' else '{out}'}")
    parts["absent"] = Part("-m nothing", needs=("no_such_package",))
    monkeypatch.setenv("PYTHONPATH", str(schedule.ROOT), prepend=":")
    monkeypatch.setattr(all_parts, "PARTS", parts)
    monkeypatch.setattr(schedule, "LEAST", 0.0)
    monkeypatch.setattr(all_parts, "commit", lambda: "none")
    monkeypatch.setattr(all_parts.signal, "signal", lambda *_: None)
    out = tmp_path / "gpu.jsonl"

    def visited(*names, minutes):
        words = ["--rehearse", "--minutes", str(minutes), "--json-out", str(out), "--only", *names]
        monkeypatch.setattr(sys, "argv", ["gpu", *words, "--logs", str(tmp_path / "logs")])
        return all_parts.main(), [{key: line[key] for key in line if key != "at"} for line in lines_of(out)]

    return visited


@pytest.mark.slow
def test_the_exit_code_says_whether_all_was_measured(visit, tmp_path, capsys):
    code, lines = visit("own", "good", "says", "absent", minutes=10)
    assert code == 0 and lines == [
        {"part": "own", "name": "speed", "value": 7.0, "unit": "x", "predicted": 7.5},
        {"part": "good", "name": "ratio", "value": 3.5, "unit": ""},
        {"part": "says", "name": "says: 3 passed in 1 s", "value": None, "unit": ""},
        {"part": "absent", "name": "absent", "left_out": "no_such_package is not installed", "for_time": False},
    ]
    code, lines = visit("slow", minutes=0.01)
    assert code == 3 and lines == [
        {"part": "slow", "name": "slow", "left_out": "was stopped at its limit", "for_time": True}
    ]
    code, lines = visit("good", "broken", minutes=10)
    assert code == 1 and lines[1:] == [
        {"part": "broken", "name": "broken", "failed": "exit code 1: ValueError: 17 rows"}
    ]
    first = json.loads((tmp_path / "gpu.jsonl").read_text().splitlines()[0])
    assert first["claim"] == "gpu" and first["rehearsal"]
    assert (tmp_path / "logs" / "says.txt").read_text() == "3 passed in 1 s\n"
    shown = capsys.readouterr().out
    assert "1 figures in" in shown and "broken: FAILED: exit code 1: ValueError: 17 rows" in shown


@pytest.mark.slow
def test_an_update_is_measured_beside_its_plan(tmp_path, monkeypatch):
    """One of a rehearsal: the others are the same code."""
    monkeypatch.setattr(updates, "CASES", updates.CASES[:1])
    file = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["updates", "--file", str(file), "--seconds", "60", "--rehearse"])
    updates.main()
    by_name = {line["name"].removeprefix("1.7B, checkpointed: "): line for line in lines_of(file)}
    assert exit_code(by_name.values()) == 0
    rates = ("tokens a second", "time", "model FLOP/s over the product rate")
    assert list(by_name) == [*rates, "allocated", "reserved", "norm of the gradient"]
    assert all(by_name[name]["value"] > 0 < by_name[name]["predicted"] for name in rates)
    assert by_name["allocated"]["value"] is None and by_name["norm of the gradient"]["value"] > 0


@pytest.mark.slow
def test_the_plan_knows_the_published_shapes(monkeypatch):
    h100, h200 = (device_kinds()[name] for name in ("H100-80G", "H200-141G"))
    monkeypatch.setattr(forecast, "kind_here", lambda: h200)
    large = updates.Case("4B").forecast(WHOLE, rehearse=False)
    assert (large.model.parameters, large.config.vocab_size) == (4_022_468_096, 151_936)
    assert config_of("1.7B", rehearse=False).num_hidden_layers == 28
    assert 0.1 < large.flops / large.seconds / forecast.product_rate() < 1 and large.allocated < large.needed
    assert large.decode_limit(256, 320) < large.decode_step(256, 320)
    plain = updates.Case("4B", checkpointed=False).forecast(WHOLE, rehearse=False)
    monkeypatch.setattr(forecast, "kind_here", lambda: h100)
    assert not plain.fits  # so it is left out there


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H200", 139.8, "H200-141G"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100-80G"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40G"),
    ],
)
def test_a_device_is_known_by_its_name_and_memory(name, gib, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    facts = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert forecast.kind_here.__wrapped__().name == kind


def test_a_folder_without_weights_gets_random_ones(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    whole, shape = tiny_model("llama"), tmp_path / "shape"
    assert all_parts.with_weights(whole, tmp_path) == whole
    shutil.copytree(whole, shape, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "place").mkdir()
    made = all_parts.with_weights(shape, tmp_path / "place")
    sizes = [sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(m).parameters()) for m in (whole, made)]
    assert sizes[0] == sizes[1] and {f.name for f in shape.iterdir()} < {f.name for f in made.iterdir()}


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert all_parts.main() == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "--rehearse" in output.err


def test_the_demo_is_told_by_its_accuracy():
    result = {"eval": {"before": {"accuracy": 0.1}, "after": {"accuracy": 0.9}}, "mfu": 0.5, "name": "x"}
    result["ratio"] = {"P=0.5": 2.2}
    assert schedule.told_by(result) == {"mfu": 0.5, "ratio P=0.5": 2.2, "accuracy before": 0.1, "accuracy after": 0.9}


def test_a_result_is_named_after_the_machine(monkeypatch):
    monkeypatch.setattr(harness, "date", SimpleNamespace(today=lambda: "2026-01-02"))
    monkeypatch.setattr(harness, "machine", lambda: {"cores": 2})
    assert harness.result_name() == "2026-01-02_2-cores.json"
    monkeypatch.setattr(harness, "machine", lambda: {"cores": 16, "gpus": ["NVIDIA H200", "NVIDIA H200"]})
    assert harness.result_name() == "2026-01-02_16-cores_nvidia-h200.json"
