"""A resume after something was lost, damaged or changed: it finds out, says so in one line, and has a way on."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.train.checkpoint import checkpoints
from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, traces

CARRIED = {
    "algorithm__selection": [{"kind": "drop_uniform_groups"}],
    "algorithm__dynamic_sampling": {"oversample": 2.0, "exhausted": "partial"},
    "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 3}],
    "task__size": 40,
}


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A finished run of three steps that carries groups over; read-only by agreement."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(folder, recipe(tiny_model("llama"), **CARRIED))
    return folder


@pytest.fixture
def two_steps(whole, tmp_path):
    """The same run as it was after two of its steps."""
    shutil.copytree(whole, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    shutil.rmtree(run.checkpoint(3))
    return run


def resume(run, tiny_model, **changes):
    watcher = Watcher()
    go(run.path, recipe(tiny_model("llama"), **CARRIED, **changes), resume=True, observer=watcher)
    return watcher.warnings


def test_a_flipped_bit_costs_a_checkpoint_not_the_run(whole, tiny_model, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    file = run.checkpoint(3) / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(content)
    first, *_ = resume(run, tiny_model)
    assert (
        "000003: optimizer.safetensors is damaged; it is now 000003.damaged, and the checkpoint before it, 000002"
        in first
    )
    assert [c.step for c in checkpoints(run.checkpoints)] == [1, 2, 3]
    assert_same(traces(run.path), traces(whole))


@pytest.mark.parametrize("left", [0, 1])
def test_a_journal_without_its_wal_is_restored_from_the_metrics(left, two_steps, whole, tiny_model):
    assert checkpoints(two_steps.checkpoints)[-1].facts["pending"]
    if left:
        with Journal(two_steps.journal) as journal:
            journal.rewind(left)
    else:
        two_steps.journal.unlink()
    first, *_ = resume(two_steps, tiny_model)
    assert first.startswith(
        f"run.sqlite ended at step {left}: was it copied without run.sqlite-wal? Steps {left + 1} to 2"
    )
    lost, restored = {"consumed", "counts"}, traces(two_steps.path)
    assert_same(restored, {name: value for name, value in traces(whole).items() if name not in lost})
    assert restored["consumed"][3] == traces(whole)["consumed"][3]
    with Journal(two_steps.journal) as journal:
        assert journal.step == 3 and journal.counts().get("generating") is None
    resume(two_steps, tiny_model)  # and again, from the end


def test_a_journal_that_nothing_can_restore_is_one_line(two_steps, tiny_model):
    two_steps.journal.unlink()
    two_steps.metrics.unlink()
    with pytest.raises(UserError, match=r"run.sqlite ends at step 0, metrics.jsonl lacks step 1, .*; restore run"):
        resume(two_steps, tiny_model)


def test_metrics_are_written_again_from_the_journal(two_steps, whole, tiny_model):
    two_steps.metrics.unlink()
    resume(two_steps, tiny_model)
    restored, expected = (traces(folder)["metrics"] for folder in (two_steps.path, whole))
    assert restored == expected
    assert [r["step"] for r in restored if r["kind"] == "eval"] == [0, 2, 3]


def test_a_damaged_line_of_the_metrics_is_one_line(two_steps, tiny_model):
    lines = two_steps.metrics.read_text().splitlines(keepends=True)
    two_steps.metrics.write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
    with pytest.raises(
        UserError, match=r"metrics.jsonl:2 is not a JSON object .*; restore the file or delete the line"
    ):
        resume(two_steps, tiny_model)
    two_steps.metrics.write_text("".join([lines[0], *lines[2:]]))
    resume(two_steps, tiny_model)
    assert two_steps.metrics.read_text().splitlines()[1] == lines[1].rstrip("\n")


def run_on_files(tiny_model, tmp_path):
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(tiny_model("llama"), model)
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "jsonl", "path": str(data), "question": "question", "answer": "answer"}
    held_out = data.with_name("held_out.jsonl")
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    off = {"eval__before": False, "eval__after": False, "eval__every": 0}
    reward = data.with_name("my_reward.py")
    reward.write_text("def length(completion: str, answer):\n    return len(completion)\n")
    rewards = [{"kind": "tests.runtime.tiny_run:Even"}, {"kind": "function", "path": f"{reward}:length", "weight": 0}]
    tree = recipe(model, reward=rewards, task=task, eval__task=task | {"path": str(held_out)}, train__steps=1, **off)
    go(tmp_path / "run", tree)
    tree["train"]["steps"] = 2
    return tree, model, data


@pytest.mark.parametrize("what", ["weights", "chat template", "data", "held-out data", "reward", "nothing"])
def test_inputs_that_changed_are_found_by_content(what, tiny_model, tmp_path):
    tree, model, data = run_on_files(tiny_model, tmp_path)
    if what == "weights":
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"][0] += 1e-3
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        name = "model.path: model.safetensors"
    elif what == "chat template":
        (file,) = (f for f in model.iterdir() if "add_generation_prompt" in f.read_text(errors="ignore"))
        file.write_text(file.read_text().replace("assistant", "Assistant"))
        name = f"model.path: {file.name}"
    elif what == "data":
        data.write_text(data.read_text().replace('"22"', '"23"'))
        name = "task: its rows"
    elif what == "held-out data":
        file = data.with_name("held_out.jsonl")
        file.write_text(file.read_text().replace('"2"', '"3"'))
        name = "eval.task: its rows"
    elif what == "reward":
        file = data.with_name("my_reward.py")
        file.write_text(file.read_text().replace("len(completion)", "-len(completion)"))
        name = "reward.1: my_reward.py"
    else:
        data.write_text(data.read_text().replace(", ", ",  "))  # the same rows in other bytes
        assert go(tmp_path / "run", tree, resume=True).steps == 2
        return
    with pytest.raises(UserError, match=f"^{name}: changed since the run in .* was started; restore it, or start"):
        go(tmp_path / "run", tree, resume=True)


def test_settings_that_change_the_last_bits_are_listed(two_steps, tiny_model):
    warnings = resume(two_steps, tiny_model, model__log_prob_chunk=64, engine__prefill_tokens=32)
    (note,) = [text for text in warnings if "last bits" in text]
    assert note.startswith("model.log_prob_chunk=64 (was 512), engine.prefill_tokens=32 (was 2048): the run continues")
    assert resume(two_steps, tiny_model, model__log_prob_chunk=64, engine__prefill_tokens=32) == []
