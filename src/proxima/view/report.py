"""report.html: a run in one file that needs no network and can be sent by e-mail.

It needs only the run folder, even of an unfinished run. The result is HTML; the viewer's own script draws the curves,
from the answers that its server would give. Text from a model or a data set is escaped by jinja.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from proxima.core.correction.health import range_of, verdicts
from proxima.evaluation.headline import Headline
from proxima.evaluation.held_out import named_sets
from proxima.experiments.run_reader import Run, flat, read_run
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.watch.observer import Record
from proxima.system.atomic_files import write_atomic
from proxima.system.damage import reading
from proxima.view.formatting import (
    NONE,
    count,
    duration,
    fixed,
    gibibytes,
    magnitude,
    percent,
    rate,
    signed,
    significant,
)
from proxima.view.log_lines import of_questions, sets_table, why_unknown
from proxima.view.microscope import PORT
from proxima.view.microscope.trend import guard_of, last_stages, metric_meanings, trend_of, weight_bounds_of
from proxima.view.page import render
from proxima.view.report_samples import SAMPLED_STEPS, cut, held_out_questions, select_samples


def write_report(path: Path | str) -> Path:
    """Write `report.html` of a run folder and return its path.

    Raises: UserError if `path` is not a run, or a file in it is damaged; OSError if the disk is full (an earlier report
        stays intact).
    """
    run = read_run(path, empty=True)
    with reading(f"a file of {run.folder}", "proxima check tells which one is damaged"):
        page = render("report", **report_values(run))
    write_atomic(run.files.report, page)
    return run.files.report


def report_values(run: Run) -> dict[str, Any]:
    """Return everything that the page shows."""
    counted: Run = run
    invalid: dict[str, Any] | None = None
    if run.status == "failed" or any(r.get("reward/invalid") or r.get("invalid") for r in (*run.train, *run.evals)):
        counted = with_given_up(run)
        invalid = failed_scores(run)
    sets = list[dict[str, str]]()
    if any(map(named_sets, run.evals)):
        sets = sets_table(run.evals)
    samples, unreadable = select_samples(run.files)
    return {
        "run": run,
        "algorithm": run.summary.get("algorithm") or run.config.get("algorithm.surrogate.kind") or "run",
        "folder": run.folder.resolve().name,
        "place": run.folder.name if run.folder.is_absolute() else run.folder,  # a reader elsewhere has no such path
        "viewer": f"http://127.0.0.1:{PORT}/#/0",
        "model": Path(str(run.summary.get("model") or run.config.get("model.path") or "unknown model")).name,
        "replay": run.summary.get("replay") or {"run": run.config.get("rollouts"), "sha256": None},
        "invalid": invalid,
        "warnings": run.summary.get("warnings") or (),
        "when_warned": partial(when_warned, steps=int(run.summary.get("steps") or 0)),
        "headline": headline(run.evals),
        "sets": sets,
        "training": training_figure(run.train),
        "not_evaluated": not_evaluated(run),
        "tiles": tiles(counted),
        "has_records": bool(run.train or run.evals),
        "questions": held_out_questions(run.files),
        "syncs": sync_rows(run),
        "discarded": discarded(counted),
        "ideal": ideal_ranges(run),
        "config": config_lines(run.files),
        "environment": [
            (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
            for name, value in flat(run.environment)
        ],
        "unreadable": unreadable,
        "samples": samples,
        "answers": viewer_answers(run),
    }


def viewer_answers(run: Run) -> dict[str, Any]:
    """Return what the viewer's server answers about the run's curves, by path."""
    algorithm = run.recipe.get("algorithm")
    trend = trend_of(run.files.read_metrics(), algorithm if isinstance(algorithm, dict) else {})
    return {
        "runs": [],
        "0/trend": trend | {"rollout_steps": trend["steps"]},
        "0/timeline": last_stages(run.files.timeline),
    }


def headline(evals: Sequence[Record]) -> dict[str, Any] | None:
    """Return the held-out figure at the first and the last evaluation with its 95 % interval, or why it is unknown."""
    figure = Headline.of(evals)
    shown = [*evals[:1], *evals[1:][-1:]]
    values = [figure.value(record) for record in shown]
    if not any(figure.value(record) is not None for record in evals):
        return None
    spans = [figure.bounds(r) or (v, v) for r, v in zip(shown, values, strict=True) if v is not None]
    low, high = (0.0, 1.0) if figure.share else padded([bound for span in spans for bound in span])

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    def side(record: Record, value: float | None) -> dict[str, Any]:
        if record["step"] == 0:
            when = "before the first step"
        else:
            when = f"after step {record['step']}"
        if value is None:
            return {"value": NONE, "unknown": f"unknown: {why_unknown(record)}", "when": when}
        least, most = figure.bounds(record) or (value, value)
        of = of_questions(record, figure)
        return {
            "value": fixed(value, 3),
            "unknown": "",
            "when": f"{'right ' if '/' in of else ''}{when}",  # only if it is a share of a count
            "interval": f"{fixed(least, 3)} to {fixed(most, 3)}" if figure.bounds(record) else "",
            "of": of,
            "left": place(least),
            "width": round(place(most) - place(least), 2),
            "at": place(value),
        }

    sides = [side(record, value) for record, value in zip(shown, values, strict=True)]
    gain = None
    if len(values) > 1 and values[0] is not None and values[1] is not None:
        gain = values[1] - values[0]
    return {
        "title": figure.title,
        "sides": sides,
        "gain": None if gain is None else signed(gain),
        "better": gain is not None and round(-gain if figure.lower_is_better else gain, 3) > 0,
        "only_before": len(evals) == 1 and evals[0]["step"] == 0,
        "ends": (fixed(low, 0 if figure.share else 3), fixed(high, 0 if figure.share else 3)),
    }


def training_figure(train: Sequence[Record]) -> dict[str, str] | None:
    """Return the mean reward of the first and the last step, their divergence from the teacher, or their loss on a
    fixed data set."""
    if not train:
        return None
    name, key = ("Loss", "loss") if "examples" in train[0] else ("Mean reward", "reward/mean")
    if "distillation/divergence" in train[0]:
        name, key = "Divergence from the teacher", "distillation/divergence"
    return {"name": name, "first": fixed(train[0].get(key)), "last": fixed(train[-1].get(key))}


def padded(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis that shows the values, with a margin of a tenth of their range on both sides."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def not_evaluated(run: Run) -> str:
    """Explain why the run has no held-out figure, with a remedy."""
    if run.evals:
        return f"The held-out evaluations have no score: {why_unknown(run.evals[-1])}."
    if run.config.get("eval.task.kind"):
        return "The run has no held-out evaluation yet, or ended before its first one."
    return "There was no held-out evaluation: set eval.task to measure on questions that are not trained on."


def total(records: Sequence[Record], key: str) -> float:
    return sum(record.get(key) or 0 for record in records)


def when_warned(warning: Record, steps: int) -> str:
    """`at step 3, not since`, `at steps 2 to 9 (4 times), still at the last step`."""
    first, last, times = warning["step"], warning["last"], warning["times"]
    if not first and not last:
        return "before the first step"
    if first == last:
        span = f"at step {last}"
    else:
        span = f"at steps {first} to {last}"
    if first and first != last and times != last - first + 1:
        often = f" ({count(times)} times)"
    else:
        often = ""
    return f"{span}{often}, {'still at the last step' if last >= steps else 'not since'}"


def tiles(run: Run) -> list[tuple[str, str]]:
    """Summarise the run in a few numbers."""
    train, speed = run.train, run.tokens_per_second
    seconds = run.summary.get("seconds") or (train[-1]["time"] if train else None)
    memory = run.summary.get("peak_memory_bytes")
    names = ("allocated", "reserved", "planned")
    allocated, reserved, planned = (largest(run, f"device/memory_{name}") for name in names)
    if planned:
        of_plan = f", {gibibytes(planned)} planned"
    else:
        of_plan = ""
    texts = {
        "duration": duration(seconds),
        "per step": duration(typical(run, "time/step")),
        "generate": rate(speed["generate"]),
        "train": rate(speed["train"]),
        "completions": count(total(train, "completions")),
        "examples": count(total(train, "examples")),
        "epochs": fixed(train[-1].get("epoch") if train else None, 3),
        "per device": rate(typical(run, "tokens_per_second/device")),
        "of the product rate": percent(typical(run, "device/mfu")),
        "peak memory": gibibytes(memory) if memory else NONE,
        "GPU memory": f"{gibibytes(allocated)}, {gibibytes(reserved)} reserved{of_plan}",
        "tokens generated": magnitude(total(train, "tokens/generated")),
        "tokens trained": magnitude(total(train, "tokens/trained")),
    }
    generated = ("generate", "completions", "tokens generated")
    examples = ("examples", "epochs")
    hidden = {*(generated if any("examples" in record for record in train) else examples)}
    keys = {"per device": "tokens_per_second/device", "of the product rate": "device/mfu"}
    keys["GPU memory"] = "device/memory_allocated"
    hidden |= {name for name, key in keys.items() if not run.curve(key)}
    return [(name, text) for name, text in texts.items() if name not in hidden]


def typical(run: Run, key: str) -> float | None:
    """Return the median of a metric over the steps that have it; None if none has."""
    values = [value for _, value in run.curve(key)]
    return statistics.median(values) if values else None


def largest(run: Run, key: str) -> float | None:
    """Return the largest value of a metric; None if no step has it."""
    return max((value for _, value in run.curve(key)), default=None)


def sync_rows(run: Run) -> list[dict[str, str]]:
    """Return each measurement of the weight syncs: seconds as times, everything else as it is."""
    names = {key for record in run.train for key in record if key.startswith("sync/")}
    rows = []
    for name, (_, meaning) in metric_meanings(names).items():
        write = duration if name.endswith("seconds") else significant
        row = {"name": name.removeprefix("sync/"), "meaning": meaning}
        rows.append({**row, "median": write(typical(run, name)), "largest": write(largest(run, name))})
    return rows


def discarded(run: Run) -> list[dict[str, str]]:
    """Count the completions of the whole run that were not trained on, by reason."""
    metrics = [p for p in run.config if p.startswith("algorithm.selection.") and p.endswith(".metric")]
    same = [f"all completions of the group have the same {run.config[path]} ({path})" for path in metrics]
    meaning = dict(zip(["dropped/uniform_group"], same, strict=False))
    completions = total(run.train, "completions")
    reasons = {"reward/invalid": ("invalid", "a reward failed or timed out; left out of all means")}
    for key in sorted({k for r in run.train for k in r if k.startswith("dropped/")} - {"dropped/invalid"}):
        reasons[key] = (f"dropped: {key.partition('/')[2]}", meaning.get(key, "dropped by a selection"))
    reasons["skipped_zero_advantage"] = ("advantage 0", "no effect on the update: forward and backward were skipped")
    return [
        {
            "name": name,
            "count": count(number),
            "share": percent(number / completions if completions else None),
            "meaning": meaning,
        }
        for key, (name, meaning) in reasons.items()
        if (number := total(run.train, key))
    ]


def ideal_ranges(run: Run) -> list[dict[str, str]]:
    """Return each number of the last steps that has an ideal range, with its verdict and how often it was not
    healthy."""
    algorithm = run.recipe.get("algorithm")
    guard = guard_of(algorithm)
    bounds = weight_bounds_of(algorithm)
    judged = [(record, verdicts(record, guard, bounds)) for record in run.train]
    last = {name: (record[name], verdict) for record, of_step in judged for name, verdict in of_step.items()}
    rows = []
    for name, (_, meaning) in metric_meanings(last).items():
        words = [of_step[name] for _, of_step in judged if name in of_step]
        value, verdict = last[name]
        rows.append({"name": name, "value": significant(value), "verdict": verdict, "meaning": meaning})
        metric_range = range_of(name, guard, bounds)
        rows[-1]["ideal"] = "" if metric_range is None else metric_range.words()["healthy"]
        rows[-1] |= {word: f"{words.count(word)}" for word in ("watch", "broken")} | {"of": f"{len(words)}"}
    return rows


def config_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Split the lines of config.yaml into (setting, source): the comment at the end of a line is the source."""
    if not folder.config.exists():
        return []
    lines = []
    for line in folder.config.read_text(encoding="utf-8", errors="replace").splitlines():
        setting, mark, source = line.rpartition("  # ")
        lines.append((setting.rstrip(), source) if mark else (line, ""))
    return lines


MANY = 0.1  # share of failed scores from which a banner reports them


def with_given_up(run: Run) -> Run:
    """Add what the step that a failed run gave up before its update generated and discarded, under the names of
    metrics.jsonl, to the training records; the run itself without such a step."""
    path = run.files.rollout_file(run.steps + 1)
    try:
        if run.status == "failed" and path.is_file():
            rows = read_rows(path, ["outcome", "tokens"])
        else:
            rows = []
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
