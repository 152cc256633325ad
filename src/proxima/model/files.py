"""The files of a model: a folder, a GGUF file, or an entry in the hub's cache."""

from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

from proxima.data import FieldError
from proxima.data.json_reader import load_json

MODEL_FILES = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_FILES = (".bin", ".gguf", ".safetensors")


def is_adapter(path: str) -> bool:
    """True for a folder with an adapter, even if it also has its base's config.json.

    Raises:
        FieldError: the folder also has the weights of a model.
    """
    place = Path(path).expanduser()
    if not (place / ADAPTER_CONFIG).is_file():
        return False
    if weights := sorted(file.name for file in place.glob("model*.safetensors")):
        remedy = "move one of them to a separate folder"
        raise FieldError(
            "model.path", path, f"has both an adapter ({ADAPTER_CONFIG}) and a model ({weights[0]})", remedy=remedy
        )
    return True


def model_files(path: str, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of a model's weights, configs and tokenizer files, by name; empty if they are not found. A hub name is
    looked up in the cache. For an adapter's folder they include its base's weights, as `base NAME`."""
    if (place := local_place(path, revision)) is None:
        return {}
    files = sorted(file for file in place.glob("*") if file.suffix in MODEL_FILES) if place.is_dir() else [place]
    hashes = {file.name: _sha_now(file) for file in files if file.is_file()}
    return hashes | {f"base {name}": sha for name, sha in _base_files(place / ADAPTER_CONFIG).items()}


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
    return Path(cached).parent if isinstance(cached, str) else None


def _base_files(config: Path) -> dict[str, str]:
    """The weight files of the base that an adapter's config names; empty if it names none or can't be read."""
    try:
        settings = load_json(config.read_text(encoding="utf-8"))
        return weight_files(settings["base_model_name_or_path"], settings.get("revision"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def weight_files(path: str, revision: str | None = None) -> dict[str, str]:
    """The `model_files` that determine what the model computes: weights and config.json."""
    files = model_files(path, revision)
    return {name: sha for name, sha in files.items() if name == "config.json" or Path(name).suffix in WEIGHT_FILES}


def _sha_now(file: Path) -> str:
    facts = file.stat()
    return _sha(file, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@lru_cache(maxsize=64)
def _sha(file: Path, size: int, modified: int, changed: int) -> str:
    """The SHA-256 of a file of this size and these times, once per process. A copy may keep `modified`, but not
    `changed`."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
