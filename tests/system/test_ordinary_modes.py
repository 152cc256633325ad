"""What proxima writes has the modes of any new file or folder, whatever the library that wrote it chose."""

import os

import torch
from safetensors.torch import save_file

from proxima.model.load import load, save
from proxima.system.atomic_files import atomic_folder


def modes(folder):
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def test_files_and_folders_have_ordinary_modes(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    of_folder, of_file = ((tmp_path / name).stat().st_mode & 0o777 for name in ("plain", "plain/file"))
    with atomic_folder(tmp_path / "out") as part:
        (part / "below").mkdir()
        save_file({"a": torch.zeros(1)}, part / "below" / "a.safetensors")
        os.chmod(part / "below" / "a.safetensors", 0o600)  # as newer versions of the library leave it
        (part / "run.sh").touch(mode=0o700)
    assert modes(tmp_path / "out") == {"below": of_folder, "below/a.safetensors": of_file, "run.sh": of_file | 0o100}
    assert (tmp_path / "out").stat().st_mode & 0o777 == of_folder


def test_a_saved_model_can_be_read_by_others(tmp_path, tiny_model, monkeypatch):
    (tmp_path / "file").touch()
    model = load(str(tiny_model("llama")), device="cpu")
    written = type(model.model).save_pretrained

    def private(self, folder, *arguments, **options):
        written(self, folder, *arguments, **options)
        os.chmod(next(folder.glob("*.safetensors")), 0o600)

    monkeypatch.setattr(type(model.model), "save_pretrained", private)
    save(model.model, model.tokenizer, tmp_path / "model")
    assert set(modes(tmp_path / "model").values()) == {(tmp_path / "file").stat().st_mode & 0o777}
