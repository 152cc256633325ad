"""The files of a model: a folder, a GGUF file, or what the hub's cache has."""

import json
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

MODEL_FILES = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_FILES = (".bin", ".gguf", ".safetensors")


def model_files(path: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of a model's weights, configs and tokenizer files, by name; empty if they are not found. A hub name is
    looked up in the cache. An adapter's folder has its base's weights too, as `base NAME`."""
    place = Path(path).expanduser()
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(cached, str):
            return {}
        place = Path(cached).parent
    files = [place] if place.is_file() else sorted(place.iterdir())
    hashes = {
        file.name: _sha(file, file.stat().st_size, file.stat().st_mtime_ns, file.stat().st_ctime_ns)
        for file in files
        if file.is_file() and (file == place or file.suffix in MODEL_FILES)
    }
    return hashes | {f"base {name}": sha for name, sha in _base_files(place / ADAPTER_CONFIG).items()}


def _base_files(config: Path) -> dict[str, str]:
    """Of the base that an adapter's config names; nothing if that is none, or can't be read."""
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        return weight_files(settings["base_model_name_or_path"], settings.get("revision"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def weight_files(path: str, revision: str | None = None) -> dict[str, str]:
    """Those of `model_files` that decide what the model computes: weights and config.json."""
    files = model_files(path, revision)
    return {name: sha for name, sha in files.items() if name == "config.json" or Path(name).suffix in WEIGHT_FILES}


@lru_cache(maxsize=64)
def _sha(file: Path, size: int, modified: int, changed: int) -> str:
    """Of a file of that size and those times: once a process. A copy may keep the first time, but not the second."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
