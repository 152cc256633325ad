"""Weights written for servers to read. That an adapter is merged is shown in test_weight_probe.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxima.data import UserError
from proxima.engine.http.weights import weight_folders as staged_files
from proxima.engine.http.weights.weight_folders import WeightFolders, folder_bytes
from proxima.model.load import load
from proxima.model.pretrained import LoadedModel
from tests.engine.http.received import received

TEXT = torch.tensor([[5, 9, 40, 41, 7, 30]])


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(TEXT).logits


def written(folders: WeightFolders, loaded: LoadedModel, label: str = "v1", dtype: str | None = None) -> Path:
    return folders.write(loaded.model, loaded.tokenizer, label, dtype)


def end(folders: WeightFolders) -> None:
    """What the end of its process does to its lock."""
    folders._locked._file.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])  # tied, untied, tied
def test_a_folder_is_the_model(kind: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load(str(tiny_model(kind)), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.mul_(1.5)
    folder = written(WeightFolders(tmp_path), loaded)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(loaded.model))
    text = "ab <|im_end|>"
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == loaded.tokenizer(text).input_ids


def test_the_dtype_is_the_servers_and_what_cannot_be_written_is_refused(llama: LoadedModel, tmp_path: Path) -> None:
    folder = written(WeightFolders(tmp_path), llama, dtype="bfloat16")
    weights = load_file(folder / "model-00001.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    name = "model.norm.weight"
    assert torch.equal(weights[name], llama.model.get_parameter(name).to(torch.bfloat16))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"written to .*/file/below: Not a directory; set engine\.weight_folder"):
        written(WeightFolders(tmp_path / "file" / "below"), llama)
    with pytest.raises(UserError, match="'int3'"):
        written(WeightFolders(tmp_path), llama, dtype="int3")


def test_the_two_newest_are_kept_and_close_removes_all(llama: LoadedModel) -> None:
    present = list[int]()

    class Counted(WeightFolders):
        def _fill(self, model: nn.Module, tokenizer: Any, folder: Path, dtype: torch.dtype | None) -> None:
            super()._fill(model, tokenizer, folder, dtype)
            present.append(len(list(folder.parent.glob("v*"))))

    folders = Counted()
    made = [written(folders, llama, f"v{version}") for version in range(4)]
    assert [folder.exists() for folder in made] == [False, False, True, True]
    assert present == [1, 2, 2, 2]  # never three, also while one is written
    folders.close()
    assert not made[3].parent.exists()


def test_what_is_half_written_is_removed(llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = WeightFolders(tmp_path)
    before = written(folders, llama)
    content = (before / "model-00001.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staged_files, "save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*engine\.weight_folder"):
        written(folders, llama, "v2")
    assert (before / "model-00001.safetensors").read_bytes() == content
    assert sorted(path.name for path in before.parent.iterdir()) == [".held", "v1"]


def test_the_files_hold_every_weight_once(llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_files, "SHARD", 20_000)
    folder = written(WeightFolders(tmp_path), llama)
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    assert len(files) > 2
    assert all(len(file) == 1 or sum(weight.nbytes for weight in file.values()) <= 20_000 for file in files)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(llama.model))
    parameters = dict(llama.model.named_parameters())
    assert sorted(name for file in files for name in file) == sorted(parameters)
    assert folder_bytes(folder) == 4 * sum(weight.numel() for weight in parameters.values())


def test_what_is_written_while_it_is_closed_is_removed(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, whole = WeightFolders(), staged_files.save_file

    def save(*given: Any, **more: Any) -> None:
        folders.close()
        given[1].parent.mkdir(parents=True)
        whole(*given, **more)

    monkeypatch.setattr(staged_files, "save_file", save)
    written(folders, llama)
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_runs_are_removed_where_it_is_certain(llama: LoadedModel, tmp_path: Path) -> None:
    place = tmp_path / "given"
    folders = [WeightFolders(place) for _ in range(3)]
    gone, elsewhere, living = (written(entry, llama) for entry in folders)
    assert len({entry.parent.parent for entry in (gone, elsewhere, living)}) == 1
    for entry in folders[:2]:
        end(entry)
    (elsewhere.parent / staged_files.LOCK_FILE).write_text("another kernel, whose locks nobody sees here")
    (before := place / "proxima-weights-strange").mkdir()  # it may be of another release
    again = WeightFolders(place)
    assert written(again, llama).is_dir()
    assert not gone.parent.exists()
    assert elsewhere.is_dir() and living.is_dir() and before.is_dir()
    assert living.parent.stat().st_mode == place.stat().st_mode  # a server of another user may read what it could read
    for entry in (folders[2], again):
        entry.close()
    assert sorted(entry.name for entry in place.iterdir()) == sorted([elsewhere.parent.name, before.name])


def test_a_given_folder_on_a_disk_without_locks_is_used_and_left_alone(
    llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("proxima.system.linux.fcntl.flock", no_locks)
    left, again = (written(WeightFolders(tmp_path), llama) for _ in range(2))
    assert left.is_dir() and again.is_dir()


def test_room_is_made_of_what_killed_runs_have_left(llama: LoadedModel) -> None:
    gone, living = WeightFolders(), WeightFolders()
    left, kept = (written(entry, llama) for entry in (gone, living))
    end(gone)
    again = written(WeightFolders(), llama)
    assert not left.parent.exists() and kept.exists() and again.exists()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_experts_have_the_names_of_the_models_files(
    dtype: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Which SGLang reads; it ignores the stacks that transformers makes of them."""
    source = tiny_model("qwen3_moe")
    loaded, expected = load(str(source)), load_file(source / "model.safetensors")
    folder = WeightFolders(tmp_path).write(loaded.model, loaded.tokenizer, "v1", dtype)
    weights = load_file(folder / "model-00001.safetensors")
    assert weights.keys() == expected.keys() and "model.layers.0.mlp.experts.7.down_proj.weight" in weights
    assert all(torch.equal(weights[name], expected[name].to(weights[name].dtype)) for name in expected)
    sent = received(loaded.model, None if dtype is None else getattr(torch, dtype), file_names=True)
    assert sent.keys() == weights.keys() and all(torch.equal(sent[name], weights[name]) for name in weights)
