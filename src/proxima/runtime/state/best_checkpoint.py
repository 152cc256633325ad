"""Find the best checkpoint of a run by its evaluations."""

from collections.abc import Sequence

from proxima.evaluate.headline import Headline
from proxima.runtime.state.folder import RunFolder
from proxima.train.checkpoint import Checkpoint


def best_checkpoint(folder: RunFolder, saved: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the best held-out figure (`Headline`), the earliest of equals; None if none was evaluated."""
    scores = headlines(folder)
    return max((c for c in saved if c.step in scores), key=lambda c: (scores[c.step], -c.step), default=None)


def headlines(folder: RunFolder) -> dict[int, float]:
    """Step → headline of its evaluation, so that higher is better."""
    evals = [r for r in folder.read_metrics() if r["kind"] == "eval"]
    headline = Headline.of(evals)
    return {r["step"]: value for r in evals if (value := headline.score(r)) is not None}
