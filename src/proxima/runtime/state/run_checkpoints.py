"""The checkpoints of a run: finds the last, the best or that of a step, deletes those not kept, and exports a model."""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from proxima.config.recipe_reader import read_yaml
from proxima.config.sections.eval import CheckpointConfig
from proxima.data import UserError
from proxima.evaluation.headline import Headline
from proxima.model.files import base_of, is_adapter
from proxima.model.input_files import left_out_note, left_out_of
from proxima.model.load import load, save
from proxima.model.pretrained import DTYPES, LoadedModel, without_progress_bars
from proxima.model.scalar_model import load_scalar_model
from proxima.runtime.state.folder import RunFolder, existing_run
from proxima.system.atomic_files import atomic_folder
from proxima.training.checkpoint import CRITIC, Checkpoint, checkpoints, damage, prune

# sections about the machine, or about the people who ran it
LEFT_OUT = ("checkpoint", "engine", "folder", "monitor", "runtime", "view")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
    checkpoint = _named(run, folder, saved, which)
    why = damage(checkpoint.path, part)
    if why is not None:
        remedy = "restore the file from a copy"
        others = [c.step for c in saved if c is not checkpoint]
        if others:
            remedy = f"{remedy}, or use one of {others}"
        raise UserError(f"{checkpoint.path}: {why}", remedy=remedy)
    return checkpoint


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
    if not folder.config.is_file():
        return
    config = read_yaml(folder.config).to_python()
    if config.get("checkpoint", {}).get("keep_best"):
        return
    scores = headlines(folder)
    step = _best(scores, [step for step in scores if step])
    assert step is not None
    if scores[step] > scores[best.step]:
        reason = f"{folder.path}: the best evaluation is that of step {step}, whose checkpoint was not kept"
        remedy = f"use last or {best.step}; train with checkpoint.keep_best=true and checkpoint.every to keep it"
        raise UserError(reason, remedy=remedy)


def best_checkpoint(folder: RunFolder, saved: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the best held-out figure (`Headline`), the earliest of equals; None if none was evaluated."""
    scores = headlines(folder)
    evaluated = {checkpoint.step: checkpoint for checkpoint in saved if checkpoint.step in scores}
    step = _best(scores, evaluated)
    return None if step is None else evaluated[step]


def _best(scores: Mapping[int, float], steps: Iterable[int]) -> int | None:
    """The step with the best score, the earliest of equals; None without steps."""

    def rank(step: int) -> tuple[float, int]:
        return scores[step], -step

    return max(steps, key=rank, default=None)


def headlines(folder: RunFolder) -> dict[int, float]:
    """Step → headline of its evaluation, so that higher is better."""
    evals = [r for r in folder.read_metrics() if r["kind"] == "eval"]
    headline = Headline.of(evals)
    scores = {record["step"]: headline.score(record) for record in evals}
    return {step: score for step, score in scores.items() if score is not None}


def prune_checkpoints(folder: RunFolder, kept: CheckpointConfig, *, leftovers: bool = True) -> None:
    """Delete all but the last checkpoints, and the one that is best on held-out questions if it is to be kept;
    `leftovers` as in `prune`."""
    keep = list[int]()
    if kept.keep_best:
        best = best_checkpoint(folder, checkpoints(folder.checkpoints))
        if best is not None:
            keep.append(best.step)
    prune(folder.checkpoints, kept.keep_last, keep=keep, leftovers=leftovers)


# ---- export ----------------------------------------------------------------------------------------------------------


def export(
    run: str | Path,
    out: str | Path,
    *,
    which: str = "last",
    adapter: bool = False,
    critic: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Copy a checkpoint's model to the new folder `out`, which `AutoModelForCausalLM` loads, with a model card; atomic.
    Of a run with LoRA, the base with the adapter merged, in the base's dtype; with `adapter` the adapter's folder,
    which peft reads. With `critic` the critic, which `AutoModelForSequenceClassification` loads. `say` is told if
    weights of the run's input are not in it.

    Raises:
        UserError: no such checkpoint, `out` exists, no adapter or critic in the checkpoint, or the adapter's base has
            changed or is gone.
    """
    part = CRITIC if critic else "model"
    checkpoint = find_checkpoint(run, which, part)
    target = Path(out)
    source = checkpoint.path / part
    if critic and not source.is_dir():
        reason = f"{checkpoint.path} has no critic: the run has none, or it is a head on the policy"
        raise UserError(reason, remedy="leave out --critic")
    if adapter and not is_adapter(str(source)):
        raise UserError(f"{run} was trained without model.lora, so it has no adapter", remedy="leave out --adapter")
    left_out: Sequence[str] = checkpoint.facts.get(f"{CRITIC}_left_out" if critic else "left_out", ())
    with without_progress_bars(), atomic_folder(target, _refuse_existing) as aside:
        if is_adapter(str(source)) and not adapter:
            merged = _merged(source)
            save(merged.model, merged.tokenizer, aside)
            left_out = left_out_of(merged.model)
        else:
            shutil.copytree(source, aside, dirs_exist_ok=True)
        library = "peft" if adapter else "transformers"
        card = model_card(RunFolder(run), checkpoint.step, library)
        (aside / "README.md").write_text(card, encoding="utf-8")
    note = None if adapter else left_out_note(left_out)
    if note is not None and say is not None:
        say(note)
    return target


def _merged(source: Path) -> LoadedModel:
    """The base of an adapter with it merged, in the base's dtype."""
    read = load_scalar_model if (source / "config.json").is_file() else load
    dtype = base_of(str(source)).dtype or "float32"
    return read(str(source), dtype=DTYPES[dtype], device="cpu")


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise UserError(f"{target} exists already; give a new folder")


def model_card(folder: RunFolder, step: int, library: str) -> str:
    """README.md of an exported model: what it was trained from and how, and what its evaluations say. Markdown with the
    hub's metadata; paths on this machine are reduced to their last name."""
    config: dict[str, Any] = {}
    if folder.config.is_file():
        config = read_yaml(folder.config).to_python()
    recipe = _without_places({key: value for key, value in config.items() if key not in LEFT_OUT})
    base = str((config.get("model") or {}).get("path", ""))
    facts: dict[str, Any] = {"library_name": library, "tags": ["proxima", "reinforcement-learning"]}
    if HUB_NAME.fullmatch(base) and not Path(base).exists():
        facts["base_model"] = base
    parts = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False)}---",
        f"# {folder.path.resolve().name}",
        f"{_without_places(base) or 'A model'}, trained with proxima: the weights of step {step}.",
    ]
    table = _evaluations(folder)
    if table:
        parts.append(f"## Held-out results of the run\n\n{table}")
    if recipe:
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        parts.append(f"## Recipe\n\n```yaml\n{text}```")
    return "\n\n".join(parts) + "\n"


def _evaluations(folder: RunFolder) -> str:
    """A row for each evaluation; empty without any."""
    evals = [record for record in folder.read_metrics() if record["kind"] == "eval"]
    headline = Headline.of(evals)
    rows = []
    for record in evals:
        value = headline.value(record)
        if value is None:
            continue
        interval = ""
        bounds = headline.bounds(record)
        if bounds is not None:
            low, high = bounds
            interval = f"{low:.3f} to {high:.3f}"
        rows.append(f"| {record['step']} | {value:.3f} | {interval} |")
    if not rows:
        return ""
    head = f"| step | {headline.title} | 95 % interval |\n|---|---|---|\n"
    return head + "\n".join(rows)


def _without_places(value: object) -> Any:
    """Absolute paths as their last name, and addresses without user and password."""
    if isinstance(value, Mapping):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    if isinstance(value, str):
        return re.sub(r"//[^/@\s]*@", "//", value)
    return value
