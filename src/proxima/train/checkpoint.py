"""Checkpoints, written to a temporary folder, fsynced and renamed. safetensors and JSON only; nothing is unpickled.

checkpoints/000040/   model/ (Hugging Face folder)   optimizer.safetensors   files of the caller
                  state.json (written last: its presence marks a complete checkpoint)
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from proxima.data import UserError
from proxima.model import LoadedModel, save
from proxima.train.stack import TrainStack

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    @property
    def model(self) -> Path:
        """Its Hugging Face folder."""
        return self.path / "model"


def write_checkpoint(
    folder: Path,
    step: int,
    loaded: LoadedModel,
    stack: TrainStack,
    facts: Mapping[str, Any],
    files: Mapping[str, Callable[[Path], None]] | None = None,
) -> Checkpoint:
    """Write `folder/<step>`; a reader sees a complete checkpoint or none, even after a kill.

    Args:
        facts: JSON values that a resume needs beside weights and optimizer (version, data cursor …).
        files: further files by name, each with a function that writes it.

    Raises:
        OSError: the disk is full; the temporary folder is removed, earlier checkpoints are untouched.
    """
    final = folder / f"{step:06d}"
    temporary = folder / f".{step:06d}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save(loaded.model, loaded.tokenizer, temporary / "model")
        tensors, trainer_facts = stack.state()
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
            temporary / "optimizer.safetensors",
        )
        for name, write in (files or {}).items():
            write(temporary / name)
        state = {
            "format": FORMAT,
            "step": step,
            "trainer": trainer_facts,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
            **facts,
        }
        (temporary / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        mode = (temporary / "state.json").stat().st_mode & 0o777  # safetensors lets only the owner read its files
        for path in (*temporary.rglob("*"), temporary):  # folders too: they hold the names
            if path.is_file():
                path.chmod(mode)
            _sync(path)
        if final.exists():  # the same step again, after a rewind
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SafetensorError) and "space" in str(error):  # its form of ENOSPC carries no errno
            raise OSError(errno.ENOSPC, "no space left; free some, then resume", str(final)) from error
        raise
    return Checkpoint(path=final, step=step, facts=state)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All complete checkpoints, by step."""
    read = (read_checkpoint(path) for path in folder.glob("[0-9]*"))
    return sorted((checkpoint for checkpoint in read if checkpoint), key=lambda checkpoint: checkpoint.step)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in `path`; None if it is missing, incomplete, or a copy under another name."""
    try:
        facts = json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        return None
    complete = isinstance(facts, dict) and {"trainer", "torch_rng"} <= facts.keys()
    if not complete or path.name != str(facts.get("step")).zfill(6):
        return None
    return Checkpoint(path=path, step=int(facts["step"]), facts=facts)


def restore(checkpoint: Checkpoint, stack: TrainStack) -> None:
    """Restore the optimizer state and torch's random state. The caller has loaded the weights from `checkpoint.model`.

    Raises:
        UserError: the checkpoint is damaged, or has another format or model.
    """
    if checkpoint.facts.get("format") != FORMAT:
        raise UserError(f"{checkpoint.path}: format {checkpoint.facts.get('format')}, this version reads {FORMAT}")
    try:
        tensors = load_file(checkpoint.path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{checkpoint.path}: optimizer.safetensors can't be read ({error})",
            remedy="delete this checkpoint to use the one before",
        ) from error
    stack.load(tensors, dict(checkpoint.facts["trainer"]))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(str(checkpoint.facts["torch_rng"])), dtype=torch.uint8))


def prune(folder: Path, keep_last: int, keep: Iterable[int] = ()) -> None:
    """Delete all but the last `keep_last` checkpoints (0: delete none) and the steps in `keep`; delete the temporary
    folders of interrupted writes."""
    for leftover in folder.glob(".*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    kept = set(keep)
    for checkpoint in checkpoints(folder)[:-keep_last] if keep_last else []:
        if checkpoint.step not in kept:
            shutil.rmtree(checkpoint.path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
