"""Find and export the checkpoints of a run."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from proxima.data import UserError
from proxima.evaluate.headline import Headline
from proxima.runtime.folder import RunFolder
from proxima.train.checkpoint import Checkpoint, checkpoints


def find_checkpoint(run: str | Path, which: str = "last") -> Checkpoint:
    """A run's checkpoint: `last`, `best` (`best_checkpoint`), or a step's number.

    Raises:
        UserError: the folder contains no run, no checkpoint, or not that one; lists the existing ones.
    """
    folder = RunFolder(run)
    found = checkpoints(folder.checkpoints)
    if not found:
        raise UserError(f"{run} contains no checkpoint; give a run folder written by `proxima train`")
    if which == "last":
        return found[-1]
    if which == "best":
        best = best_checkpoint(folder, found)
        if best is None:
            remedy = f"use last, or a step of {[c.step for c in found]}"
            raise UserError(f"{run}: no checkpoint was evaluated, so none is best", remedy=remedy)
        return best
    wanted = [c for c in found if str(c.step) == which.lstrip("0")]
    if not wanted:
        raise UserError(f"{run}: no checkpoint {which!r}; use one of {[c.step for c in found]}, last or best")
    return wanted[0]


def best_checkpoint(folder: RunFolder, found: Sequence[Checkpoint]) -> Checkpoint | None:
    """The one with the highest held-out figure (`Headline`), the earliest of equals; None if none was evaluated."""
    evals = [r for r in folder.read_metrics() if r["kind"] == "eval"]
    headline = Headline.of(evals)
    scores = {r["step"]: value for r in evals if (value := headline.value(r)) is not None}
    return max((c for c in found if c.step in scores), key=lambda c: (scores[c.step], -c.step), default=None)


def export(run: str | Path, out: str | Path, *, which: str = "last") -> Path:
    """Copy a checkpoint's model to the new folder `out`, which `AutoModelForCausalLM` loads; atomic.

    Raises:
        UserError: no such checkpoint, or `out` exists.
    """
    source, target = find_checkpoint(run, which).model, Path(out)
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, aside)
    aside.rename(target)
    return target
