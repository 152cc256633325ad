"""Reads which model an adapter is for. `adapter_files` reads and writes the adapter itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from proxima.data import FieldError
from proxima.data.json_reader import load_json
from proxima.model.files import ADAPTER_CONFIG, weight_files

BASE = "base.json"


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
    return BaseModel(
        path=str(local.resolve()) if local.exists() else path,
        revision=revision,
        dtype=str(dtype).removeprefix("torch."),
        files=weight_files(path, revision),
    )


def read_json(path: str, file: Path, field_name: str = "model.path") -> dict[str, Any]:
    """The object in a file of the folder `path`, or FieldError."""
    try:
        values = load_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FieldError(field_name, path, f"has no readable {file.name} ({error})") from error
    if not isinstance(values, dict):
        raise FieldError(field_name, path, f"has a {file.name} that is not a JSON object")
    return values
