"""A run's checkpoints, for those who come after it."""

import shutil
from pathlib import Path

from proxima.data import UserError
from proxima.runtime.folder import RunFolder
from proxima.train.checkpoint import Checkpoint, checkpoints


def find_checkpoint(run: str | Path, which: str = "last") -> Checkpoint:
    """A run's checkpoint: `last`, `best` (by held-out accuracy), or a step's number.

    Raises:
        ValueError: the folder holds no run, no checkpoint, or not that one; lists those there are.
    """
    folder = RunFolder(run)
    found = checkpoints(folder.checkpoints)
    if not found:
        raise UserError(f"{run} holds no checkpoint; give a run folder that `proxima train` has written")
    if which == "last":
        return found[-1]
    if which == "best":
        scores = {
            r["step"]: r["accuracy"]
            for r in folder.read_metrics()
            if r["kind"] == "eval" and r.get("accuracy") is not None
        }
        scored = [c for c in found if c.step in scores]
        if not scored:
            raise UserError(
                f"{run}: no checkpoint was evaluated, so none is best; take last, or a step of "
                f"{[c.step for c in found]}"
            )
        return max(scored, key=lambda c: (scores[c.step], -c.step))
    wanted = [c for c in found if str(c.step) == which.lstrip("0")]
    if not wanted:
        raise UserError(f"{run}: no checkpoint {which!r}; there are {[c.step for c in found]}, last and best")
    return wanted[0]


def export(run: str | Path, out: str | Path, *, which: str = "last") -> Path:
    """Copy a checkpoint's model to `out`, a folder that `AutoModelForCausalLM` loads; written aside, then renamed.

    Raises:
        ValueError: no such checkpoint, or `out` exists.
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
