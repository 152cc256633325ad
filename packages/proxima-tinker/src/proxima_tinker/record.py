"""What `proxima view` reads (not written yet)."""

from pathlib import Path
from typing import Any

from proxima.model import LoadedModel
from proxima_tinker.trained_model import ModelSpec, PassResult
from proxima_tinker.wire import ForwardBackward


class Record:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, folder: Path, base: LoadedModel, spec: ModelSpec, path: str) -> "Record":
        return cls(folder)

    def add(self, asked: ForwardBackward, result: PassResult) -> None:
        pass

    def step(self, number: int, metrics: dict[str, Any]) -> None:
        pass
