"""A model's folder has one set of weights, whole, and no pointers of git-lfs in the place of files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxima.data import FieldError, UserError
from proxima.model.pretrained import check_path
from proxima.system.user_files import POINTER, read_text
from proxima.task.file_formats import open_data_file
from proxima.task.image_files import open_image
from tests.tiny import make_tiny

LFS = POINTER + b"v1\noid sha256:" + b"7" * 64 + b"\nsize 988097824\n"
BIN = "pytorch_model.bin"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def sharded(tmp_path):
    folder = make_tiny("llama", tmp_path / "sharded")
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    shards = {FIRST: names[:5], SECOND: names[5:]}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, inside in shards.items() for name in inside}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / SINGLE).unlink()
    check_path(str(folder))
    return folder


def refusal(folder):
    with pytest.raises(FieldError) as refused:
        check_path(str(folder))
    assert refused.value.field == "model.path"
    return f"{refused.value.bound}; {refused.value.remedy}"


def test_an_older_file_beside_newer_shards_is_refused(sharded):
    shutil.copy(sharded / FIRST, sharded / SINGLE)
    assert f"two sets of weights, {SINGLE} and that of {INDEX}" in refusal(sharded)
    (sharded / INDEX).unlink()
    assert f"two sets of weights, {SINGLE} and that of {FIRST}" in refusal(sharded)


def test_shards_of_another_set_are_refused(sharded):
    shutil.copy(sharded / FIRST, sharded / "model-00001-of-00003.safetensors")
    assert "two sets of weights, model-00001-of-00003.safetensors" in refusal(sharded)


def test_shards_need_their_index_and_the_index_its_shards(sharded):
    (sharded / SECOND).unlink()
    assert f"lacks {SECOND}, which its {INDEX} names" in refusal(sharded)
    (sharded / INDEX).unlink()
    assert f"has shards ({FIRST}) and no {INDEX}" in refusal(sharded)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (lambda whole: whole[: len(whole) // 2], "has 25,600 bytes in the place of 51,200"),
        (lambda whole: whole + b"\0", "bytes in the place of "),
        (lambda whole: whole[:6], "is no whole safetensors file: it has 6 bytes"),
        (lambda whole: b"", "is no whole safetensors file: it has 0 bytes"),
        (lambda whole: bytes(len(whole)), "is no whole safetensors file"),
        (lambda whole: b"<!DOCTYPE html><title>404</title>", "is no whole safetensors file"),
        (lambda whole: whole[:8] + b"?" + whole[9:], "is no safetensors file: its header is damaged"),
    ],
    ids=["half", "longer", "6 bytes", "empty", "zeros", "a page", "damaged"],
)
def test_a_part_of_a_file_is_named(sharded, left, said):
    whole = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(left(whole))
    refused = refusal(sharded)
    assert refused.startswith(f"has {SECOND}, which ") and said in refused
    assert refused.endswith("download or copy that file again")
    (sharded / SECOND).write_bytes(whole)
    check_path(str(sharded))


@pytest.mark.parametrize(
    "left",
    [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"<!DOCTYPE html><title>404</title>"],
    ids=["half", "empty", "a page"],
)
def test_a_part_of_a_file_of_torch_is_named(left, tmp_path):
    folder = make_tiny("llama", tmp_path / "model")
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    for pickled in (True, False):
        torch.save(tensors, folder / BIN, _use_new_zipfile_serialization=not pickled)
        check_path(str(folder))
    (folder / BIN).write_bytes(left((folder / BIN).read_bytes()))
    assert refusal(folder).startswith(f"has {BIN}, which is no whole file of torch: its ")


def test_an_index_may_name_the_single_file(sharded):
    shutil.copy(sharded / FIRST, sharded / SINGLE)
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"x": SINGLE}}))
    for file in (FIRST, SECOND):
        (sharded / file).unlink()
    check_path(str(sharded))


@pytest.mark.parametrize("name", [SINGLE, "config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"])
def test_a_pointer_in_a_model_is_named(name, tmp_path):
    folder = make_tiny("llama", tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(LFS)
    assert f"has a {name} that is a git-lfs pointer" in refusal(folder)
    assert "git lfs pull" in refusal(folder)


def test_a_pointer_is_named_as_gguf_and_as_an_adapter(tmp_path):
    (tmp_path / "m.gguf").write_bytes(LFS)
    assert "git-lfs pointer" in refusal(tmp_path / "m.gguf")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere"}')
    (adapter / "adapter_model.safetensors").write_bytes(LFS)
    assert "adapter_model.safetensors that is a git-lfs pointer" in refusal(adapter)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows"])
def test_a_pointer_in_the_place_of_data_is_named(name, tmp_path):
    (tmp_path / name).write_bytes(LFS)
    with pytest.raises(UserError, match=r"rows.* is a git-lfs pointer.*git lfs pull"):
        open_data_file(tmp_path / name)


def test_a_pointer_in_the_place_of_an_image_or_a_text_is_named(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(LFS)
    for image in (str(file), LFS):
        with pytest.raises(UserError, match=r"is a git-lfs pointer.*git lfs pull"):
            open_image(image)
    with pytest.raises(OSError, match=r"is a git-lfs pointer.*git lfs pull"):
        read_text(file)
