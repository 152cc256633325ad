"""Finds the last intact checkpoint and restores its optimizer states."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from proxima.data import UserError
from proxima.model.files import ADAPTER_CONFIG
from proxima.system.checksum import Checksum
from proxima.training.checkpoint import DELETE, FORMAT, Checkpoint, read_checkpoint, remove_checkpoint
from proxima.training.optimizer_state import read_optimizer
from proxima.training.stack import TrainStack


def damage(path: Path, part: str = "") -> str | None:
    """Describe the damage to the checkpoint in `path`; None if every file is as it was written. Reads all files, or
    those of a part, such as its folder `model`; there, an adapter's config may name another place of its base."""
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
    """The last checkpoint without damage; None if there is no checkpoint. Later damaged ones are renamed to
    NAME.damaged, with a warning.

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
        raise UserError(f"{damaged[0][0]}: {damaged[0][1]}, and no checkpoint before it is whole", remedy=remedy)
    return None


def restore(checkpoint: Checkpoint, stack: TrainStack, others: Mapping[str, TrainStack] | None = None) -> None:
    """Restore the optimizer states and torch's random state. The caller has loaded the weights from `checkpoint.model`,
    and those of `others`, as in `write_checkpoint`, from their folders.

    Raises:
        UserError: the checkpoint is damaged, or has another format or model.
    """
    if checkpoint.facts.get("format") != FORMAT:
        raise UserError(f"{checkpoint.path}: format {checkpoint.facts.get('format')}, this version reads {FORMAT}")
    stack.load(_read_tensors(checkpoint, "optimizer", stack), dict(checkpoint.facts["trainer"]))
    for name, other in (others or {}).items():
        tensors = _read_tensors(checkpoint, f"{name}_optimizer", other)
        other.load(tensors, dict(checkpoint.facts[f"{name}_trainer"]))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(str(checkpoint.facts["torch_rng"])), dtype=torch.uint8))


def _read_tensors(checkpoint: Checkpoint, name: str, stack: TrainStack) -> dict[str, torch.Tensor]:
    try:
        return read_optimizer(checkpoint.path / name, dict(stack.model.named_parameters()))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{checkpoint.path}: {name}.safetensors can't be read ({error})", remedy=DELETE) from error
