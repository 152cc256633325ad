"""What `make demo` shows, and what the other scripts make."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from scripts import demo, mutants, test_times
from tests.warm import forked_subprocess

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def test_demo_shows_accuracy_five_questions_and_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals").mkdir()
    for step, label, texts in ((0, "before", ["Sure!\nIt is 11."] * 6), (40, "after", [str(10 + i) for i in range(6)])):
        rows = []
        for i, text in enumerate(texts):
            right = str(10 + i)
            row = {"prompt_uid": 90 + i, "question": f"What is 9 + {i + 1}?", "answer": json.dumps(right)}
            rows += [row | {"sample": sample, "text": text, "correct": right in text} for sample in (0, 1)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "evals" / f"{step:06d}-{label}.parquet")
    accuracy = {
        "before": {"accuracy": 1 / 6, "correct": 1, "questions": 6},
        "after": {"accuracy": 1.0, "correct": 6, "questions": 6},
    }
    summary = {"steps": 40, "seconds": 150.0, "algorithm": "cppo", "eval": accuracy}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    machine = {"machine": {"processor": "An EPYC"}, "torch": {"threads": 2, "devices": ["cpu"]}}
    (tmp_path / "environment.json").write_text(json.dumps(machine))
    lines = demo.result(tmp_path).splitlines()
    assert lines[0].startswith("held-out accuracy   0.167 -> 1.000   (1/6 -> 6/6 questions")
    assert lines[1] == "40 steps of cppo in 2.5 minutes on 2 threads of An EPYC"
    assert lines[4:7] == ["  What is 9 + 1?   answer 10", "      before wrong Sure! It is 11.", "      after  right 10"]
    assert sum("What is" in line for line in lines) == 5
    assert lines[-1] == "report: report.html"


def test_demo_shows_every_probe_of_a_server(tmp_path):
    steps = [
        {"step": 1, "sync/probe_mean": 0.0213, "sync/probe_max": 0.11, "sync/seconds": 0.42},
        {"step": 2, "sync/probe_mean": 0.02, "sync/probe_max": 0.1, "sync/bound_mean": 0.1, "sync/bound_max": 1.0},
    ]
    measured = [{"kind": "eval"}] + [step | {"mismatch/log_prob_absdiff_mean": 0.25 * step["step"]} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in measured))
    assert demo.probes(tmp_path).splitlines()[1:] == [
        "  step    mean      max   bounds         seconds",
        "     1  0.0213   0.1100                    0.42",
        "     2  0.0200   0.1000   0.1 1            0.00",
        "mismatch of the completions trained on, mean of all steps: 0.3750 nats",
    ]


def test_demo_asks_the_untrained_model_again_with_room_to_finish(tmp_path, monkeypatch, tiny_model, capfd):
    monkeypatch.setattr(demo, "REPOSITORY", tmp_path)
    monkeypatch.setattr(demo, "subprocess", forked_subprocess())
    monkeypatch.setattr(demo, "RECIPE", str(SCRIPTS.parent / "recipes" / "quickstart.yaml"))
    monkeypatch.setattr(demo, "ROOM", {"--max-tokens": 5, "--limit": 3})
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent / "src"))
    small = ["train.steps=1", "train.warmup_steps=0", "train.prompts_per_step=2", "train.completions_per_prompt=4"]
    small += ["eval.limit=8", "reward=[number, {kind: format, pattern: '[!-?]', weight: 0.1}]"]  # some answers differ
    monkeypatch.setattr(sys, "argv", ["demo.py", f"--model={tiny_model('llama')}", *small])
    assert demo.main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2:] == [
        "the untrained model once more, with 5 tokens for an answer",
        "held-out accuracy   0.000   (0/3); more than that is skill, not brevity",
    ]


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
    monkeypatch.setattr(mutants, "CORE", tmp_path)
    (tmp_path / "spec.py").write_text(
        "class Spec:\n    def __call__(self, x):\n        return -x if 0 < x <= 9 else x - 1\n"
    )
    values = list(mutants.mutants_of(tmp_path / "spec.py"))
    changes = [mutant.name.split("  ", 1)[1] for mutant in values]
    assert changes[1:] == ["0 < x <= 9  ->  0 > x <= 9", "0 < x <= 9  ->  0 < x >= 9", "-x  ->  +x", "x - 1  ->  x + 1"]
    results = []
    for mutant in values:
        scope = {"percent_off": mutants.percent_off}
        exec(mutants.mutated(tmp_path / "spec.py", mutant.site), scope)
        results.append([scope["Spec"]()(x) for x in (-2, 2, 20)])
    assert results[0] == pytest.approx([-3.03, -2.02, 19.19])
    assert results[1:] == [[2, 1, 19], [-3, 1, -20], [-3, 2, 19], [-1, -2, 21]]


def test_a_mutant_meets_what_executes_it_and_a_constant_whatever_runs_its_file(monkeypatch):
    covered = {("spec.py", 3): ["a"], ("spec.py", 9): ["b", "a"], ("other.py", 3): ["c"]}
    monkeypatch.setattr(mutants, "COVERED", {"golden": covered})
    inside = mutants.Mutant("spec.py", 0, (3, 4), "spec.py.loss()  x + 1  ->  x - 1")
    constant = mutants.Mutant("spec.py", 1, (1, 1), "spec.py  -1  ->  +1")
    assert mutants.names_at("golden", inside) == ["a"] and mutants.names_at("golden", constant) == ["a", "b"]


def test_a_function_is_slow_if_most_of_its_cases_are():
    measured = {"a::f[1]": 0.3, "a::f[2]": 0.2, "a::f[3]": 0.0, "a::g[1]": 0.1, "a::g[2]": 0.01, "a::h": 0.09}
    assert test_times.slow(measured, limit=0.1) == {"a::f", "a::g[1]"}
