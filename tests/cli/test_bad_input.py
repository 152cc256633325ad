"""The issue's list of bad input, as a user types it: one line with the remedy, exit 2, nothing written, no weights
read."""

import json

import pytest


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Whoever reads weights before refusing has failed."""

    def read(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("proxima.model.model_source.load", read)


CASES = [
    (
        "algorithm.surrogate.dleta=0.2",
        "algorithm.surrogate.dleta=0.2 (command line): 'cppo' has no field 'dleta'; did you mean 'delta'?",
    ),
    (
        "algorithm.surrogate.kind=cpoo",
        "algorithm.surrogate.kind=cpoo (command line): no surrogate 'cpoo'; did you mean 'cppo'?",
    ),
    ("train.steps=many", "train.steps=many (command line): must be a whole number"),
    ("algorithm.surrogate.delta=-1", "algorithm.surrogate.delta=-1 (command line): must be > 0"),
    (
        "model.path=models/none",
        "model.path=models/none (command line): does not exist: a path is relative to the current folder; "
        "give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B",
    ),
    (
        "model.path=/dev/zero",
        "model.path=/dev/zero (command line): is neither a file nor a folder but a device, a pipe or a socket; "
        "give a folder or a .gguf file",
    ),
    (
        "train.updates_per_step=3",
        "train.updates_per_step=3 (command line): must divide prompts_per_step=2; a group is never split over two "
        "updates",
    ),
    (
        "model.device=mps",
        "model.device=mps (command line): is not a device of proxima; write auto, cpu, cuda or cuda:1",
    ),
    ("train.optimizer.lr=.inf", "train.optimizer.lr=.inf (command line): must be >= 0 and finite"),
    ("sampling.temperature=.inf", "sampling.temperature=.inf (command line): must be >= 0 and finite; 0 is greedy"),
    (
        "sampling.temperature=0",
        "sampling.temperature=0 (command line): training needs samples, 0 is greedy; set it > 0, evaluation is "
        "greedy by default",
    ),
    (
        "algorithm.surrogate.kind=tests.config.fakes:NeedsTopK",
        "algorithm.surrogate.kind=tests.config.fakes:NeedsTopK (command line): 'tests.config.fakes:NeedsTopK' "
        "with these values needs the engine's top-k log-probs; set engine.top_k_log_probs=20",
    ),
]


@pytest.mark.parametrize(("override", "line"), CASES, ids=[case[0] for case in CASES])
def test_refused_in_one_line(proxima, recipe, here, override, line):
    assert proxima("train", recipe(), override, "folder=run") == (2, "", f"error: {line}\n")
    assert not (here / "run").exists()


def test_several_problems_are_several_lines(proxima, recipe):
    code, _, err = proxima("train", recipe(), "train.steps=0", "seed=x", "trian.steps=1")
    assert code == 2
    assert [line.partition("=")[0] for line in err.splitlines()] == [
        "error: trian.steps",
        "error: seed",
        "error: train.steps",
    ]


def test_a_missing_data_file(proxima, recipe):
    code, _, err = proxima("train", recipe(), "task.kind=jsonl", "task.path=questions.jsonl")
    assert (code, err) == (
        2,
        "error: task.path=questions.jsonl (command line): no such file; give a path relative to the current folder\n",
    )


def data(here, *rows):
    (here / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("task.kind=jsonl", "task.path=q.jsonl")


def test_a_column_that_is_not_there(proxima, recipe, here):
    code, _, err = proxima("train", recipe(), *data(here, {"problem": "1 + 1", "answer": "2"}))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "question" in err
    assert "problem" in err


def test_an_empty_data_set(proxima, recipe, here):
    code, _, err = proxima("train", recipe(), *data(here))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "q.jsonl" in err


def test_a_prompt_longer_than_the_context_is_refused_on_request(proxima, recipe, here):
    rows = [{"question": "x" * 400, "answer": "2"}, {"question": "1 + 1", "answer": "2"}]
    code, _, err = proxima("train", recipe(), *data(here, *rows), "data.over_length=refuse")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "over_length" in err or "context" in err


def test_a_size_that_the_range_does_not_give(proxima, recipe):
    code, _, err = proxima("train", recipe(), "task.size=5000")
    assert code == 2
    assert err.startswith("error: task.size=5000 (command line): must be <= ")


def test_an_existing_run_folder(proxima, recipe, here):
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text("x: 1\n")
    (here / "run" / "metrics.jsonl").write_text("")
    code, _, err = proxima("train", recipe(), "folder=run")
    assert code == 2
    assert (
        err == "error: run contains a run; continue it with --resume, delete it with --overwrite, or set folder=PATH\n"
    )


def test_a_run_that_is_none(proxima, here):
    (here / "empty").mkdir()
    code, _, err = proxima("export", "empty", "out")
    assert (code, err) == (2, "error: empty contains no checkpoint; give a run folder written by `proxima train`\n")


def test_generate_with_a_model_that_is_none(proxima, here):
    code, _, err = proxima("generate", "nowhere", "hi")
    assert code == 2
    assert (
        err == "error: model=nowhere (command line): does not exist: a path is relative to the current folder; "
        "give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B\n"
    )
    code, _, err = proxima("generate", "some/model", "hi", "--top-p", "2")
    assert (code, err) == (2, "error: --top-p=2.0 must be in (0, 1]; 1 keeps all tokens\n")
    code, _, err = proxima("generate", "some/model", "hi", "--samples", "0")
    assert (code, err) == (2, "error: --samples=0 must be >= 1\n")


def test_list_of_no_slot(proxima):
    assert proxima("list", "surogate") == (2, "", "error: slot=surogate (command line): did you mean 'surrogate'?\n")


def test_explain_shows_the_values_and_then_the_problem(proxima, recipe):
    code, out, err = proxima("explain", recipe(), "sampling.temperature=0")
    assert code == 2
    assert "sampling.temperature" in out
    assert err.startswith("error: sampling.temperature=0 (command line): training needs samples")


@pytest.mark.parametrize("device", ["cuda:99", "mps"])
def test_explain_without_the_device(device, proxima, recipe):
    code, out, err = proxima("explain", recipe(), f"model.device={device}")
    assert code == 2 and "model.device" in out and err.startswith(f"error: model.device={device} (command line): ")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{last}'] * 10)}]\n" for last, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: " + "[" * 5000 + "]" * 5000, "bad.yaml: is nested too deeply for a recipe"),
        ("seed: 1\x1b", "bad.yaml: not YAML: unacceptable character #x001b: "),
        (BOMB, "bad.yaml: holds more than 100,000 values"),
        ('data: {system: "\\ud83d"}', "must be a text that UTF-8 can hold"),
    ],
)
def test_hostile_yaml_is_one_line(text, line, proxima, recipe, here):
    recipe()
    (here / "bad.yaml").write_text(text if text.startswith(("a:", "seed")) else f"extends: tiny.yaml\n{text}\n")
    code, _, err = proxima("train", "bad.yaml")
    assert code == 2 and len(err.splitlines()) == 1 and line in err


def test_an_override_with_a_control_character_is_a_text(proxima, recipe):
    code, _, err = proxima("explain", recipe(), "data.system=a\x07b")
    assert (code, err) == (0, "")


def test_a_folder_with_an_escape_sequence_is_refused(proxima, recipe, here):
    code, _, err = proxima("train", recipe(), "folder=runs/\x1b[31mred")
    assert code == 2 and "\x1b" not in err and "must not have control characters" in err
    assert not (here / "runs").exists()


def test_explain_imports_foreign_code_only_when_asked(proxima, recipe, here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "foreign.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\n"
        "from proxima.core import PpoClip\nclass Mine(PpoClip): pass\n"
    )
    words = ("explain", recipe(), "algorithm.surrogate=foreign:Mine")
    code, _, err = proxima(*words)
    assert code == 2 and not (here / "imported").exists()
    assert "algorithm.surrogate.kind=foreign:Mine (command line): is code outside proxima" in err
    assert proxima(*words, "--import-code")[0] == 0 and (here / "imported").exists()
