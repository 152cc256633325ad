"""The files of a model: a folder, a GGUF file, or what the hub's cache has."""

from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

MODEL_FILES = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")
WEIGHT_FILES = (".bin", ".gguf", ".safetensors")


def model_files(path: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of a model's weights, configs and tokenizer files, by name; empty if they are not found. A hub name is
    looked up in the cache."""
    place = Path(path).expanduser()
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(cached, str):
            return {}
        place = Path(cached).parent
    files = [place] if place.is_file() else sorted(place.iterdir())
    return {
        file.name: _sha(file, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file() and (file == place or file.suffix in MODEL_FILES)
    }


def weight_files(path: str, revision: str | None = None) -> dict[str, str]:
    """Those of `model_files` that decide what the model computes: weights and config.json."""
    files = model_files(path, revision)
    return {name: sha for name, sha in files.items() if name == "config.json" or Path(name).suffix in WEIGHT_FILES}


@lru_cache(maxsize=64)
def _sha(file: Path, size: int, changed: int) -> str:
    """Of a file of that size and time of change: once a process."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
