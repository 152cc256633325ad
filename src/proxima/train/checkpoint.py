"""Checkpoints: written aside, fsynced, renamed. Formats are safetensors and JSON; nothing is ever unpickled.

checkpoints/000040/   model/ (Hugging Face folder)   optimizer.safetensors   carried_groups.parquet (surplus groups)
                      state.json (written last: its presence says that all is there)
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
    """A whole checkpoint on disk."""

    path: Path
    step: int
    facts: Mapping[str, Any]

    @property
    def model(self) -> Path:
        """The Hugging Face folder in it."""
        return self.path / "model"


def write_checkpoint(
    folder: Path,
    step: int,
    loaded: LoadedModel,
    stack: TrainStack,
    facts: Mapping[str, Any],
    files: Mapping[str, Callable[[Path], None]] | None = None,
) -> Checkpoint:
    """Write `folder/<step>`; a reader sees a whole checkpoint or none, whatever dies when.

    Args:
        facts: JSON values that a resume needs beside weights and optimizer (version, data cursor …).
        files: more files of the checkpoint: their names, and what writes each.

    Raises:
        OSError: the disk is full; what was written aside is removed, earlier checkpoints are untouched.
    """
    final = folder / f"{step:06d}"
    aside = folder / f".{step:06d}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        save(loaded.model, loaded.tokenizer, aside / "model")
        tensors, trainer_facts = stack.state()
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
            aside / "optimizer.safetensors",
        )
        for name, write in (files or {}).items():
            write(aside / name)
        state = {
            "format": FORMAT,
            "step": step,
            "trainer": trainer_facts,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
            **facts,
        }
        (aside / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        like_others = (
            aside / "state.json"
        ).stat().st_mode & 0o777  # safetensors writes files that only their owner may read
        for path in (*aside.rglob("*"), aside):  # folders too: they hold the names
            if path.is_file():
                path.chmod(like_others)
            _sync(path)
        if final.exists():  # the same step again, after a rewind
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, SafetensorError) and "space" in str(
            error
        ):  # safetensors has an error of its own for a full disk
            raise OSError(errno.ENOSPC, "no space left; free some and go on with --resume", str(final)) from error
        raise
    return Checkpoint(path=final, step=step, facts=state)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All whole checkpoints, by step. What is left of one that died half-way is not among them."""
    found = (read_checkpoint(path) for path in sorted(folder.glob("[0-9]*"))) if folder.is_dir() else ()
    return sorted(
        (checkpoint for checkpoint in found if checkpoint is not None), key=lambda checkpoint: checkpoint.step
    )


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in `path`; None where there is none, a damaged one, or somebody's copy under another name."""
    try:
        facts = json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        return None
    whole = (
        isinstance(facts, dict)
        and {"trainer", "torch_rng"} <= facts.keys()
        and path.name == str(facts.get("step")).zfill(6)
    )
    return Checkpoint(path=path, step=int(facts["step"]), facts=facts) if whole else None


def restore(checkpoint: Checkpoint, stack: TrainStack) -> None:
    """Give the trainer its optimizer state back, and torch its random state. The weights are loaded from
    `checkpoint.model` before.

    Raises:
        ValueError: the checkpoint is damaged or of another format or model; says which.
    """
    if checkpoint.facts.get("format") != FORMAT:
        raise UserError(f"{checkpoint.path}: format {checkpoint.facts.get('format')}, this version reads {FORMAT}")
    try:
        tensors = load_file(checkpoint.path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{checkpoint.path}: optimizer.safetensors can't be read ({error}); delete this checkpoint to use the "
            "one before"
        ) from error
    stack.load(tensors, dict(checkpoint.facts["trainer"]))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(str(checkpoint.facts["torch_rng"])), dtype=torch.uint8))


def prune(folder: Path, keep_last: int, keep: Iterable[int] = ()) -> None:
    """Delete all but the last `keep_last` checkpoints (0: delete none) and the steps in `keep`; leftovers of dead
    writes go too."""
    for leftover in folder.glob(".*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    spared = set(keep)
    for checkpoint in checkpoints(folder)[:-keep_last] if keep_last else []:
        if checkpoint.step not in spared:
            shutil.rmtree(checkpoint.path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
