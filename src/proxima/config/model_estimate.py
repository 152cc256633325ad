"""The size of a config's model and the rate of the machine, on which all estimates rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from proxima.config.estimate import Time, gemm_rate, model_facts
from proxima.config.families import command_of
from proxima.config.known_models import known_facts
from proxima.config.machine_checks import device_exists
from proxima.config.resolve import Resolved
from proxima.model.demo_model import is_downloadable
from proxima.model.load import resolve_device
from proxima.task.mix import Mix

Value = TypeVar("Value")


class ModelEstimates:
    """The size of a config's model, and what rests on it; None where that can't be read, and `notes` says why.

    The size of a model whose config.json can't be read is that of `known_models`, and `known_size` is true; else it is
    not known.
    """

    memory: dict[str, int] | None = None
    time: Time | None = None

    def __init__(self, resolved: Resolved[Any]) -> None:
        config = resolved.config
        self.notes: list[str] = []
        self.model = None
        if not is_downloadable(config.model.path):
            model = config.model
            self.model = self._read(lambda: model_facts(model.path, model.revision, model.lora), "model size")
        self.known_size = False
        if self.model is None and (known := known_facts(config.model.path)) is not None:
            self.model, self.known_size = known, True
            published = f"that of {Path(config.model.path).name} as published"
            not_here = f"it is not here yet, `proxima {command_of(config)}` downloads it (93 MB)"
            reason = not_here if is_downloadable(config.model.path) else "its config.json can't be read here"
            self.notes = [f"known size: {published}; {reason}"]
            if config.model.lora is not None:
                self.notes.append("the adapter is not in the memory: its size can't be told before the model is here")
        if isinstance(task := config.task, Mix) and (shares := self._read(lambda: task.shares(config.seed), "shares")):
            self.notes.append(f"task: {shares}")

    def _read(self, read: Callable[[], Value], name: str) -> Value | None:
        try:
            return read()
        except (ValueError, OSError, ImportError, AttributeError) as error:
            self.notes.append(f"{name} unknown: {' '.join(str(error).split())}")
            return None

    def _rate(self, resolved: Resolved[Any], gemm: float | None) -> float | None:
        """FLOP/s to reckon with: `gemm`, or measured here; None where the device does not exist."""
        if gemm is not None or any(device_exists(resolved)):
            return gemm
        model = resolved.config.model
        return gemm_rate(model.compute_dtype, str(resolve_device(model.device)))
