"""The run folder: who may use it, and what of it survives a full disk, a torn line and a rewind."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proxima.data import UserError
from proxima.kernels import compiled
from proxima.runtime.resume.rewind import rewind_folder
from proxima.runtime.state import folder as folder_module
from proxima.runtime.state.folder import RunFolder
from proxima.system import atomic_files as files
from proxima.system.machine import describe_environment


def train(step, **more):
    return {"kind": "train", "step": step, "time": 4.0 * step, "reward/mean": 0.1 * step, **more}


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.begin() is False
    yield folder
    folder.release()


def test_an_existing_run_is_refused(folder):
    folder.write_config("seed: 1\n")
    folder.append_metrics(train(1))
    folder.release()
    again = RunFolder(folder.path)
    said = r"contains a run; continue it with --resume, delete it with --overwrite, or set folder=PATH"
    with pytest.raises(ValueError, match=said):
        again.begin()
    assert again.begin(resume=True) is True
    assert again.read_metrics() == [train(1)]
    again.release()
    assert again.begin(overwrite=True) is False
    assert again.read_metrics() == [] and not again.config.exists()
    again.release()


def test_overwrite_never_deletes_what_is_no_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(ValueError, match="contains files but no run"):
        RunFolder(tmp_path).begin(overwrite=True)
    run = RunFolder(tmp_path / "run")
    run.begin()
    run.write_config("seed: 1\n")
    run.timeline.write_text("[\n")
    (run.path / "notes.md").write_text("mine")
    run.images.mkdir()
    for name in ("index.txt", "index.crc32", f"{'0' * 64}.png", "cat.jpg"):
        (run.images / name).write_text("an image")
    run.release()
    run.begin(overwrite=True)
    assert (run.path / "notes.md").read_text() == "mine" and not run.timeline.exists()
    assert [file.name for file in run.images.iterdir()] == ["cat.jpg"]
    run.release()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RunFolder(tmp_path / "run").begin()


def test_one_process_at_a_time(folder):
    mine = rf"is in use by another process \(pid {os.getpid()} on {socket.gethostname()}, `.*`, since 20..-"
    with pytest.raises(ValueError, match=mine):
        RunFolder(folder.path).begin(resume=True)
    with pytest.raises(ValueError, match=mine):
        RunFolder(folder.path).lock_for_reading()
    folder.release()
    code = (
        "import sys, os; from proxima.runtime.state.folder import RunFolder; RunFolder(sys.argv[1]).begin(); "
        "os.kill(os.getpid(), 9)"
    )
    source = str(Path(__file__).parents[3] / "src")
    dead = subprocess.run([sys.executable, "-c", code, str(folder.path)], env={"PYTHONPATH": source})
    assert dead.returncode == -9
    readers = [RunFolder(folder.path), RunFolder(folder.path)]
    for reader in readers:
        reader.lock_for_reading()  # a killed process leaves no lock behind, only its note
    with pytest.raises(ValueError, match=r"is in use by another process \(pid .*\); wait for it"):
        folder.begin(resume=True)
    for reader in readers:
        reader.release()
    assert folder.begin() is False


def test_a_lock_that_is_deleted_while_another_is_refused(folder, monkeypatch):
    """As by a run that was refused and discards its folder."""

    def deleted(path, mode):
        path.unlink()
        return path.open().read()

    monkeypatch.setattr(folder_module, "open_regular", deleted)
    with pytest.raises(ValueError, match="is in use by another process; wait for it"):
        RunFolder(folder.path).begin(resume=True)


def test_metrics_lines_are_strict_json(folder):
    folder.append_metrics(
        train(1, loss=float("nan"), ratio_max=float("inf"), reward=torch.tensor(0.5), text="½ </script>\n")
    )
    (line,) = folder.metrics.read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == train(1, loss=None, ratio_max=None, reward=0.5, text="½ </script>\n")
    folder.append_metrics(train(2, **{"reward/part/\ud83d": 1.0, "note": "\udfff é"}))  # named by what a model wrote
    assert folder.read_metrics()[1] == train(2, **{"reward/part/?": 1.0, "note": "? é"})
    with pytest.raises(TypeError, match="set can't be written as JSON"):
        folder.append_metrics(train(2, seen={1, 2}))
    assert len(folder.read_metrics()) == 2


@pytest.mark.parametrize(
    "torn", [b'{"kind": "train", "step": 3, "ti', b'{"kind": "train", "st\n', b"\x00\x00\x00\x00\n", b"\xff"]
)
def test_a_torn_last_line_is_dropped_and_overwritten(folder, torn):
    for step in (1, 2):
        folder.append_metrics(train(step))
    with folder.metrics.open("ab") as file:
        file.write(torn)
    assert folder.read_metrics() == [train(1), train(2)]
    folder.release()
    folder.begin(resume=True)
    rewind_folder(folder, 2, [train(1), train(2)])
    folder.append_metrics(train(3))
    assert folder.read_metrics() == [train(1), train(2), train(3)]
    assert folder.metrics.read_bytes().count(b"\n") == 3


def test_a_torn_line_in_the_middle_is_an_error(folder):
    folder.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not a JSON object"):
        folder.read_metrics()


def test_metrics_that_are_a_folder_are_one_line(folder):
    folder.metrics.mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl can't be read .Is a directory.; restore it, or delete it: a"):
        folder.read_metrics()


def test_a_full_disk_leaves_the_former_lines(folder, monkeypatch):
    folder.append_metrics(train(1))
    before = folder.metrics.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder.write_summary({"status": "done"})
    monkeypatch.setattr(files.os, "fsync", full)  # the same module object as in `folder`
    with pytest.raises(OSError, match="No space left"):
        folder.append_metrics(train(2))
    with pytest.raises(OSError, match="No space left"):
        folder.write_summary({"status": "failed"})
    monkeypatch.undo()
    assert folder.metrics.read_bytes() == before
    assert json.loads(folder.summary.read_text()) == {"status": "done"}
    assert not [name for name in os.listdir(folder.path) if name.endswith(".part")]


def test_a_run_that_ended_takes_no_less_time_after_a_resume(folder):
    """Its last checkpoint is not in the records."""
    folder.append_metrics(train(1))
    folder.append_metrics({"kind": "eval", "step": 1, "time": 21.0, "accuracy": 0.9, "label": "after"})
    folder.write_summary({"status": "done", "steps": 1, "seconds": 30.0})
    for _ in range(2):  # a kill may come between two
        rewind_folder(folder, 1, [train(1)])
        assert folder.elapsed() == 30.0
    folder.write_summary({"status": "failed", "steps": 2, "seconds": 40.0})
    rewind_folder(folder, 1, [train(1)])  # step 2 is repeated
    assert folder.elapsed() == 21.0
    folder.summary.write_text("{")
    rewind_folder(folder, 1, [train(1)])
    assert folder.elapsed() == 21.0


def test_rewind(folder):
    folder.append_metrics({"kind": "eval", "step": 0, "time": 1.0, "accuracy": 0.125, "label": "before"})
    for step in range(1, 6):
        folder.append_metrics(train(step))
        folder.rollout_file(step).write_bytes(b"")
    folder.append_metrics({"kind": "eval", "step": 5, "time": 21.0, "accuracy": 0.9, "label": "after"})
    for name in ("000000-before", "000005-after"):
        (folder.evals / f"{name}.parquet").write_bytes(b"")
    folder.write_summary({"status": "done"})
    assert folder.elapsed() == 21.0
    with folder.metrics.open() as file:
        lines = file.readlines()
    folder.metrics.write_text("".join(line for line in lines if '"step": 2' not in line))  # the journal has it
    rewind_folder(folder, 3, [train(1), train(2), train(3)])
    assert folder.metrics.read_text() == "".join(lines[:4])
    assert sorted(os.listdir(folder.rollouts)) == ["000001.parquet", "000002.parquet", "000003.parquet"]
    assert os.listdir(folder.evals) == ["000000-before.parquet"]
    assert not folder.summary.exists()
    assert folder.elapsed() == 12.0
    rewind_folder(folder, 0)  # nothing has happened: the evaluation before the first step is made again
    assert folder.read_metrics() == [] and os.listdir(folder.evals) == os.listdir(folder.rollouts) == []
    assert folder.elapsed() == 0.0


def test_environment(folder, monkeypatch):
    facts = describe_environment(3, {"path": "tiny", "parameters": 1234})
    folder.write_environment(facts)
    read = json.loads(folder.environment.read_text())
    assert read == facts
    assert (read["seed"], read["model"]["parameters"], read["packages"]["torch"]) == (3, 1234, torch.__version__)
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setitem(sys.modules, compiled.__name__, compiled)
    compiled.unavailable.cache_clear()
    assert describe_environment(3)["kernels"] == "eager torch (CXX=none)"
    compiled.unavailable.cache_clear()
    monkeypatch.delitem(sys.modules, compiled.__name__)
    assert describe_environment(3)["kernels"] is None
    assert read["torch"]["threads"] == torch.get_num_threads() and read["machine"]["memory_bytes"] > 2**20
