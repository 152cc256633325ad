"""What `make demo` shows, and what the other scripts make."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from scripts import demo, mutant_checks, mutants, mutations, test_times
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


@pytest.mark.slow
def test_demo_asks_the_untrained_model_again_with_room_to_finish(tmp_path, monkeypatch, tiny_model, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "REPOSITORY", tmp_path)
    monkeypatch.setattr(demo, "subprocess", forked_subprocess())
    monkeypatch.setattr(demo, "RECIPE", str(SCRIPTS.parent / "recipes" / "quickstart.yaml"))
    monkeypatch.setattr(demo, "ROOM", {"--max-tokens": 5, "--limit": 3})
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS.parent / "src"))
    small = ["train.steps=1", "train.warmup_steps=0", "train.prompts_per_step=2", "train.completions_per_prompt=8"]
    small += ["eval.limit=8", "reward=[number, {kind: format, pattern: '[a-m]', weight: 0.1}]"]  # some answers differ
    monkeypatch.setattr(sys, "argv", ["demo.py", f"--model={tiny_model('llama')}", *small])
    assert demo.main() == 0
    lines = capfd.readouterr().out.splitlines()
    at = lines.index("the untrained model once more, with 5 tokens for an answer:")
    assert lines[at + 1 : at + 5] == [
        "held-out accuracy   0.000   (0/3)",
        "the trained model is not above that: nothing shows that it has learned to add",
        "",
        "next",
    ]
    commands = [line.partition("#")[0].split() for line in lines[at + 5 :]]
    assert commands[-2:] == [["proxima", "view", "runs/quickstart"], ["proxima", "init", "mine"]]
    assert all(command[:1] == ["source"] and Path(command[1]).is_file() for command in commands[:-2])


@pytest.mark.parametrize(
    ("before", "after", "share", "meaning"),
    [
        (0.03, 0.92, 0.09, "of the gain from 0.030 to 0.920, about 0.060 is only that its answers got shorter"),
        (0.03, 0.92, 0.09, "the other 0.830 is addition that it has learned"),
        (0.2, 0.92, 0.09, "about 0.000 is only that its answers got shorter;\nthe other 0.720 is addition"),
        (0.03, 0.09, 0.09, "the trained model is not above that"),
    ],
)
def test_the_demo_says_how_much_of_the_gain_is_shorter_answers(tmp_path, before, after, share, meaning):
    accuracy = {"before": {"accuracy": before}, "after": {"accuracy": after}}
    (tmp_path / "summary.json").write_text(json.dumps({"eval": accuracy}))
    suite = {"correct": round(100 * share), "questions": 100}
    (tmp_path / "result.json").write_text(json.dumps({"suites": {"arithmetic": suite}}))
    said = demo.with_room(tmp_path, tmp_path)
    assert said.startswith(f"held-out accuracy   {share:.3f}   ({100 * share:.0f}/100)\n") and meaning in said


def test_make_says_what_is_wrong_with_a_python(tmp_path):
    shutil.copy(SCRIPTS.parent / "Makefile", tmp_path)
    for name, code in (("older", 3), ("broken", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    for python, problem in (
        ("python3.99", "does not exist"),
        ("./older", "is older than 3.11"),
        ("./broken", "does not run (exit code 1)"),
    ):
        command = ["make", "-s", "-C", str(tmp_path), ".venv/bin/python", f"PYTHON={python}"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
        assert done.returncode == 2 and not (tmp_path / ".venv").exists()
        assert done.stderr.splitlines()[0].startswith(f"error: PYTHON={python} {problem}; set it to a ")


@pytest.mark.slow
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


def tiny_repository(root, text, room="core"):
    """A repository of one room with one file; returns its mutants, and what each changes."""
    folder = root / "src" / "proxima" / room
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "spec.py").write_text(text, encoding="utf-8")
    values = list(mutations.mutants_of(room, root))
    return values, [mutant.name.split("  ", 1)[1] for mutant in values]


def test_a_mutant_is_the_source_with_one_change(tmp_path):
    source = "class Spec:\n    def __call__(self, x):\n        return -x if 0 < x <= 9 else x - 1\n"
    values, changes = tiny_repository(tmp_path, source)
    signs = ["0 < x <= 9  ->  0 > x <= 9", "0 < x <= 9  ->  0 < x >= 9", "-x  ->  +x", "x - 1  ->  x + 1"]
    results = {}
    for mutant, change in zip(values, changes, strict=True):
        scope = {}
        exec(mutations.mutated_source(source, mutant.site, specs=True), scope)
        results[change] = [scope["Spec"]()(x) for x in (-2, 2, 20)]
    assert results.pop(changes[0]) == pytest.approx([-3.03, -2.02, 19.19])
    assert results == {
        signs[0]: [2, 1, 19],
        signs[1]: [-3, 1, -20],
        signs[2]: [-3, 2, 19],
        signs[3]: [-1, -2, 21],
        "-x if 0 < x <= 9 else x - 1  ->  x - 1 if 0 < x <= 9 else -x": [2, 1, -20],
        "0  ->  1": [-3, -2, 19],
        "9  ->  10": [-3, -2, 19],
        "1  ->  2": [-4, -2, 18],
    }


def test_a_result_one_percent_off_is_that_of_a_spec(tmp_path):
    _, changes = tiny_repository(tmp_path, "class Page:\n    def __call__(self):\n        return 1\n", room="view")
    assert changes == ["1  ->  2"]


def test_the_rest_of_a_mutants_text_stays(tmp_path):
    """Several lines, characters of several bytes, and what binds more tightly than the change."""
    source = """def f(x):  # é
    y = 'é' * (
        x
        - 2
    ) * 3  # why
    x.clear()
    return not x == y
"""
    values, changes = tiny_repository(tmp_path, source)
    texts = {change: mutations.mutated_source(source, m.site) for m, change in zip(values, changes, strict=True)}
    assert texts["x - 2  ->  x + 2"] == source.replace("x\n        - 2", "(x + 2)")
    assert texts["x.clear()  ->  pass"] == source.replace("x.clear()", "pass")
    assert texts["not x == y  ->  x == y"] == source.replace("not x == y", "(x == y)")
    assert texts["3  ->  4"] == source.replace("* 3", "* 4")


def test_what_is_changed_and_what_is_not(tmp_path):
    """Errors, messages, annotations and imports stay, and of a check of a field all but the signs."""
    source = """
from math import inf
def loss(x: list[1], y=True):
    require(0 < x, "x", x, "must be > 0", 5)
    if x is None:
        raise ValueError(f"{x + 1}")
    x.scale *= 2
    x.clear()
    return max(x, y) and not x.sum(0.5)
"""
    _, changes = tiny_repository(tmp_path, source)
    assert changes == [
        "True  ->  False",
        "0 < x  ->  0 > x",
        "x is None  ->  x is not None",
        "x.scale *= 2  ->  x.scale /= 2",
        "x.scale *= 2  ->  pass",
        "2  ->  3",
        "x.clear()  ->  pass",
        "max(x, y) and (not x.sum(0.5))  ->  max(x, y) or not x.sum(0.5)",
        "max  ->  min",
        "not x.sum(0.5)  ->  x.sum(0.5)",
        "x.sum  ->  x.mean",
        "0.5  ->  1.0",
    ]


def test_every_room_with_sources_is_drawn_from():
    packages = {path.parents[2].name for path in SCRIPTS.parent.glob("packages/*/src/*/__init__.py")}
    own = {path.parent.name for path in SCRIPTS.parent.glob("src/proxima/*/*.py")}
    assert set(mutations.rooms()) == own | {name.removeprefix("proxima-") for name in packages}
    for sources, tests in mutations.rooms().values():
        assert (SCRIPTS.parent / sources).is_dir() and (SCRIPTS.parent / tests).is_dir()


def test_a_sample_is_of_all_rooms_and_larger_where_the_room_is(tmp_path, monkeypatch):
    monkeypatch.setattr(mutations, "PACKAGES", ())
    tiny_repository(tmp_path, "x = [1, 2, 3]\n", room="small")
    tiny_repository(tmp_path, f"x = {list(range(2, 2102))}\n", room="large")
    drawn = mutations.sample(7, 2, tmp_path)
    assert [mutant.room for mutant in drawn] == ["large", "small", "large", "small", "large"]
    assert mutations.sample(7, 1, tmp_path) == [*drawn[:2], drawn[2]]
    assert mutations.sample(8, 2, tmp_path) != drawn


def repository_of_tests(root):
    """A repository whose `core.spec` doubles: one test sees 0, one starts a process and sees 3, two always fail."""
    values, changes = tiny_repository(root, "def f(x):\n    return x * 2\n\n\ndef g():\n    return 1\n")
    (root / "src" / "proxima" / "__init__.py").touch()
    call = "subprocess.check_output([sys.executable, '-c', 'from proxima.core.spec import f; print(f(3))'])"
    files = {
        "tests/core/test_f.py": "from proxima.core.spec import f\ndef test_f():\n    assert f(0) == 0\n",
        "tests/core/test_z.py": "import proxima.core\ndef test_fails():\n    assert False\n",
        "tests/data/test_p.py": f"import subprocess, sys\ndef test_p():\n    assert {call} == b'6\\n'\n",
        "tests/data/test_other.py": "def test_other():\n    assert False\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'campaign', 'gpu']\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return dict(zip(changes, values, strict=True))


def test_a_mutant_meets_what_names_its_module_first_and_then_its_room(tmp_path):
    found = repository_of_tests(tmp_path)
    parts = mutant_checks.tests_of(found["1  ->  2"], tmp_path)
    assert parts == [["tests/core/test_f.py"], ["tests/data/test_p.py", "tests/core/test_z.py"]]


def test_what_a_package_passes_on_is_of_the_module_that_defines_it(tmp_path):
    mutant = repository_of_tests(tmp_path)["1  ->  2"]
    (tmp_path / "tests" / "data" / "test_g.py").write_text("from proxima.core import g\n")
    (tmp_path / "tests" / "data" / "test_h.py").write_text("from proxima.core import h\n")
    mutant_checks.tests_and_imports.cache_clear()
    assert mutant_checks.naming(mutant, tmp_path) == [
        "tests/data/test_g.py",
        "tests/core/test_f.py",
        "tests/data/test_p.py",
    ]


@pytest.mark.slow
def test_a_mutant_is_caught_by_a_test_that_fails_with_it_and_passes_without(tmp_path):
    """Also by one that starts a process of its own; what fails without the mutant is left out."""
    root = tmp_path / "repository"
    root.mkdir()
    found = repository_of_tests(root)
    unfit = []
    outcomes = [mutants.outcome(root, found[change], 60, unfit, []) for change in ("2  ->  3", "1  ->  2")]
    assert outcomes == [{"by": "tests/data/test_p.py::test_p", "passed": 1}, {"by": "missed", "passed": 2}]
    assert unfit == ["tests/core/test_z.py::test_fails"]


def test_the_first_outcome_stays_when_the_missed_are_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "RESULTS", tmp_path)
    (tmp_path / "equivalent.txt").write_text("core/a.py  3  ->  4  #  nobody reads it\n")
    caught, missed = {"by": "tests/test_a.py::test_a", "passed": 3}, {"by": "missed", "passed": 9}
    names = ["core/a.py  1  ->  2", "core/a.py  2  ->  3", "core/a.py  3  ->  4"]
    rows = [
        {"room": "core", "mutant": name, "place": "a:1", "first": first}
        for name, first in zip(names, (caught, missed, missed), strict=True)
    ]
    mutants.write({"seed": 5, "each": 3, "date": "2026-12-01", "commit": "HEAD", "mutants": rows})
    asked = []

    def outcome(root, mutant, limit, unfit, by):
        asked.append(mutant.name)
        return caught

    monkeypatch.setattr(mutants, "outcome", outcome)
    monkeypatch.setattr(
        mutants, "mutants_of", lambda room, root: [mutations.Mutant(room, "a.py", 0, 1, name) for name in names]
    )
    monkeypatch.setattr(mutants, "HEAVY", ())
    mutants.run(5, 60, False, [""], 60, [])
    assert asked == []
    mutants.run(5, 60, True, [""], 60, [])
    assert asked == [names[1]]
    assert [row["first"] for row in mutants.read(5)["mutants"]] == [caught, missed, missed]
    assert mutants.read(5)["mutants"][1]["now"] == caught
    table = mutants.tables().splitlines()
    assert table[2] == "| 5 | 2026-12-01 | 3 | 1 | 1 | 1 | 0 | 50 % | 9 to 91 % | 2 of 2 |"
    assert table[-1] == "| all | 1 | 1 | 0 | 50 % | 9 to 91 % |"


def test_the_table_of_mutants_is_of_the_results():
    page = (SCRIPTS.parent / "tests" / "README.md").read_text(encoding="utf-8")
    assert mutants.with_tables(page) == page


def test_a_function_is_slow_if_most_of_its_cases_are():
    measured = {"a::f[1]": 0.3, "a::f[2]": 0.2, "a::f[3]": 0.0, "a::g[1]": 0.1, "a::g[2]": 0.01, "a::h": 0.09}
    assert test_times.slow(measured, limit=0.1) == {"a::f", "a::g[1]"}
