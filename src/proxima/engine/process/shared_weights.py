"""The weights of a model in memory shared by two processes, and the model that the other process builds on them."""

import copy
import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data.json_reader import load_json
from proxima.model.adapters.lora import plain_weights
from proxima.model.architecture import reader_of, untie_config
from proxima.model.pretrained import load_config, load_tokenizer
from proxima.system.linux import anonymous_memory

ALIGNMENT = 64  # bytes
HEADER = 8  # words of 8 bytes: version, checksum
GENERATION = "generation_config.json"
UNFINISHED = 2**64 - 1  # the version while weights are being written


@dataclass(frozen=True)
class TensorPlace:
    """The place of a parameter in the segment: `start` in bytes; `dtype` by its name; `also`: names of tied
    parameters."""

    name: str
    dtype: str
    shape: Sequence[int]
    start: int
    also: Sequence[str] = ()

    @property
    def end(self) -> int:
        """The first byte after it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.start + int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize


class SharedWeights:
    """One copy of a model's parameters in shared memory, with a version and a checksum, and no name in the file system:
    it is freed when the last process that has it open ends, however it ends.

    One process writes, and only while no other reads. `check` detects a half-written or overwritten copy.

    Args:
        fd: file descriptor of the memory; inherited by the process that reads.
        places: place of each parameter, tied ones once.
    """

    def __init__(self, fd: int, places: Sequence[TensorPlace]) -> None:
        self.fd = fd
        self.places = tuple(places)
        self.size = -(-max((place.end for place in places), default=0) // ALIGNMENT) * ALIGNMENT
        os.ftruncate(fd, 8 * HEADER + self.size)
        memory = mmap.mmap(fd, 8 * HEADER + self.size)
        words = np.frombuffer(memory, np.uint64)
        self._header = words[:HEADER]
        self._words = words[HEADER:]
        content = torch.frombuffer(memory, dtype=torch.uint8)[8 * HEADER :]
        self.tensors: dict[str, Tensor] = {
            place.name: content[place.start : place.end].view(getattr(torch, place.dtype)).view(*place.shape)
            for place in places
        }

    @classmethod
    def allocate(cls, model: nn.Module) -> "SharedWeights":
        """Allocate room for the parameters of a model, with adapters merged."""
        places = list[TensorPlace]()
        end = 0
        for names, parameter in unique_weights(model):
            dtype = str(parameter.dtype).removeprefix("torch.")
            start = -(-end // ALIGNMENT) * ALIGNMENT
            places.append(TensorPlace(names[0], dtype, tuple(parameter.shape), start, tuple(names[1:])))
            end = places[-1].end
        return cls(anonymous_memory(), places)

    @property
    def version(self) -> int:
        """The version of the weights, or UNFINISHED."""
        return int(self._header[0])

    @torch.no_grad()
    def write(self, model: nn.Module, version: int) -> None:
        """Copy the parameters of a model.

        Raises:
            ValueError: the model has different parameters.
        """
        self._header[0] = UNFINISHED
        missing = {place.name: place for place in self.places}
        for (name, *_), parameter in unique_weights(model):
            place = missing.pop(name, None)
            if place is None or tuple(place.shape) != tuple(parameter.shape):
                raise ValueError("the engine's process was started with a model of other parameters")
            self.tensors[name].copy_(parameter)
        if missing:
            raise ValueError("the engine's process was started with a model of other parameters")
        self._header[1] = self._checksum()
        self._header[0] = version

    def check(self, version: int) -> None:
        """Raise RuntimeError unless the memory contains exactly the weights that were written as `version`."""
        if self.version != version or self._checksum() != self._header[1]:
            raise RuntimeError(f"the shared weights are not those of version {version}")

    def _checksum(self) -> np.uint64:
        total: np.uint64 = np.add.reduce(self._words)  # modulo 2^64
        return total


def unique_weights(model: nn.Module, *, shapes: bool = False) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each of `plain_weights` once: the names that share it, and the weight; `shapes` as there."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
    for name, weight in plain_weights(model, shapes=shapes):
        same = names.get(id(weight), [name])
        if same[0] == name:
            yield same, weight


def model_as_files(model: nn.Module, tokenizer: Any) -> dict[str, bytes]:
    """The configs of the model without its adapters, and the tokenizer, as the files that transformers writes."""
    untyped: Any = model
    config = copy.deepcopy(untyped.config)
    untie_config(untyped, config)  # the adapter of a head is merged
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if untyped.generation_config is not None:
            (Path(folder) / GENERATION).write_text(
                json.dumps({"eos_token_id": untyped.generation_config.eos_token_id}), encoding="utf-8"
            )
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


class ModelOverWeights:
    """A model built from the output of `model_as_files` on top of shared weights, with its tokenizer.

    Args:
        files: the output of `model_as_files` in the process that started this one.
        weights: on a CPU the model's parameters are this very memory.
        device: of the model.
    """

    def __init__(self, files: Mapping[str, bytes], weights: SharedWeights, device: torch.device) -> None:
        from transformers.initialization import no_init_weights

        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            config = load_config(folder)
            self.tokenizer = load_tokenizer(folder)
        with no_init_weights():
            self.model: Any = reader_of(config).from_config(config).eval().to(device)
        if GENERATION in files:
            self.model.generation_config.eos_token_id = load_json(files[GENERATION])["eos_token_id"]
        self.weights = weights
        self._parameters = {name: nn.Parameter(tensor.to(device), False) for name, tensor in weights.tensors.items()}
        offered = dict[str, nn.Parameter]()
        for place in weights.places:
            for name in (place.name, *place.also):
                offered[name] = self._parameters[place.name]
        shapes = {name: parameter.shape for name, parameter in offered.items()}
        expected = {name: p.shape for name, p in self.model.named_parameters(remove_duplicate=False)}
        unlike = sorted(name for name, _ in shapes.items() ^ expected.items())
        if unlike:
            raise RuntimeError(f"the model's config does not describe its weights: {unlike[0]}")
        self.model.load_state_dict(offered, strict=False, assign=True)  # buffers come from the config
        self.model.requires_grad_(False)

    @torch.no_grad()
    def refresh(self, version: int) -> None:
        """Update the model to a version, which `weights` must contain."""
        self.weights.check(version)
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self.weights.tensors[name].data_ptr():  # on another device
                parameter.copy_(self.weights.tensors[name])
