"""The files of a model: a folder, a GGUF file, or an entry in the hub's cache; what a path that is none of these can
mean; which model an adapter's folder names as its base; hashes; and whether the JSON files make sense.

transformers and proxima take many values of these files as they are: a text as an end-of-text token fails at the first
sample, and a billion layers end the machine. `check_model_files` refuses a value that no model has, in one line with
file and key; values that are not listed are left to transformers, whose errors are reported likewise.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from zipfile import is_zipfile

import torch

from proxima.data import FieldError
from proxima.data.errors import nearest
from proxima.data.json_reader import load_json
from proxima.system.foreign_folder import read_file
from proxima.system.user_files import POINTER_BOUND, PULL, is_pointer

MODEL_FILES = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_FILES = (".bin", ".gguf", ".safetensors")
BASE = "base.json"
# folder names with which no name on the hub begins
LOCAL_FOLDERS = (
    "ckpt",
    "checkpoints",
    "data",
    "exported",
    "model",
    "models",
    "out",
    "output",
    "outputs",
    "runs",
    "tmp",
)


def is_adapter(path: str) -> bool:
    """True for a folder with an adapter, even if it also has its base's config.json.

    Raises:
        FieldError: the folder also has the weights of a model.
    """
    place = Path(path).expanduser()
    if not (place / ADAPTER_CONFIG).is_file():
        return False
    weights = sorted(file.name for file in place.glob("model*.safetensors"))
    if weights:
        remedy = "move one of them to a separate folder"
        raise FieldError(
            "model.path", path, f"has both an adapter ({ADAPTER_CONFIG}) and a model ({weights[0]})", remedy=remedy
        )
    return True


def local_place(path: str, revision: str | None) -> Path | None:
    """The folder or file of a model; None if it is not on this machine."""
    place = Path(path).expanduser()
    if place.exists():
        return place
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:
        return None
    if isinstance(cached, str):
        return Path(cached).parent
    return None


def require_hub_name(path: str) -> None:
    """Raise `FieldError` for a path that does not exist and can't be a name on the hub."""
    if looks_like_hub_name(path):
        return
    place = Path(path).expanduser()
    where = "" if place.is_absolute() else ": a path is relative to the current folder"
    near = did_you_mean(place)
    there = two_readings(path)
    remedy = f"{near}give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B{there}"
    raise FieldError("model.path", path, f"does not exist{where}", remedy=remedy)


def looks_like_hub_name(path: str) -> bool:
    """True if `path` has the form owner/name and its owner is not a local folder, or if it is at hand."""
    owner, slash, name = path.partition("/")
    if not (slash and owner and name) or "/" in name or " " in path or path.endswith(".gguf"):
        return False
    if owner in LOCAL_FOLDERS or owner.startswith((".", "~")):
        return False
    return not Path(owner).exists() or is_at_hand(path, None)


def two_readings(path: str) -> str:
    """A hint for a path whose first part is a local folder: how to use the model of that name on the hub instead."""
    owner, _, name = path.partition("/")
    if not owner or not Path(owner).is_dir() or not name or "/" in name or owner.startswith((".", "~")):
        return ""
    return f"; if it is a name of the hub, download it first (hf download {path}): there is a folder {owner!r} here"


def did_you_mean(place: Path) -> str:
    """The hint `did you mean models/m? Else ` for a path that does not exist, if its first part that is missing is
    misspelt; empty if nothing is similar."""
    folder = next(parent for parent in place.parents if os.path.isdir(parent))
    part, *rest = place.relative_to(folder).parts
    near = nearest(part, (child.name for child in folder.glob("*") if os.path.exists(child.joinpath(*rest))))
    if near is None:
        return ""
    found = folder.joinpath(near, *rest)
    shown = os.path.relpath(found)
    if shown.startswith("..") and place.is_absolute():
        shown = os.path.normpath(found)
    return f"did you mean {shown}? Else "


def require_found(path: str, revision: str | None) -> None:
    """Raise `FieldError` for a name that is not a path, is not in the cache, and can't be looked up: immediately,
    whereas the libraries would retry for half a minute."""
    if is_at_hand(path, revision):
        return
    why = unreachable()
    if why is None:
        return
    hint = did_you_mean(Path(path))
    what = f"is not a folder here, is not in the hub's cache, and the hub can't be asked: {why}"
    raise FieldError(
        "model.path", path, what, remedy=f"{hint}give an existing folder, or run hf download {path} online"
    )


def is_at_hand(path: str, revision: str | None) -> bool:
    """True if the model's config can be read without contacting the hub."""
    return local_place(path, revision) is not None


def unreachable() -> str | None:
    """Describe why the hub can't be reached; None if it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if hub_is_reachable():
        return None
    return f"{urlparse(constants.ENDPOINT).hostname} has no address"


def hub_is_reachable() -> bool:
    """True if the hub's host name resolves."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model below an adapter.

    Args:
        path, revision: as `load` takes them.
        dtype: of its weights in memory, `float32` or `bfloat16`; None: the adapter does not say.
        files: SHA-256 by name, of `weight_files`; empty: unknown.
    """

    path: str
    revision: str | None = None
    dtype: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def base_of(path: str) -> BaseModel:
    """The base that an adapter's folder names.

    Raises:
        FieldError: the folder's JSON can't be read or names no base.
    """
    place = Path(path).expanduser()
    settings = read_json(path, place / ADAPTER_CONFIG)
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        remedy = "write the path of its base there"
        raise FieldError("model.path", path, f"names no base_model_name_or_path in {ADAPTER_CONFIG}", remedy=remedy)
    recorded = read_json(path, place / BASE) if (place / BASE).is_file() else {}
    return BaseModel(
        path=base, revision=recorded.get("revision"), dtype=recorded.get("dtype"), files=recorded.get("files", {})
    )


def base_in_memory(path: str, revision: str | None, dtype: torch.dtype) -> BaseModel:
    """The base that was just loaded, for `save_adapter`."""
    local = Path(path).expanduser()
    named = str(local.resolve()) if local.exists() else path
    return BaseModel(
        path=named, revision=revision, dtype=str(dtype).removeprefix("torch."), files=weight_files(path, revision)
    )


def read_json(path: str, file: Path, field_name: str = "model.path") -> dict[str, Any]:
    """The object in a file of the folder `path`, or FieldError."""
    try:
        values = load_json(read_file(file, LARGEST_FILE).decode())
    except (OSError, ValueError) as error:
        raise FieldError(field_name, path, f"has no readable {file.name} ({error})") from error
    if not isinstance(values, dict):
        raise FieldError(field_name, path, f"has a {file.name} that is not a JSON object")
    return values


def model_files(path: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of a model's weights, configs and tokenizer files, by name; empty if they are not found. A hub name is
    looked up in the cache. For an adapter's folder they include its base's weights, as `base NAME`."""
    place = local_place(path, revision)
    if place is None:
        return {}
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.glob("*") if file.suffix in MODEL_FILES)
    hashes = {file.name: _sha_now(file) for file in files if file.is_file()}
    return hashes | {f"base {name}": sha for name, sha in _base_files(place / ADAPTER_CONFIG).items()}


def weight_files(path: str, revision: str | None = None) -> dict[str, str]:
    """The `model_files` that determine what the model computes: weights and config.json."""
    files = model_files(path, revision)
    return {name: sha for name, sha in files.items() if name == "config.json" or Path(name).suffix in WEIGHT_FILES}


def _base_files(config: Path) -> dict[str, str]:
    """The weight files of the base that an adapter's config names; empty if it names none or can't be read."""
    try:
        settings = load_json(read_file(config, LARGEST_FILE).decode())
        return weight_files(settings["base_model_name_or_path"], settings.get("revision"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sha_now(file: Path) -> str:
    facts = file.stat()
    return _sha(file, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@lru_cache(maxsize=64)
def _sha(file: Path, size: int, modified: int, changed: int) -> str:
    """The SHA-256 of a file of this size and these times, once per process. A copy may keep `modified`, but not
    `changed`."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


LARGEST_FILE = 1 << 26  # bytes, of JSON beside the vocabulary
LARGEST_HEADER = 100_000_000  # bytes, by safetensors
LARGEST_POINTER = 1 << 10  # bytes, by git-lfs's specification
PICKLE = b"\x80"  # how a pickle begins
WEIGHT_SETS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
REMEDY = "repair the file, or download the folder again"


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _size(least: int, most: int) -> tuple[str, Callable[[Any], bool]]:
    return f"must be a whole number in [{least}, {most:,}]", lambda value: _whole(value, least, most)


def _sizes(least: int, most: int) -> tuple[str, Callable[[Any], bool]]:
    """Of some families one number, of others one for each layer."""

    def fits(value: Any) -> bool:
        sizes = value if isinstance(value, list) else [value]
        return all(_whole(size, least, most) for size in sizes)

    return f"must be a whole number in [{least}, {most:,}], or a list of them", fits


def _of(said: str, *types: type) -> tuple[str, Callable[[Any], bool]]:
    return f"must be {said}", lambda value: isinstance(value, types)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    """A text, a named one, a list of them, or an object of texts by their names."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_named_template, value))
    if isinstance(value, dict) and "template" not in value:
        return all(isinstance(text, str) for text in value.values())
    return isinstance(value, str) or _is_named_template(value)


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("template"), str)


ID = _size(-1, 2**31 - 1)
LIST_OF_IDS = "must be a token id, or a list of them"
TEXTS = "must be a list of texts"
IDS = (LIST_OF_IDS, _sizes(-1, 2**31 - 1)[1])
Rules = tuple[tuple[str, tuple[str, Callable[[Any], bool]]], ...]
AUTO_MAP = "auto_map"  # transformers looks for names in it wherever it is there
# names of keys → what their values must be; null is allowed but for `auto_map`, and of several rules the first counts
CONFIG: Rules = (
    (r"eos_token_id", IDS),
    (r"(bos|pad|unk|sep|cls|mask|decoder_start)_token_id", ID),
    (r"architectures", (TEXTS, lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value))),
    (r"model_type", _of("a text", str)),
    (r"(num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers)", _size(1, 10_000)),
    (r"(hidden_size|n_embd|d_model)", _size(1, 1 << 24)),
    (r"vocab_size", _size(1, 1 << 28)),
    (r"(num_attention_heads|n_head|num_heads)", _sizes(1, 1 << 16)),
    (r"(num_key_value_heads|head_dim)", _sizes(1, 1 << 16)),
    (r"(intermediate_size|n_inner|ffn_dim)", _sizes(1, 1 << 28)),
    (r"(max_position_embeddings|n_positions)", _size(1, 1 << 40)),
    (r"(num_experts|num_local_experts|n_routed_experts|num_experts_per_tok)", _sizes(0, 1 << 16)),
    (r"num_labels", _size(1, 1 << 20)),
    (r"tie_word_embeddings", _of("true or false", bool)),
    (r"(rope_scaling|rope_parameters|quantization_config|text_config|vision_config)", _of("an object", dict)),
    (r"layer_types|mlp_layer_types", _of("a list", list)),
    (r"(torch_)?dtype", _of("a text", str)),
    (AUTO_MAP, _of("an object", dict)),
)
GENERATION: Rules = (
    *CONFIG[:2],
    (r"(suppress|begin_suppress)_tokens|forced_(bos|eos)_token_id", IDS),
    (r"(temperature|top_p|top_k|min_p|repetition_penalty|max_(new_)?(length|tokens))", _of("a number", int, float)),
)
TOKENIZER: Rules = (
    (
        r"model_max_length",
        ("must be a number > 0", lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x > 0),
    ),
    (r"chat_template", ("must be a text, or a list of objects with name and template", _is_template)),
    (r"(bos|eos|unk|sep|pad|cls|mask)_token", ("must be a text, or an object with content", _is_token)),
    (r"(additional|extra)_special_tokens", _of("a list or an object", list, dict)),
    (r"added_tokens_decoder", _of("an object", dict)),
    (r"tokenizer_class", _of("a text", str)),
    (AUTO_MAP, _of("an object or a list", dict, list)),
)
FILES: Mapping[str, Rules] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER,
    "special_tokens_map.json": TOKENIZER,
}


def check_model_files(path: str, folder: Path, *, complete: bool = True) -> None:
    """Refuse the model `path` if a file of its folder is a git-lfs pointer or has a value that no model has, or if its
    weights are not one whole set of whole files.

    Args:
        complete: the weights must be there; those of a name on the hub may be in the cache in part.

    Raises:
        FieldError: names the file, the key and its value.
    """
    refuse_pointers(path, folder)
    sets = WEIGHT_SETS if complete else ()
    for stem, suffix in sets:
        check_weight_set(path, folder, stem, suffix)
        if any(folder.glob(f"{stem}*{suffix}")):  # transformers reads the first format that is there
            break
    refuse_partial_weights(path, folder)
    for name, rules in FILES.items():
        file = folder / name
        if file.is_file():
            facts = file.stat()
            problem = _problem(file, rules, (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
            if problem:
                raise FieldError("model.path", path, problem, remedy=REMEDY)
    template = folder / "chat_template.jinja"
    problem = _unreadable(template) if template.is_file() else None
    if problem:
        raise FieldError("model.path", path, problem, remedy=REMEDY)


def refuse_pointers(path: str, folder: Path, field_name: str = "model.path") -> None:
    """Raise FieldError if one of the files in the folder of a model or an adapter is a git-lfs pointer."""
    for file in sorted(folder.iterdir()):
        named = file.suffix in MODEL_FILES or file.suffix == ".txt"
        if named and file.is_file() and file.stat().st_size <= LARGEST_POINTER and is_pointer(file):
            raise FieldError(field_name, path, f"has a {file.name} that {POINTER_BOUND}", remedy=PULL)


def refuse_partial_weights(path: str, folder: Path, field_name: str = "model.path") -> None:
    """Raise FieldError if a file of weights in the folder of a model or an adapter is not whole, as after a download
    that broke off: safetensors not as long as their header says, or without one; a file of torch without its end."""
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*model*.bin"))]
    for file in files:
        if not file.is_file():
            continue
        facts = file.stat()
        partial = _partial if file.suffix == ".safetensors" else _partial_archive
        problem = partial(file, facts.st_size, facts.st_mtime_ns)
        if problem:
            remedy = "download or copy that file again"
            raise FieldError(field_name, path, f"has {file.name}, which {problem}", remedy=remedy)


@lru_cache(maxsize=1024)
def _partial(file: Path, size: int, modified: int) -> str | None:
    """What is wrong with the length of a safetensors file: eight bytes with the length of the header, the header, which
    is JSON with the places of the tensors, and their bytes. None if nothing is."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 1 < length <= min(LARGEST_HEADER, max(0, size - 8)):
            return f"is no whole safetensors file: it has {size:,} bytes, which do not begin with a header"
        header = opened.read(length)
    try:
        tensors = load_json(header.decode())
        ends = [int(about["data_offsets"][1]) for name, about in tensors.items() if name != "__metadata__"]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return "is no safetensors file: its header is damaged"
    whole = 8 + length + max(ends, default=0)
    if size == whole:
        return None
    return f"has {size:,} bytes in the place of {whole:,}"


@lru_cache(maxsize=1024)
def _partial_archive(file: Path, size: int, modified: int) -> str | None:
    """What is wrong with a file of torch: a zip archive, whose table of contents is its end; of torch before 1.6 a
    pickle."""
    with file.open("rb") as opened:
        pickled = opened.read(len(PICKLE)) == PICKLE
    if pickled or is_zipfile(file):
        return None
    return f"is no whole file of torch: its {size:,} bytes have no table of contents at their end"


def check_weight_set(path: str, folder: Path, stem: str, suffix: str) -> None:
    """Refuse shards without the index that says what is in them, an index without its shards, and a second set of
    weights: whichever is read, it may be the older one.

    Args:
        stem, suffix: of the file of weights, which in a set of shards is one for each.

    Raises:
        FieldError: names the files.
    """
    single = f"{stem}{suffix}"
    index = folder / f"{single}.index.json"
    shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+{re.escape(suffix)}")
    shards = sorted(file.name for file in folder.glob(f"{stem}-*{suffix}") if shard.fullmatch(file.name))
    if not index.is_file():
        alone = not (folder / single).is_file()
        if shards and alone:
            remedy = "download the whole folder"
            raise FieldError("model.path", path, f"has shards ({shards[0]}) and no {index.name}", remedy=remedy)
        if shards:
            _refuse_second_set(path, single, shards[0])
        return

    named = set(read_json(path, index).get("weight_map", {}).values())
    for name in sorted(named):
        if not (folder / name).is_file():
            remedy = "download the whole folder"
            raise FieldError("model.path", path, f"lacks {name}, which its {index.name} names", remedy=remedy)
    others = [name for name in (single, *shards) if name not in named and (folder / name).is_file()]
    if others:
        _refuse_second_set(path, others[0], index.name)


def _refuse_second_set(path: str, first: str, second: str) -> None:
    remedy = "move the older one to another folder"
    raise FieldError("model.path", path, f"has two sets of weights, {first} and that of {second}", remedy=remedy)


def _unreadable(template: Path) -> str | None:
    try:
        read_file(template, LARGEST_FILE).decode()
    except (OSError, ValueError) as error:
        return f"has a {template.name} that can't be read: {error}"
    return None


@lru_cache(maxsize=64)
def _problem(file: Path, rules: Rules, facts: tuple[int, int, int]) -> str | None:
    """What is wrong with a file of these facts; None if nothing is."""
    if facts[0] > LARGEST_FILE:
        return f"has a {file.name} of more than {LARGEST_FILE:,} bytes"
    try:
        values = load_json(read_file(file, LARGEST_FILE).decode())
    except (OSError, ValueError) as error:
        return f"has a {file.name} that can't be read: {error}"
    if not isinstance(values, dict):
        return f"has a {file.name} that is not a JSON object"
    return next((f"has {file.name} with {problem}" for problem in _wrong(values, rules)), None)


def _wrong(values: Mapping[str, Any], rules: Rules, above: str = "") -> Iterator[str]:
    for key, value in values.items():
        rule = next((rule for name, rule in rules if re.fullmatch(name, key)), None)
        if (value is not None or key == AUTO_MAP) and rule is not None and not rule[1](value):
            yield f"{above}{key}={_shown(value)}, which {rule[0]}"
        elif isinstance(value, dict) and key.endswith("_config"):  # the part about text, images or sound
            yield from _wrong(value, rules, f"{above}{key}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
