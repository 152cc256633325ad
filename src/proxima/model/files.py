"""The files of a model: a folder, a GGUF file, or an entry in the hub's cache."""

import json
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread

MODEL_FILES = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_FILES = (".bin", ".gguf", ".safetensors")
CHUNK = 1 << 24  # bytes; after each, a thread waits its turn to run Python, up to 5 ms
HASHING = Lock()  # a file that two threads ask about is read once


def model_files(path: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of a model's weights, configs and tokenizer files, by name; empty if they are not found. A hub name is
    looked up in the cache. For an adapter's folder they include its base's weights, as `base NAME`."""
    if (place := _place(path, revision)) is None:
        return {}
    hashes = {file.name: _sha_now(file) for file in _hashed_files(place)}
    return hashes | {f"base {name}": sha for name, sha in _base_files(place / ADAPTER_CONFIG).items()}


def hash_ahead(path: str, revision: str | None = None) -> None:
    """Start hashing a model's files in a thread, for `model_files`, which then waits for it: importing libraries leaves
    the other cores idle, and the files are then in memory when the weights are loaded. Errors are ignored here and
    reported to whoever needs the files."""
    with suppress(OSError, RuntimeError, ValueError):
        if (place := _place(path, revision)) is not None:
            Thread(target=_hash_all, args=(place,), name="hashing", daemon=True).start()


def _hash_all(place: Path) -> None:
    with suppress(OSError):
        for file in _hashed_files(place):
            _sha_now(file)


def _place(path: str, revision: str | None) -> Path | None:
    """The folder or file of a model; None if it is not on this machine."""
    place = Path(path).expanduser()
    if place.exists():
        return place
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _hashed_files(place: Path) -> list[Path]:
    files = [place] if place.is_file() else sorted(place.iterdir())
    return [file for file in files if file.is_file() and (file == place or file.suffix in MODEL_FILES)]


def _base_files(config: Path) -> dict[str, str]:
    """The weight files of the base that an adapter's config names; empty if it names none or can't be read."""
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        return weight_files(settings["base_model_name_or_path"], settings.get("revision"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def weight_files(path: str, revision: str | None = None) -> dict[str, str]:
    """The `model_files` that determine what the model computes: weights and config.json."""
    files = model_files(path, revision)
    return {name: sha for name, sha in files.items() if name == "config.json" or Path(name).suffix in WEIGHT_FILES}


def _sha_now(file: Path) -> str:
    facts = file.stat()
    with HASHING:
        return _sha(file, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@lru_cache(maxsize=64)
def _sha(file: Path, size: int, modified: int, changed: int) -> str:
    """The SHA-256 of a file of this size and these times, once per process. A copy may keep `modified`, but not
    `changed`."""
    sha, buffer = sha256(), memoryview(bytearray(min(CHUNK, size + 1)))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            sha.update(buffer[:count])
    return sha.hexdigest()
