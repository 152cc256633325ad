"""Find and export the checkpoints of a run."""

import shutil
from pathlib import Path

from proxima.config.recipe_reader import read_yaml
from proxima.data import UserError
from proxima.model.adapter_folder import base_of
from proxima.model.files import is_adapter
from proxima.model.load import load
from proxima.model.pretrained import DTYPES
from proxima.model.save import save
from proxima.model.scalar_model import load_scalar_model
from proxima.runtime.state.best_checkpoint import best_checkpoint, headlines
from proxima.runtime.state.folder import RunFolder, existing_run
from proxima.runtime.state.model_card import model_card
from proxima.system.atomic_files import atomic_folder
from proxima.training.checkpoint import CRITIC, Checkpoint, checkpoints, damage


def find_checkpoint(run: str | Path, which: str = "last", part: str = "model") -> Checkpoint:
    """A run's checkpoint: `last`, `best` (`best_checkpoint`), or a step's number.

    Args:
        part: the folder of the checkpoint that will be read.

    Raises:
        UserError: the folder contains no run, no checkpoint, or not that one; lists the existing ones. The best was
            not kept: `checkpoint.keep_best` was false, and a step without a checkpoint was better. A file of the part
            differs from what was written.
    """
    folder = existing_run(run)
    saved = checkpoints(folder.checkpoints)
    if not saved:
        raise UserError(f"{run} has no checkpoint yet", remedy="wait for one: checkpoint.every, or the end of the run")
    found = _named(run, folder, saved, which)
    if (why := damage(found.path, part)) is not None:
        others = [c.step for c in saved if c is not found]
        use = f", or use one of {others}" if others else ""
        raise UserError(f"{found.path}: {why}", remedy=f"restore the file from a copy{use}")
    return found


def _named(run: str | Path, folder: RunFolder, saved: list[Checkpoint], which: str) -> Checkpoint:
    if which == "last":
        return saved[-1]
    if which == "best":
        best = best_checkpoint(folder, saved)
        if best is None:
            remedy = f"use last, or a step of {[c.step for c in saved]}"
            raise UserError(f"{run}: no checkpoint was evaluated, so none is best", remedy=remedy)
        _refuse_deleted_best(folder, best)
        return best
    of_step = [c for c in saved if str(c.step) == which.lstrip("0")]
    if not of_step:
        raise UserError(f"{run}: no checkpoint {which!r}; use one of {[c.step for c in saved]}, last or best")
    return of_step[0]


def _refuse_deleted_best(folder: RunFolder, best: Checkpoint) -> None:
    """Refuse to export another checkpoint as the best: without `checkpoint.keep_best`, the best one may have been
    deleted."""
    if not folder.config.is_file() or read_yaml(folder.config).to_python().get("checkpoint", {}).get("keep_best"):
        return
    scores = headlines(folder)
    step = max((s for s in scores if s), key=lambda s: (scores[s], -s))
    if scores[step] > scores[best.step]:
        reason = f"{folder.path}: the best evaluation is that of step {step}, whose checkpoint was not kept"
        remedy = f"use last or {best.step}; train with checkpoint.keep_best=true and checkpoint.every to keep it"
        raise UserError(reason, remedy=remedy)


def export(
    run: str | Path, out: str | Path, *, which: str = "last", adapter: bool = False, critic: bool = False
) -> Path:
    """Copy a checkpoint's model to the new folder `out`, which `AutoModelForCausalLM` loads, with a model card; atomic.
    Of a run with LoRA, the base with the adapter merged, in the base's dtype; with `adapter` the adapter's folder,
    which peft reads. With `critic` the critic, which `AutoModelForSequenceClassification` loads.

    Raises:
        UserError: no such checkpoint, `out` exists, no adapter or critic in the checkpoint, or the adapter's base has
            changed or is gone.
    """
    checkpoint, target = find_checkpoint(run, which, CRITIC if critic else "model"), Path(out)
    source = checkpoint.path / CRITIC if critic else checkpoint.model
    if critic and not source.is_dir():
        reason = f"{checkpoint.path} has no critic: the run has none, or it is a head on the policy"
        raise UserError(reason, remedy="leave out --critic")
    if adapter and not is_adapter(str(source)):
        raise UserError(f"{run} was trained without model.lora, so it has no adapter", remedy="leave out --adapter")
    with atomic_folder(target, _refuse_existing) as aside:
        if is_adapter(str(source)) and not adapter:
            read = load_scalar_model if (source / "config.json").is_file() else load
            merged = read(str(source), dtype=DTYPES[base_of(str(source)).dtype or "float32"], device="cpu")
            save(merged.model, merged.tokenizer, aside)
        else:
            shutil.copytree(source, aside, dirs_exist_ok=True)
        card = model_card(RunFolder(run), checkpoint.step, "peft" if adapter else "transformers")
        (aside / "README.md").write_text(card, encoding="utf-8")
    return target


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")
