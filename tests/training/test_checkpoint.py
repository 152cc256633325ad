"""Checkpoints: a resumed training is bit-identical, and no failure leaves an incomplete checkpoint."""

import errno
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.training import checkpoint
from proxima.training.checkpoint import (
    CheckpointContents,
    checkpoints,
    damage,
    last_complete,
    prune,
    restore,
    write_checkpoint,
)
from proxima.training.optimizer import AdamW
from tests.model.rows import loaded, same
from tests.training.helpers import Trainer, trainer, trainer_of, trajectories, weights

ALL = [list(range(13))]
SCHEDULE = {"total_updates": 8, "warmup": 2, "schedule": "cosine", "max_grad_norm": 0.5}


def make(folder=None) -> Trainer:
    model = loaded("llama") if folder is None else load(str(folder), device="cpu")
    return trainer_of(Policy(model), optimizer=AdamW(lr=2e-3, weight_decay=0.1), **SCHEDULE)


def trained(folder=None) -> Trainer:
    t = make(folder)
    t.update(ALL, trajectories())
    return t


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 3])
def test_a_resumed_training_is_bit_identical(before, tmp_path):
    items = trajectories()
    t = make()
    for _ in range(before):
        t.update(ALL, items)
    written = write_checkpoint(tmp_path, 3, CheckpointContents(stack=t, facts={"version": 3, "cursor": {"drawn": 24}}))
    draws = torch.rand(4)
    for _ in range(3):
        unbroken = t.update(ALL, items)

    (checkpoint,) = checkpoints(tmp_path)
    assert (checkpoint.step, checkpoint.path) == (3, written.path)
    assert (checkpoint.facts["cursor"], checkpoint.facts["version"]) == ({"drawn": 24}, 3)
    again = make(checkpoint.model)
    torch.manual_seed(99)
    restore(checkpoint, again)
    assert torch.equal(torch.rand(4), draws)
    assert again.updates == before
    for _ in range(3):
        resumed = again.update(ALL, items)
    assert resumed.metrics == pytest.approx(unbroken.metrics, rel=0, abs=0, nan_ok=True)  # exact; empty bins are NaN
    assert same(weights(t), weights(again)) and same(t.state()[0], again.state()[0])


def test_contents_of_a_checkpoint(tmp_path):
    t = trained()
    written = write_checkpoint(tmp_path, 12, CheckpointContents(stack=t, facts={"seed": 7}))
    assert written.path == tmp_path / "000012"
    assert {p.name for p in written.path.iterdir()} == {"model", "optimizer.safetensors", "state.json"}
    assert [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".pkl", ".bin", ".pth")] == []
    state = json.loads((written.path / "state.json").read_text())
    assert state["step"] == 12 and state["seed"] == 7 and state["trainer"] == {"updates": 1} and state["format"] == 2
    back = AutoModelForCausalLM.from_pretrained(written.model)
    for a, b in zip(back.parameters(), t.model.model.parameters(), strict=True):
        assert torch.equal(a, b)
    tensors, _ = t.state()
    assert {name.split("/")[0] for name in tensors} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(tensors) == 3 * len(list(t.model.model.parameters()))


def write(folder, *steps):
    t = make()
    for step in steps:
        write_checkpoint(folder, step, CheckpointContents(stack=t))
    return t


def test_prune_keeps_the_last_and_the_listed_and_removes_temporary_folders(tmp_path):
    write(tmp_path, 1, 2, 3, 4, 10)
    (tmp_path / ".000011.part").mkdir()
    prune(tmp_path, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001", "000002", "000003", "000004", "000010"]
    prune(tmp_path, 2, keep=[2])
    assert [c.step for c in checkpoints(tmp_path)] == [2, 4, 10]
    prune(tmp_path, 2)
    assert [c.step for c in checkpoints(tmp_path)] == [4, 10]
    prune(tmp_path, 5)
    assert [c.step for c in checkpoints(tmp_path)] == [4, 10]


def test_an_incomplete_folder_is_not_a_checkpoint(tmp_path):
    assert checkpoints(tmp_path / "nothing") == []
    write(tmp_path, 1, 2, 3)
    (tmp_path / "000003" / "state.json").unlink()
    (tmp_path / "000004").mkdir()
    (tmp_path / ".000005.part").mkdir()
    for content in ('{"format": 1, "st', "null", "[]", "{}"):
        (tmp_path / "000002" / "state.json").write_text(content)
        assert [c.step for c in checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("dies_in", ["save_trained", "save_file", "flush_to_disk"])
def test_a_full_disk_leaves_earlier_checkpoints(tmp_path, monkeypatch, dies_in):
    t = write(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, dies_in, full)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            write_checkpoint(tmp_path, step, CheckpointContents(stack=t))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001"]
    monkeypatch.undo()
    restore(checkpoints(tmp_path)[0], make())
    write_checkpoint(tmp_path, 2, CheckpointContents(stack=t))
    assert [c.step for c in checkpoints(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_a_folder_that_goes_while_it_is_written_is_the_cause(tmp_path):
    def moved(path):
        shutil.rmtree(path.parent)
        path.write_text("")

    with pytest.raises(FileNotFoundError, match="note.txt"):
        write_checkpoint(tmp_path, 1, CheckpointContents(stack=make(), files={"note.txt": moved}))


def test_a_write_over_an_interrupted_one(tmp_path):
    (tmp_path / ".000002.part" / "model").mkdir(parents=True)
    (tmp_path / ".000002.part" / "model" / "junk").write_text("x")
    (tmp_path / "000002").mkdir()
    (tmp_path / "000002" / "junk").write_text("x")
    write(tmp_path, 2)
    assert [c.step for c in checkpoints(tmp_path)] == [2] and not list(tmp_path.rglob("junk"))


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    synced = []
    inner = checkpoint.flush_to_disk
    monkeypatch.setattr(
        checkpoint, "flush_to_disk", lambda path: synced.append(path.relative_to(tmp_path).parts) or inner(path)
    )
    written = write(tmp_path, 1)
    assert written is not None
    files = {p.relative_to(tmp_path).parts[1:] for p in (tmp_path / "000001").rglob("*")}
    aside = {parts[1:] for parts in synced if parts and parts[0] == ".000001.part"}
    assert files <= aside, f"not synced: {files - aside}"
    assert synced[-1] == ()  # the folder, for the rename


@pytest.mark.slow
def test_a_damaged_or_foreign_checkpoint_is_one_line(tmp_path):
    t = trained()
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, CheckpointContents(stack=t))
    first, second, third = checkpoints(tmp_path)
    (first.path / "optimizer.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{torn")
    with pytest.raises(
        ValueError,
        match=r"000001: optimizer.safetensors can't be read .*; delete this checkpoint to use the one before",
    ):
        restore(first, make())
    (second.path / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"000002: optimizer.safetensors can't be read"):
        restore(second, make())
    with pytest.raises(ValueError, match=r"the optimizer state .*, which this model (does not have|has)"):
        restore(third, trainer("gpt2"))
    state = json.loads((third.path / "state.json").read_text()) | {"format": 9}
    del state["state_crc32"]  # with it, the format is a damaged byte
    (third.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="000003: format 9, this version reads 2"):
        restore(checkpoints(tmp_path)[-1], make())


def flip(path, at=-9):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


FILES = ["model/model.safetensors", "model/config.json", "optimizer.safetensors", "extra.bin", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_taken(name, tmp_path):
    t = trained()
    extra = {"extra.bin": lambda path: path.write_bytes(b"groups and more")}
    for step in (1, 2):
        write_checkpoint(tmp_path, step, CheckpointContents(stack=t, facts={"cursor": {"drawn": 3}}, files=extra))
    warnings = []
    checkpoint = last_complete(tmp_path, warnings.append)
    assert checkpoint is not None and checkpoint.step == 2 and not warnings
    flip(tmp_path / "000002" / name)
    shutil.copytree(tmp_path / "000001", tmp_path / "000009 copy")
    checkpoint = last_complete(tmp_path, warnings.append)
    assert checkpoint is not None and checkpoint.step == 1
    (warning,) = warnings
    what = "state.json is missing or damaged" if name == "state.json" else f"{name} is damaged"
    assert f"000002: {what}; it is now 000002.damaged, and the checkpoint before it, 000001, is used" in warning
    assert [c.step for c in checkpoints(tmp_path)] == [1] and (tmp_path / "000002.damaged" / name).exists()
    (tmp_path / "000001" / name).unlink()
    with pytest.raises(ValueError, match=r"000001: .*, and no earlier checkpoint is complete; restore the file, or"):
        last_complete(tmp_path, warnings.append)


@pytest.mark.parametrize("dies", ["prune", "write"])
def test_a_kill_during_a_deletion_leaves_no_seemingly_complete_checkpoint(dies, tmp_path, monkeypatch):
    t = write(tmp_path, 1, 2)

    def killed(path, **how):
        if path.name == ".000001.old.part":
            (path / "optimizer.safetensors").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        if dies == "prune":
            prune(tmp_path, 1)
        else:
            write_checkpoint(tmp_path, 1, CheckpointContents(stack=t))
    monkeypatch.undo()
    assert [c.step for c in checkpoints(tmp_path)] == [2]
    prune(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]


def test_linked_checkpoints_are_pruned_by_their_links(tmp_path):
    write(tmp_path / "run", 1, 2, 3)
    (tmp_path / "run" / "000001").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "000001").symlink_to(tmp_path / "elsewhere")
    assert [c.step for c in checkpoints(tmp_path / "run")] == [1, 2, 3] and damage(tmp_path / "run" / "000001") is None
    prune(tmp_path / "run", 1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["000003"]
    assert (tmp_path / "elsewhere" / "state.json").exists()


def test_a_full_disk_in_the_tokenizer_is_a_full_disk(tmp_path, tiny_model, monkeypatch):
    t = make(tiny_model("llama"))

    def full(*args, **how):
        raise Exception("No space left on device (os error 28)")  # what tokenizers raises

    tokenizer = t.model.loaded.tokenizer
    tokenizer.chat_template = "{{ messages }}"  # else the input's files are copied
    monkeypatch.setattr(tokenizer, "save_pretrained", full, raising=False)
    with pytest.raises(OSError, match="No space left") as caught:
        write_checkpoint(tmp_path, 1, CheckpointContents(stack=t))
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_the_weights_are_readable_as_the_umask_says(tmp_path, tiny_model):
    """safetensors creates files that only their owner can read, whatever the umask."""
    contents = CheckpointContents(stack=trained(tiny_model("llama")), facts={"version": 1, "cursor": {}, "seed": 0})
    written = write_checkpoint(tmp_path, 1, contents)
    modes = {path.name: path.stat().st_mode & 0o777 for path in written.path.rglob("*") if path.is_file()}
    assert set(modes.values()) == {modes["state.json"]}
