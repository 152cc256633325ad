"""The files of the model that a run began with, kept open: what the run does not change is written from them byte for
byte, even after they were moved or deleted.

open_input      open them, after a model was read from them
copy_tensors    write some of their weights to a new file, a few megabytes at a time

A text run of a model that sees, and any run of one that also predicts several tokens ahead, reads only a part of the
weights. The others are `unused`: they are never in memory, and whoever writes the model copies them.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from proxima.data.json_reader import load_json
from proxima.model.files import local_place, read_json

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
ATTRIBUTE = "input_files"  # of a model that was read from files
CHUNK = 1 << 24  # bytes copied at once
FILE = 2 << 30  # bytes of weights after which a new file begins
COPIED = re.compile(
    r"tokenizer.*|vocab.*|merges\.txt|added_tokens\.json|special_tokens_map\.json|chat_template.*|tekken\.json"
    r"|.*\.model|.*\.tiktoken|.*\.py|(video_)?preprocessor_config\.json|processor_config\.json"
)
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file: `start` and `size` are bytes of the file; `dtype` is safetensors' name."""

    file: IO[bytes]
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, eq=False)
class InputFiles:
    """What a model was read from. A copy of a model has the same.

    Args:
        config: the content of config.json.
        settings: the files of tokenizer, chat template and processors, generation_config.json, and code that others
            may run, by name.
        tokenizer: `tokenizer_facts` of the tokenizer in them.
        unused: the weights in the files that the model lacks, by name.
        left_out: such weights that can't be written beside the model's: those beside a scalar head, those of a
            quantised model, whose own weights are written in another form, and those in pickled files.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, IO[bytes]]
    tokenizer: Any
    unused: Mapping[str, StoredTensor] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def __deepcopy__(self, memo: Any) -> "InputFiles":
        return self


def input_files_of(model: Any) -> InputFiles | None:
    """What a model was read from; None if it was made, or read from a GGUF file."""
    files: InputFiles | None = getattr(model, ATTRIBUTE, None)
    return files


def open_input(
    model: Any, tokenizer: Any, path: str, revision: str | None, files: Mapping[str, Path] | None, *, scalar: bool
) -> InputFiles | None:
    """The files that a model and its tokenizer were just read from; None if there is no folder.

    Args:
        files: the safetensors file of each weight; None: there are none.
        scalar: the model has a scalar head in the place of its output layer.
    """
    place = local_place(path, revision)
    if place is None or not place.is_dir():
        return None
    config = read_json(path, place / CONFIG)
    names = _pickled_names(place) if files is None else files
    unused = unused_names(model, names)
    stored: dict[str, StoredTensor] = {}
    left_out: tuple[str, ...] = ()
    if files is not None and not scalar and not config.get("quantization_config"):
        stored = _stored(unused, files)
    else:
        left_out = tuple(name for name in unused if not name.endswith("lm_head.weight"))
    return InputFiles(
        config=config,
        settings=_open_settings(place),
        tokenizer=tokenizer_facts(tokenizer),
        unused=stored,
        left_out=left_out,
    )


def left_out_of(model: Any) -> tuple[str, ...]:
    """The weights of its input that are in nothing that is written of a model."""
    files = input_files_of(model)
    return () if files is None else files.left_out


def left_out_note(names: Sequence[str]) -> str | None:
    """Says which weights are left out; None if there are none."""
    if not names:
        return None
    which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{len(names):,} weights of the model's files are not used, and left out of what is written: {which}"


def remember_left_out(model: Any, names: Iterable[str]) -> None:
    """Add the names that an earlier process of the run left out: a checkpoint lacks these weights."""
    files = input_files_of(model)
    if files is not None:
        setattr(model, ATTRIBUTE, replace(files, left_out=tuple(names)))


def _pickled_names(place: Path) -> list[str]:
    """The names of the weights in the `.bin` files of a folder, as transformers reads them, which runs no code."""
    from transformers.modeling_utils import load_state_dict

    names = list[str]()
    for file in sorted(place.glob("pytorch_model*.bin")):
        names += load_state_dict(file, map_location="meta")
    return names


def _open_settings(place: Path) -> dict[str, IO[bytes]]:
    files = [file for file in place.iterdir() if COPIED.fullmatch(file.name) or file.name == GENERATION]
    files += (place / TEMPLATES).glob("*.jinja")
    return {str(file.relative_to(place)): file.open("rb") for file in sorted(files) if file.is_file()}


def tokenizer_facts(tokenizer: Any) -> Any:
    """What changes if tokens are added to a tokenizer, or it gets another template."""
    return len(tokenizer), tokenizer.chat_template, str(tokenizer.special_tokens_map)


def unused_names(model: Any, names: Iterable[str]) -> list[str]:
    """The names of weights in files that stand for no weight of a model, with or without adapters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = {name.replace(".base_layer.", "."): True for name in model.state_dict()}
    prefix = model.base_model_prefix
    return [name for name in names if rename_source_key(name, renamings, converters, prefix, own)[0] not in own]


def _stored(names: Iterable[str], files: Mapping[str, Path]) -> dict[str, StoredTensor]:
    by_file = dict[Path, list[str]]()
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    stored = dict[str, StoredTensor]()
    for path, inside in by_file.items():
        file = path.open("rb")
        tensors = stored_tensors(file)
        stored |= {name: tensors[name] for name in inside}
    return stored


def stored_tensors(file: IO[bytes]) -> dict[str, StoredTensor]:
    """The tensors of an open safetensors file, by name."""
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    header = load_json(os.pread(file.fileno(), length, 8))
    tensors = dict[str, StoredTensor]()
    for name, facts in header.items():
        if name != "__metadata__":
            start, end = facts["data_offsets"]
            tensors[name] = StoredTensor(file, facts["dtype"], tuple(facts["shape"]), 8 + length + start, end - start)
    return tensors


def copy_tensors(tensors: Mapping[str, StoredTensor], target: Path) -> None:
    """Write a safetensors file with these tensors; a few megabytes of them are in memory at a time."""
    header = dict[str, Any]({"__metadata__": {"format": "pt"}})
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.size]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for start in range(0, tensor.size, CHUNK):
                length = min(CHUNK, tensor.size - start)
                out.write(os.pread(tensor.file.fileno(), length, tensor.start + start))


def append_unused(model: Any, folder: Path) -> None:
    """Add the weights of its input that a model lacks to the safetensors files in its folder and to their index."""
    files = input_files_of(model)
    if files is None or not files.unused:
        return
    tensors = files.unused
    index = folder / INDEX
    if index.is_file():
        places: dict[str, str] = load_json(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        with (folder / "model.safetensors").open("rb") as file:
            places = dict.fromkeys(stored_tensors(file), "model.safetensors")
    written = sorted(set(places.values()))
    parts = _parts(tensors)
    total = len(written) + len(parts)
    new_name = {name: _shard(number, total) for number, name in enumerate(written, 1)}
    for name in written:  # no new name is an old one: the total differs
        (folder / name).rename(folder / new_name[name])
    places = {weight: new_name[name] for weight, name in places.items()}
    for number, part in enumerate(parts, len(written) + 1):
        copy_tensors(part, folder / _shard(number, total))
        places |= dict.fromkeys(part, _shard(number, total))
    size = 0
    for name in set(places.values()):
        with (folder / name).open("rb") as file:
            size += sum(tensor.size for tensor in stored_tensors(file).values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2, sort_keys=True)
    index.write_text(text + "\n", encoding="utf-8")


def _shard(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def _parts(tensors: Mapping[str, StoredTensor]) -> list[dict[str, StoredTensor]]:
    parts = [dict[str, StoredTensor]()]
    filled = 0
    for name, tensor in tensors.items():
        if parts[-1] and filled + tensor.size > FILE:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.size
    return parts


def read_whole(file: IO[bytes]) -> bytes:
    """The content of an open file, wherever it is read to."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
