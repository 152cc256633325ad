"""The step that a failed run gave up before an update: it wrote its completions, but no record of metrics.jsonl."""

from collections import Counter

from proxima.lab.run_reader import Run
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.watch.observer import Record


def given_up(run: Run) -> tuple[Record, ...]:
    """What such a step generated and discarded, under the names of metrics.jsonl; empty without such a step."""
    step = run.steps + 1
    path = run.files.rollout_file(step)
    if run.status != "failed" or not path.is_file():
        return ()
    try:
        rows = read_rows(path, ["outcome", "tokens"])
    except (OSError, ValueError):  # the report names damaged files elsewhere
        return ()
    reasons = Counter(row["outcome"].removeprefix("dropped_") for row in rows if row["outcome"] != "trained")
    counts = {f"dropped/{reason}": count for reason, count in reasons.items() if reason != "invalid"}
    tokens = sum(len(row["tokens"]) for row in rows)
    totals = {"completions": len(rows), "tokens/generated": tokens, "reward/invalid": reasons["invalid"]}
    return ({"step": step, **totals, **counts},)
