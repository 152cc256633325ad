"""What failed, for report.html: scores, and the step that a failed run gave up."""

from collections import Counter
from dataclasses import replace
from typing import Any

from proxima.experiments.run_reader import Run
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.view.formatting import count, percent
from proxima.view.report_samples import SAMPLED_STEPS, cut

MANY = 0.1  # share of failed scores from which a banner reports them


def with_given_up(run: Run) -> Run:
    """Add what the step that a failed run gave up before its update generated and discarded, under the names of
    metrics.jsonl, to the training records; the run itself without such a step."""
    path = run.files.rollout_file(run.steps + 1)
    try:
        rows = read_rows(path, ["outcome", "tokens"]) if run.status == "failed" and path.is_file() else []
    except (OSError, ValueError):  # the report names damaged files elsewhere
        return run
    if not rows:
        return run
    reasons = Counter(row["outcome"].removeprefix("dropped_") for row in rows if row["outcome"] != "trained")
    counts = {f"dropped/{reason}": number for reason, number in reasons.items() if reason != "invalid"}
    tokens = sum(len(row["tokens"]) for row in rows)
    totals = {"completions": len(rows), "tokens/generated": tokens, "reward/invalid": reasons["invalid"]}
    return replace(run, train=(*run.train, {"step": run.steps + 1, **totals, **counts}))


def failed_scores(run: Run) -> dict[str, Any] | None:
    """Return the shares of failed scores and their most common reasons, for a banner; None if they are few."""
    shares = []
    for name, records, keys in (
        ("completions", run.train, ("completions", "reward/invalid")),
        ("held-out answers", run.evals, ("answers", "invalid")),
    ):
        scores, failed = (sum(record.get(key) or 0 for record in records) for key in keys)
        if scores and failed / scores >= MANY:
            shares.append(f"{count(failed)} of {count(scores)} {name} ({percent(failed / scores)})")
    if not shares:
        return None
    return {"share": " and ".join(shares), "reasons": [f"{text} ({count(n)} ×)" for text, n in first_errors(run.files)]}


def first_errors(folder: RunFolder, most: int = 3) -> list[tuple[str, int]]:
    """Return the most common reasons of failed scores, with counts, in the latest readable rollouts that have any."""
    for file in sorted(folder.rollouts.glob("[0-9]*.parquet"), reverse=True)[:SAMPLED_STEPS]:
        try:
            reasons = Counter(cut(row["error"])[:200] for row in read_rows(file, ("error",)) if row["error"])
        except ValueError:
            continue
        if reasons:
            return reasons.most_common(most)
    return []
