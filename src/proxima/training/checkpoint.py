"""Checkpoints: writing, finding the last intact one, and restoring it. They are written to a temporary folder, fsynced
and renamed. safetensors and JSON only; nothing is unpickled.

checkpoints/000040/   model/ (Hugging Face folder, or peft's)   optimizer.safetensors   files of the caller
                  critic/, critic_optimizer.safetensors if the critic is a separate model
                  optimizer/, critic_optimizer/ instead of the files if many ranks wrote, see `sharded_checkpoint`
                  state.json (written last: its presence marks a complete checkpoint; it holds the CRC-32 of every file)
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.model.files import ADAPTER_CONFIG
from proxima.model.input_files import left_out_of, remember_left_out
from proxima.model.load import save, save_trained
from proxima.model.parallel.sharding import fill_weight
from proxima.system.atomic_files import flush_to_disk, ordinary_modes
from proxima.system.damage import Checksum
from proxima.system.full_disk import as_disk_full
from proxima.training.optimizer import sharded_as
from proxima.training.stack import TrainStack

FORMAT = 2
CRITIC = "critic"  # the folder of a separate critic
VALUE_HEAD = "value_head.safetensors"  # the weights of a value head on the policy
CARRIED_GROUPS = "carried_groups.parquet"  # kept for later steps
NEXT_POLICY = "next_policy.parquet"
DELETE = "delete this checkpoint to use the one before"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    @property
    def model(self) -> Path:
        """Its Hugging Face folder; with LoRA, that of the adapter."""
        return self.path / "model"


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The contents of a checkpoint, written by one process or by many ranks.

    Args:
        stack: that of the trained model.
        facts: JSON values that a resume needs besides weights and optimizer (version, data cursor …).
        files: further files by name, each with a function that writes it.
        others: the stacks of further models, by the names of their folders.
    """

    stack: TrainStack
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    others: Mapping[str, TrainStack] = field(default_factory=dict)

    def models(self) -> Iterator[tuple[str, str, TrainStack]]:
        """The stack of each model, with the name of the model's folder and the prefix of its optimizer's names."""
        yield "model", "", self.stack
        for name, other in self.others.items():
            yield name, f"{name}_", other


def write_checkpoint(folder: Path, step: int, contents: CheckpointContents) -> Checkpoint:
    """Write `folder/<step>`; a reader sees a complete checkpoint or none, even after a kill.

    Raises:
        OSError: the disk is full; the temporary folder is removed, earlier checkpoints are untouched.
    """
    final = folder / f"{step:06d}"
    temporary = begin_checkpoint(folder, step)
    trainers: dict[str, Any] = {}
    try:
        for name, prefix, stack in contents.models():
            if stack is contents.stack:
                save_trained(stack.model.loaded, temporary / name)
            else:
                save(stack.model.model, stack.model.loaded.tokenizer, temporary / name)
            tensors, trainers[f"{prefix}trainer"] = stack.state()
            trainers |= left_out_facts(prefix, stack)
            write_tensors(temporary / f"{prefix}optimizer.safetensors", tensors)
        for name, write in contents.files.items():
            write(temporary / name)
        crc32 = {str(path.relative_to(temporary)): Checksum.of(path).crc32 for path in files_below(temporary)}
        return finish_checkpoint(temporary, final, trainers, contents.facts, crc32)
    except BaseException as error:
        discard_checkpoint(temporary, final, error)
        raise


def left_out_facts(prefix: str, stack: TrainStack) -> dict[str, Any]:
    """The names of the weights that a model's folder lacks, by `<prefix>left_out`; empty without any."""
    names = left_out_of(stack.model.loaded.model)
    if not names:
        return {}
    return {f"{prefix}left_out": list(names)}


def begin_checkpoint(folder: Path, step: int) -> Path:
    """The new temporary folder of a checkpoint in `folder`."""
    temporary = folder / f".{step:06d}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    folder.mkdir(exist_ok=True)  # not the run folder above it, which may have been moved during the run
    temporary.mkdir()
    return temporary


def discard_checkpoint(temporary: Path, final: Path, error: BaseException, *, remove: bool = True) -> None:
    """Remove an incomplete checkpoint after an error.

    Raises:
        OSError: the error means that the disk is full, in another form.
    """
    full = as_disk_full(error, final)
    if remove:
        shutil.rmtree(temporary, ignore_errors=True)
    if full is not None and full is not error:
        raise full from error


def finish_checkpoint(
    temporary: Path, final: Path, trainers: Mapping[str, Any], facts: Mapping[str, Any], crc32: Mapping[str, str]
) -> Checkpoint:
    """Write state.json into the folder of a checkpoint and rename the folder: the checkpoint is then complete.

    Args:
        trainers: the facts of each stack, as returned by `TrainStack.state`.
        crc32: CRC-32 by name of every file.
    """
    state = {
        "format": FORMAT,
        "step": int(final.name),
        **trainers,
        "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        **facts,
        "crc32": dict(crc32),
    }
    state["state_crc32"] = _state_crc32(state)
    (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    ordinary_modes(temporary)
    for path in (*temporary.rglob("*"), temporary):  # folders too: they hold the names
        flush_to_disk(path)
    if final.exists():  # the same step again, after a rewind
        remove_checkpoint(final)
    temporary.rename(final)
    flush_to_disk(final.parent)
    return Checkpoint(path=final, step=int(final.name), facts=state)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All complete checkpoints, by step."""
    read = (read_checkpoint(path) for path in folder.glob("[0-9]*"))
    return sorted((checkpoint for checkpoint in read if checkpoint), key=lambda checkpoint: checkpoint.step)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in `path`; None if it is missing, damaged, or a copy under another name."""
    try:
        facts = load_json((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(facts, dict) and {"trainer", "torch_rng"} <= facts.keys()
    if not complete or path.name != str(facts.get("step")).zfill(6):
        return None
    checked = "state_crc32" in facts or facts.get("format") == FORMAT
    if checked and facts.get("state_crc32") != _state_crc32(facts):
        return None
    return Checkpoint(path=path, step=int(path.name), facts=facts)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, from any device, as safetensors."""
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def prune(folder: Path, keep_last: int, keep: Iterable[int] = (), *, leftovers: bool = True) -> None:
    """Delete all but the last `keep_last` checkpoints (0: delete none) and the steps in `keep`; delete the temporary
    folders of interrupted writes, the `leftovers`."""
    if leftovers:
        for leftover in folder.glob(".*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
    if keep_last == 0:
        return
    kept = set(keep)
    for checkpoint in checkpoints(folder)[:-keep_last]:
        if checkpoint.step not in kept:
            remove_checkpoint(checkpoint.path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, after renaming it: if interrupted, no partial checkpoint looks complete. Of a link, only the
    link is deleted."""
    aside = path.with_name(f".{path.name}.old.part")  # `prune` deletes what a kill leaves
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    if aside.is_symlink():
        aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _state_crc32(state: Mapping[str, Any]) -> str:
    """The CRC-32 of state.json's content without its own entry."""
    text = json.dumps({key: value for key, value in state.items() if key != "state_crc32"}, sort_keys=True)
    return Checksum.of_bytes(text.encode()).crc32


def damage(path: Path, part: str = "") -> str | None:
    """Describe the damage to the checkpoint in `path`; None if every file is unchanged. Reads all files, or those of
    `part`, such as the folder `model`, where an adapter's config may name another location of its base."""
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        return "state.json is missing or damaged"
    for name, crc in checkpoint.facts.get("crc32", {}).items():
        if part and (not name.startswith(f"{part}/") or name.endswith(ADAPTER_CONFIG)):
            continue
        try:
            if Checksum.of(path / name).crc32 != crc:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
    return None


def last_complete(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The last undamaged checkpoint; None if there is no checkpoint. Damaged ones after it are renamed to NAME.damaged,
    with a warning.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[tuple[Path, str]] = []
    for path in sorted((p for p in folder.glob("[0-9]*") if p.name.isdecimal()), reverse=True):
        why = damage(path)
        if why is None:
            for other, reason in damaged:
                aside = other.with_name(f"{other.name}.damaged")
                if aside.exists():
                    remove_checkpoint(aside)
                other.rename(aside)
                warn(f"{other}: {reason}; it is now {aside.name}, and the checkpoint before it, {path.name}, is used")
            return read_checkpoint(path)
        damaged.append((path, why))
    if damaged:
        remedy = "restore the file, or delete the folder to start from the beginning"
        raise UserError(f"{damaged[0][0]}: {damaged[0][1]}, and no earlier checkpoint is complete", remedy=remedy)
    return None


def restore(checkpoint: Checkpoint, stack: TrainStack, others: Mapping[str, TrainStack] | None = None) -> None:
    """Restore the optimizer states and torch's random state. The caller has loaded the weights from `checkpoint.model`,
    and those of `others`, as in `CheckpointContents`, from their folders.

    Raises:
        UserError: the checkpoint is damaged, or has another format or model.
    """
    if checkpoint.facts.get("format") != FORMAT:
        raise UserError(f"{checkpoint.path}: format {checkpoint.facts.get('format')}, this version reads {FORMAT}")
    stack.load(_read_tensors(checkpoint, "optimizer", stack), dict(checkpoint.facts["trainer"]))
    remember_left_out(stack.model.loaded.model, checkpoint.facts.get("left_out", ()))
    for name, other in (others or {}).items():
        remember_left_out(other.model.loaded.model, checkpoint.facts.get(f"{name}_left_out", ()))
        tensors = _read_tensors(checkpoint, f"{name}_optimizer", other)
        other.load(tensors, dict(checkpoint.facts[f"{name}_trainer"]))
    state = bytearray.fromhex(str(checkpoint.facts["torch_rng"]))
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


def _read_tensors(checkpoint: Checkpoint, name: str, stack: TrainStack) -> dict[str, Tensor]:
    try:
        return read_optimizer(checkpoint.path / name, dict(stack.model.named_parameters()))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{checkpoint.path}: {name}.safetensors can't be read ({error})", remedy=DELETE) from error


def read_optimizer(place: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the folder `place`, or of the file of that name with `.safetensors`, by `kind/weight`. If the
    weight is sharded, so is its tensor, and a rank keeps only its own slice; every other tensor is read whole.

    Raises:
        OSError, SafetensorError: a file can't be read.
    """
    if place.is_dir():
        return read_slices(place, weights)
    tensors = dict[str, Tensor]()
    with safe_open(place.with_suffix(".safetensors"), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            tensor = opened.get_tensor(name)
            tensors[name] = _empty(name, tensor.shape, tensor.dtype, weights)
            fill_weight(tensors[name], tensor)
    return tensors


def read_slices(folder: Path, weights: Mapping[str, Tensor], names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of these names, None: all, in a folder that the ranks of torch.distributed.checkpoint wrote; as
    `read_optimizer`."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    stored: dict[str, Any] = metadata.state_dict_metadata
    if names is None:
        names = stored
    tensors: dict[str, Tensor] = {}
    for name in names:
        facts = stored[name]
        tensors[name] = _empty(name, facts.size, facts.properties.dtype, weights)
    planner.set_up_planner(tensors, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return tensors


def _empty(name: str, size: torch.Size, dtype: torch.dtype, weights: Mapping[str, Any]) -> Tensor:
    """A tensor `kind/weight` to be filled; sharded like the weight if that is sharded and of the same shape except for
    the columns."""
    weight: Any = weights.get(name.partition("/")[2])
    if not (hasattr(weight, "to_local") and len(size) > 0 and weight.shape[:-1] == size[:-1]):
        return torch.empty(size, dtype=dtype)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, _ = compute_local_shape_and_global_offset(size, weight.device_mesh, weight.placements)
    return sharded_as(weight, torch.empty(local_shape, dtype=dtype, device=weight.to_local().device), size)
