"""Checkpoints of a run on many ranks, by the safetensors writer of torch.distributed.checkpoint; nothing is pickled,
and no rank ever holds a whole model.

checkpoints/000040/   model/        as written by one process: a regular Hugging Face folder, or an adapter's
                  optimizer/    a file per rank: `exp_avg/<weight>` …, each tensor with its place in the whole
                  critic/, critic_optimizer/   value_head.safetensors   files of the caller   state.json

As atomic as one process's: a temporary folder, fsync, state.json last, rename. `checkpoint.restore` reads both, on any
number of ranks.
"""

import copy
import json
import re
import shutil
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._consolidate_hf_safetensors import _consolidate_safetensors_files
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from proxima.data import NotFiniteError
from proxima.model.adapters.adapter_files import save_adapter
from proxima.model.adapters.lora import trained_names
from proxima.model.input_files import append_unused
from proxima.model.parallel.gather import whole_tensor
from proxima.model.policy import Policy
from proxima.model.written_settings import save_settings
from proxima.system.atomic_files import flush_to_disk
from proxima.system.damage import Checksum
from proxima.training.checkpoint import (
    VALUE_HEAD,
    Checkpoint,
    CheckpointContents,
    begin_checkpoint,
    discard_checkpoint,
    files_below,
    finish_checkpoint,
    left_out_facts,
    read_checkpoint,
    read_slices,
    write_tensors,
)
from proxima.training.stack import TrainStack

FILE = 2 << 30  # bytes of weights after which a new file of a model begins
SHARDS = "sharded"  # subfolder of a model's folder while its files are assembled
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass
class _Unwritten:
    """The data still to be written, all from one moment: tensors by their destination folder, and facts."""

    final: Path
    temporary: Path
    facts: dict[str, Any]
    trainers: dict[str, Any] = field(default_factory=dict)
    models: dict[Path, tuple[dict[str, Tensor], Convert | None, torch.nn.Module]] = field(default_factory=dict)
    optimizers: dict[Path, dict[str, Tensor]] = field(default_factory=dict)
    thread: threading.Thread | None = None
    error: BaseException | None = None


class ShardedWriter:
    """Writes the checkpoints of a run, one at a time. Every rank creates a writer, and all ranks call its methods
    together."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")  # a separate group: a thread writes while the ranks train
        self._ranks = _DistWrapper(self._group, True, 0)  # what one rank raises in a call, all raise
        self._job: _Unwritten | None = None

    def write(self, folder: Path, step: int, contents: CheckpointContents) -> None:
        """Begin what `checkpoint.write_checkpoint` does, after the previous checkpoint is finished: copy the state to
        host memory, and let a thread write it. The checkpoint is complete when `finish`, or the next `write`, returns.
        The `facts` and `files` of rank 0 count; a value head on the policy is written here, not by the caller.

        Raises:
            OSError, RuntimeError: this or the last checkpoint could not be written on some rank;
                its temporary folder is removed.
            NotFiniteError: the optimizer state of some rank is not finite.
        """
        self.finish()
        now = {"torch_rng": torch.get_rng_state().numpy().tobytes().hex(), **copy.deepcopy(dict(contents.facts))}
        job = _Unwritten(folder / f"{step:06d}", folder / f".{step:06d}.part", now)
        try:
            self._ranks.all_gather("begin", partial(_on_rank_zero, begin_checkpoint, folder, step))
            for name, prefix, stack in contents.models():
                self._collect(job, name, prefix, stack)
            self._ranks.all_gather("files", lambda: self._write_files(job, contents))
        except BaseException as error:
            self._give_up(job, error)
            raise
        self._job = job
        for weights, _, _ in job.models.values():
            _move_to_host(weights)
        for slots in job.optimizers.values():
            _move_to_host(slots)
        job.thread = threading.Thread(target=self._write, args=(job,), name="checkpoint", daemon=True)
        job.thread.start()

    def finish(self) -> Checkpoint | None:
        """Wait for the checkpoint that is being written, if any, and return it. Call it at the end of a run.

        Raises:
            OSError, RuntimeError: as `write`.
        """
        job = self._job
        self._job = None
        if job is None:
            return None
        assert job.thread is not None
        job.thread.join()
        if job.error is not None:
            self._give_up(job, job.error)
            raise job.error
        return read_checkpoint(job.final)

    @property
    def unfinished(self) -> bool:
        """True if a checkpoint waits for `finish`, the same on every rank; not collective."""
        return self._job is not None

    def _collect(self, job: _Unwritten, name: str, prefix: str, stack: TrainStack) -> None:
        """Collect the tensors of a model and its stack; the model's settings are written immediately."""
        loaded = stack.model.loaded
        adapter = None
        if loaded.base is not None:
            parameters = dict(loaded.model.named_parameters())
            adapter = {key: whole_tensor(parameters[key]).cpu() for key in trained_names(loaded.model)}
        else:
            job.models[job.temporary / name] = _weights(loaded.model), _conversion(loaded.model), loaded.model

        def collect() -> None:
            tensors, job.trainers[f"{prefix}trainer"] = stack.state()
            job.optimizers[job.temporary / f"{prefix}optimizer"] = tensors
            job.trainers |= left_out_facts(prefix, stack)
            if dist.get_rank() > 0:
                return
            if adapter is None:
                save_settings(loaded.model, loaded.tokenizer, job.temporary / name)
            else:
                save_adapter(loaded, job.temporary / name, adapter)

        self._ranks.all_gather(name, collect)

    def _write_files(self, job: _Unwritten, contents: CheckpointContents) -> None:
        model = contents.stack.model
        weight = None
        if isinstance(model, Policy) and model.value_head is not None:
            weight = whole_tensor(model.value_head.weight)
        if dist.get_rank() == 0:
            for name, write in contents.files.items():
                if name != VALUE_HEAD:
                    write(job.temporary / name)
            if weight is not None:
                write_tensors(job.temporary / VALUE_HEAD, {"weight": weight})

    def _write(self, job: _Unwritten) -> None:
        try:
            for folder, (tensors, convert, model) in job.models.items():
                self._write_model(folder, tensors, convert, model)
            for folder, tensors in job.optimizers.items():
                writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
                save(tensors, storage_writer=writer, process_group=self._group)
            crc32 = self._seal(job.temporary)
            self._ranks.all_gather("publish", lambda: self._publish(job, crc32))
        except BaseException as error:
            job.error = error

    def _write_model(
        self, folder: Path, tensors: dict[str, Tensor], convert: Convert | None, model: torch.nn.Module
    ) -> None:
        """Write the files of a Hugging Face folder: every rank writes its slices, then assembles some of the files."""
        shards = folder / SHARDS
        files = _file_numbers(tensors)
        writer = HuggingFaceStorageWriter(path=str(shards), fqn_to_index_mapping=files, save_distributed=True)
        save(tensors, storage_writer=writer, process_group=self._group)
        rank = dist.get_rank()
        size = dist.get_world_size()
        last = max(files.values())
        file_of = {name: f"model-{i:05d}-of-{last:05d}.safetensors" for name, i in files.items()}
        mine = {name: file for name, file in file_of.items() if files[name] % size == rank}
        places = self._merged("files", lambda: _put_together(folder, mine, convert))
        self._ranks.all_gather("index", partial(_on_rank_zero, _write_index, folder, tensors, places, model))

    def _seal(self, temporary: Path) -> dict[str, str]:
        """CRC-32 of every file by name, each read and fsynced by one rank."""
        rank = dist.get_rank()
        size = dist.get_world_size()

        def sealed() -> dict[str, str]:
            mine = files_below(temporary)[rank::size]
            for path in mine:
                flush_to_disk(path)
            return {str(path.relative_to(temporary)): Checksum.of(path).crc32 for path in mine}

        return self._merged("seal", sealed)

    def _publish(self, job: _Unwritten, crc32: Mapping[str, str]) -> None:
        if dist.get_rank() == 0:
            finish_checkpoint(job.temporary, job.final, job.trainers, job.facts, crc32)

    def _give_up(self, job: _Unwritten, error: BaseException) -> None:
        """Remove what was written, and raise the cause of an error; returns if that is the error itself."""
        cause = error
        raised_here = True
        if isinstance(error, CheckpointException):  # not an Exception: callers would not catch it
            rank = dist.get_rank()
            raised_here = rank in error.failures
            of_rank = rank if raised_here else min(error.failures)
            cause, _ = error.failures[of_rank]
        discard_checkpoint(job.temporary, job.final, cause, remove=dist.get_rank() == 0)
        if cause is error:
            return
        if raised_here or isinstance(cause, OSError | NotFiniteError):
            raise cause from error
        raise RuntimeError(f"{job.final}: {type(cause).__name__}: {cause}") from error

    def _merged(self, step: str, function: Callable[[], dict[str, str]]) -> dict[str, str]:
        """The merged results of `function()` on all ranks."""
        return dict(ChainMap(*self._ranks.all_gather(step, function)))


def _on_rank_zero(function: Callable[..., object], *arguments: object) -> None:
    """Call the function on rank 0, and do nothing on the others."""
    if dist.get_rank() == 0:
        function(*arguments)


def _move_to_host(tensors: dict[str, Tensor]) -> None:
    """Replace each tensor by its copy in host memory."""
    for name, tensor in list(tensors.items()):
        tensors[name] = _on_host(tensor)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, with its place in the whole."""
    if isinstance(tensor, DTensor):
        return DTensor(tensor.to_local().to("cpu", copy=True), tensor._spec, requires_grad=False)
    return tensor.to("cpu", copy=True)


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that a model's folder contains."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number, from 1, of the file of each tensor; the tensors of a layer are in one file."""
    files = dict[str, int]()
    size = 0
    index = 1
    layer = None
    for name, tensor in tensors.items():
        layer_of_name = re.match(r".*?\.\d+\.", name)
        here = name if layer_of_name is None else layer_of_name[0]
        if size >= FILE and here != layer:
            size = 0
            index += 1
        files[name] = index
        layer = here
        size += tensor.numel() * tensor.element_size()
    return files


def _put_together(folder: Path, file_of: Mapping[str, str], convert: Convert | None) -> dict[str, str]:
    """Write these files from the ranks' slices. Returns the file of each tensor, by the tensor's name in it."""
    if convert is None:
        if file_of:
            _consolidate_safetensors_files(str(folder / SHARDS), str(folder), dict(file_of), num_threads=1)
        return dict(file_of)
    places = dict[str, str]()
    for file in sorted(set(file_of.values())):
        state = convert(
            read_slices(folder / SHARDS, {}, [name for name, own_file in file_of.items() if own_file == file])
        )
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(state, file)
    return places


def _conversion(model: Any) -> Convert | None:
    """The function that gives weights the names and shapes of their original files; None if these are the model's."""
    if not getattr(model, "_weight_conversions", None):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    return partial(revert_weight_conversion, model)


def _write_index(
    folder: Path, tensors: Mapping[str, Tensor], places: Mapping[str, str], model: torch.nn.Module
) -> None:
    """Write the index, and the weights that the model lacks."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(folder / SHARDS)
    append_unused(model, folder)
