"""Find the best checkpoint of a run by its evaluations, and delete those that are not to be kept."""

from collections.abc import Sequence

from proxima.config.sections.eval_section import CheckpointConfig
from proxima.evaluation.headline import Headline
from proxima.runtime.state.folder import RunFolder
from proxima.training.checkpoint import Checkpoint, checkpoints, prune


def best_checkpoint(folder: RunFolder, saved: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the best held-out figure (`Headline`), the earliest of equals; None if none was evaluated."""
    scores = headlines(folder)
    return max((c for c in saved if c.step in scores), key=lambda c: (scores[c.step], -c.step), default=None)


def prune_checkpoints(folder: RunFolder, kept: CheckpointConfig, *, leftovers: bool = True) -> None:
    """Delete all but the last checkpoints, and the one that is best on held-out questions if it is to be kept;
    `leftovers` as in `prune`."""
    best = best_checkpoint(folder, checkpoints(folder.checkpoints)) if kept.keep_best else None
    prune(folder.checkpoints, kept.keep_last, keep=[] if best is None else [best.step], leftovers=leftovers)


def headlines(folder: RunFolder) -> dict[int, float]:
    """Step → headline of its evaluation, so that higher is better."""
    evals = [r for r in folder.read_metrics() if r["kind"] == "eval"]
    headline = Headline.of(evals)
    return {r["step"]: value for r in evals if (value := headline.score(r)) is not None}
