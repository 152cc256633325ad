"""A resume after something was lost, damaged or changed: it finds out, says so in one line, and has a way on."""

import json
import shutil
from dataclasses import replace

import pytest

from proxima.config.sections.model import ModelConfig
from proxima.data import FieldError, UserError
from proxima.runtime.resume.changes import model_hashes
from proxima.runtime.resume.rewind import RestoredJournal
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.run_checkpoints import export
from proxima.training.checkpoint import checkpoints
from tests.runtime.state.test_folder_check import flip
from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, traces


@pytest.fixture
def two_steps(runs, tmp_path):
    """A run of three steps that carries groups over, as it was after two of them."""
    run = RunFolder(shutil.copytree(runs.finished("carried groups"), tmp_path / "run"))
    shutil.rmtree(run.checkpoint(3))
    return run


@pytest.fixture
def resume(two_steps, runs):
    """Resume it, and return the warnings."""

    def resumed():
        watcher = Watcher()
        runs.go("carried groups", two_steps.path, resume=True, observer=watcher)
        return watcher.warnings

    return resumed


@pytest.mark.slow
def test_a_flipped_bit_costs_a_checkpoint_not_the_run(runs, tmp_path):
    run, watcher = RunFolder(shutil.copytree(runs.finished("carried groups"), tmp_path / "run")), Watcher()
    flip(run.checkpoint(3) / "optimizer.safetensors", at=1.0, bit=2)
    shutil.copytree(run.checkpoint(1), run.checkpoints / "000001 copy")
    runs.go("carried groups", run.path, resume=True, observer=watcher, checkpoint__keep_best=True)
    said = "000003: optimizer.safetensors is damaged; it is now 000003.damaged, and the checkpoint before it, 000002"
    assert said in watcher.warnings[0]
    assert [c.step for c in checkpoints(run.checkpoints)] == [1, 2, 3]
    assert_same(traces(run.path), runs.traces("carried groups"))


def test_weights_with_a_flipped_bit_are_neither_exported_nor_trained_on(runs, tmp_path):
    run = RunFolder(shutil.copytree(runs.finished("carried groups"), tmp_path / "run"))
    flip(run.checkpoint(3) / "model" / "model.safetensors", at=1.0, bit=2)
    flip(run.checkpoint(2) / "optimizer.safetensors", at=1.0, bit=2)
    reason = "model/model.safetensors is damaged"
    with pytest.raises(UserError, match=rf"000003: {reason}; restore the file from a copy, or use one of \[1, 2\]"):
        export(run.path, tmp_path / "out")
    export(run.path, tmp_path / "out", which="2")  # which needs no optimizer
    model = ModelConfig(path=str(run.checkpoint(3) / "model"))
    with pytest.raises(FieldError, match=f"^model.path='.*' differs from what the run wrote: {reason}; restore"):
        model_hashes(model)
    assert model_hashes(replace(model, path=str(run.checkpoint(2) / "model")))
    copied = shutil.copytree(run.checkpoint(3), tmp_path / "mine")  # whatever the user did with it
    assert model_hashes(replace(model, path=str(copied / "model")))


@pytest.mark.slow
def test_a_journal_without_its_wal_is_restored_from_the_metrics(two_steps, runs, resume):
    assert checkpoints(two_steps.checkpoints)[-1].facts["pending"]
    with RestoredJournal(two_steps.journal) as journal:
        journal.rewind(1)
    first, *_ = resume()
    assert first.startswith("run.sqlite ended at step 1: was it copied without run.sqlite-wal? Steps 2 to 2")
    lost, restored, whole = {"consumed", "counts"}, traces(two_steps.path), runs.traces("carried groups")
    assert_same(restored, {name: value for name, value in whole.items() if name not in lost})
    assert restored["consumed"][3] == whole["consumed"][3]
    with Journal(two_steps.journal) as journal:
        assert journal.step == 3 and journal.counts().get("generating") is None
    resume()  # and again, from the end


def test_a_journal_that_nothing_can_restore_is_one_line(two_steps, resume):
    two_steps.journal.unlink()
    two_steps.metrics.unlink()
    with pytest.raises(UserError, match=r"run.sqlite ends at step 0, metrics.jsonl lacks step 1, .*; restore run"):
        resume()


@pytest.mark.slow
def test_a_damaged_line_of_the_metrics_is_one_line(two_steps, resume):
    lines = two_steps.metrics.read_text().splitlines(keepends=True)
    two_steps.metrics.write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
    said = r"metrics.jsonl:2 is not a JSON object .*; restore the file or delete the line"
    with pytest.raises(UserError, match=said):
        resume()


QUESTIONS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]
INPUTS = {  # a file, words in it and others (None: its last byte is another one), and what a resume then says
    "weights": ("model/model.safetensors", None, "model.path: model.safetensors"),
    "chat template": ("model/chat_template.jinja", ("assistant", "Assistant"), "model.path: chat_template.jinja"),
    "data": ("data.jsonl", ('"22"', '"23"'), "task: its rows"),
    "held-out data": ("held_out.jsonl", ('"2"', '"3"'), "eval.task: its rows"),
    "set": ("set.jsonl", ('"2"', '"3"'), "eval.sets own: its rows"),
    "reward": ("mine.py", ("len(", "-len("), "reward.1: mine.py"),
    "reward model": ("scorer/model.safetensors", None, "reward.2.path: model.safetensors"),
    "teacher": ("teacher/model.safetensors", None, "algorithm.distillation.path: model.safetensors"),
}


@pytest.fixture(scope="module")
def run_on_files(runs, tiny_model, tmp_path_factory):
    """A folder with a run of one step and all its inputs, and its recipe."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, source in {"model": tiny_model("llama"), "scorer": runs.scorer(), "teacher": tiny_model("qwen2")}.items():
        shutil.copytree(source, folder / name)
    tasks = {}
    for name, rows in {"data": QUESTIONS, "held_out": QUESTIONS[:3], "set": QUESTIONS[:2]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks[name] = {"kind": "jsonl", "path": str(folder / f"{name}.jsonl")}
    (folder / "mine.py").write_text("def length(completion: str, answer):\n    return len(completion)\n")
    others = {"function": f"{folder}/mine.py:length", "model": str(folder / "scorer")}
    tree = recipe(
        folder / "model",
        task=tasks["data"],
        reward=[
            {"kind": "tests.runtime.tiny_run:Even"},
            *({"kind": kind, "path": path, "weight": 0} for kind, path in others.items()),
        ],
        algorithm={"preset": "distill", "distillation": {"path": str(folder / "teacher")}},
        eval={"task": tasks["held_out"], "sets": [{"name": "own", "task": tasks["set"]}], "every": 0},
        eval__before=False,
        eval__after=False,
        train__steps=1,
    )
    go(folder / "run", tree)
    return folder, tree


@pytest.mark.slow
@pytest.mark.parametrize("what", INPUTS)
def test_inputs_that_changed_are_found_by_content(what, run_on_files):
    folder, tree = run_on_files
    name, words, said = INPUTS[what]
    content = (folder / name).read_bytes()
    if words is None:
        other = content[:-1] + bytes([content[-1] ^ 1])
    else:
        other = content.replace(words[0].encode(), words[1].encode())
    assert other != content
    (folder / name).write_bytes(other)
    with pytest.raises(UserError, match=f"^{said}: changed since the run in .* was started; restore it, or start"):
        go(folder / "run", tree, resume=True)
    (folder / name).write_bytes(content)


@pytest.mark.slow
def test_the_same_rows_in_other_bytes_are_the_same_input(run_on_files):
    folder, tree = run_on_files
    data = folder / "data.jsonl"
    data.write_text(data.read_text().replace(", ", ",  "))
    assert go(folder / "run", tree, resume=True).status == "done"


@pytest.mark.slow
def test_settings_that_change_the_last_bits_are_listed(runs, tmp_path):
    """Once, here at a resume of a finished run."""
    folder = shutil.copytree(runs.finished("carried groups"), tmp_path / "run")
    other = {"model__log_prob_chunk": 64, "engine__prefill_tokens": 32}
    said = "model.log_prob_chunk=64 (was 512), engine.prefill_tokens=32 (was 2048): the run continues"
    for notes in (1, 0):
        watcher = Watcher()
        runs.go("carried groups", folder, resume=True, observer=watcher, **other)
        assert [text.startswith(said) for text in watcher.warnings] == [True] * notes
