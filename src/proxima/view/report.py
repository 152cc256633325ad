"""report.html: a run in one file that needs no network and can be sent by e-mail.

It needs only the run folder, even of an unfinished run. The result is HTML; the viewer's own script draws the curves,
from the answers that its server would give. Text from a model or a data set is escaped by jinja.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
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
    place = run.folder
    if place.is_absolute():  # a reader elsewhere has no such path
        place = Path(place.name)
    return {
        "run": run,
        "algorithm": run.summary.get("algorithm") or run.config.get("algorithm.surrogate.kind") or "run",
        "folder": run.folder.resolve().name,
        "place": place,
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
        "environment": [(name, environment_text(value)) for name, value in flat(run.environment)],
        "unreadable": unreadable,
        "samples": samples,
        "answers": viewer_answers(run),
    }


def environment_text(value: object) -> str:
    """A value of `environment.json`; the items of a list are separated by commas."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def viewer_answers(run: Run) -> dict[str, Any]:
    """Return what the viewer's server answers about the run's curves, by path."""
    algorithm = run.recipe.get("algorithm")
    if not isinstance(algorithm, dict):
        algorithm = {}
    trend = trend_of(run.files.read_metrics(), algorithm)
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
    bounds: list[float] = []
    for record, value in zip(shown, values, strict=True):
        if value is not None:
            bounds += figure.bounds(record) or (value,)
    low, high = (0.0, 1.0) if figure.share else padded(bounds)

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    def side(record: Record, value: float | None) -> dict[str, Any]:
        when = "before the first step" if record["step"] == 0 else f"after step {record['step']}"
        if value is None:
            return {"value": NONE, "unknown": f"unknown: {why_unknown(record)}", "when": when}
        of = of_questions(record, figure)
        if "/" in of:  # a share of a count
            when = f"right {when}"
        interval = ""
        least = value
        most = value
        span = figure.bounds(record)
        if span:
            least, most = span
            interval = f"{fixed(least, 3)} to {fixed(most, 3)}"
        return {
            "value": fixed(value, 3),
            "unknown": "",
            "when": when,
            "interval": interval,
            "of": of,
            "left": place(least),
            "width": round(place(most) - place(least), 2),
            "at": place(value),
        }

    sides = [side(record, value) for record, value in zip(shown, values, strict=True)]
    gain = None
    better = False
    if len(values) > 1 and values[0] is not None and values[1] is not None:
        difference = values[1] - values[0]
        gain = signed(difference)
        improvement = -difference if figure.lower_is_better else difference
        better = round(improvement, 3) > 0
    places = 0 if figure.share else 3
    return {
        "title": figure.title,
        "sides": sides,
        "gain": gain,
        "better": better,
        "only_before": len(evals) == 1 and evals[0]["step"] == 0,
        "ends": (fixed(low, places), fixed(high, places)),
    }


def training_figure(train: Sequence[Record]) -> dict[str, str] | None:
    """Return the mean reward of the first and the last step, their divergence from the teacher, or their loss on a
    fixed data set."""
    if not train:
        return None
    if "distillation/divergence" in train[0]:
        name = "Divergence from the teacher"
        key = "distillation/divergence"
    elif "examples" in train[0]:
        name = "Loss"
        key = "loss"
    else:
        name = "Mean reward"
        key = "reward/mean"
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
    first = warning["step"]
    last = warning["last"]
    if not first and not last:
        return "before the first step"
    span = f"at step {last}"
    if first != last:
        span = f"at steps {first} to {last}"
        if first and warning["times"] != last - first + 1:
            span += f" ({count(warning['times'])} times)"
    until = "still at the last step" if last >= steps else "not since"
    return f"{span}, {until}"


def tiles(run: Run) -> list[tuple[str, str]]:
    """Summarise the run in a few numbers."""
    train = run.train
    speed = run.tokens_per_second
    last: Record = train[-1] if train else {}
    seconds = run.summary.get("seconds") or last.get("time")
    peak = run.summary.get("peak_memory_bytes") or None
    allocated = gibibytes(largest(run, "device/memory_allocated"))
    reserved = gibibytes(largest(run, "device/memory_reserved"))
    gpu_memory = f"{allocated}, {reserved} reserved"
    planned = largest(run, "device/memory_planned")
    if planned:
        gpu_memory += f", {gibibytes(planned)} planned"
    texts = {
        "duration": duration(seconds),
        "per step": duration(typical(run, "time/step")),
        "generate": rate(speed["generate"]),
        "train": rate(speed["train"]),
        "completions": count(total(train, "completions")),
        "examples": count(total(train, "examples")),
        "epochs": fixed(last.get("epoch"), 3),
        "per device": rate(typical(run, "tokens_per_second/device")),
        "of the product rate": percent(typical(run, "device/mfu")),
        "peak memory": gibibytes(peak),
        "GPU memory": gpu_memory,
        "tokens generated": magnitude(total(train, "tokens/generated")),
        "tokens trained": magnitude(total(train, "tokens/trained")),
    }
    hidden = {"examples", "epochs"}
    if any("examples" in record for record in train):
        hidden = {"generate", "completions", "tokens generated"}
    keys = {
        "per device": "tokens_per_second/device",
        "of the product rate": "device/mfu",
        "GPU memory": "device/memory_allocated",
    }
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
    names = {key for key in recorded_metrics(run) if key.startswith("sync/")}
    rows = []
    for name, (_, meaning) in metric_meanings(names).items():
        write = duration if name.endswith("seconds") else significant
        row = {
            "name": name.removeprefix("sync/"),
            "meaning": meaning,
            "median": write(typical(run, name)),
            "largest": write(largest(run, name)),
        }
        rows.append(row)
    return rows


def recorded_metrics(run: Run) -> set[str]:
    """The names of all metrics of the steps."""
    return set(chain.from_iterable(run.train))


def discarded(run: Run) -> list[dict[str, str]]:
    """Count the completions of the whole run that were not trained on, by reason."""
    meanings: dict[str, str] = {}
    for path, metric in run.config.items():
        if path.startswith("algorithm.selection.") and path.endswith(".metric"):
            same = f"all completions of the group have the same {metric} ({path})"
            meanings.setdefault("dropped/uniform_group", same)
    reasons = {"reward/invalid": ("invalid", "a reward failed or timed out; left out of all means")}
    dropped = {key for key in recorded_metrics(run) if key.startswith("dropped/")}
    for key in sorted(dropped - {"dropped/invalid"}):
        name = f"dropped: {key.removeprefix('dropped/')}"
        reasons[key] = (name, meanings.get(key, "dropped by a selection"))
    reasons["skipped_zero_advantage"] = ("advantage 0", "no effect on the update: forward and backward were skipped")

    completions = total(run.train, "completions")
    rows = []
    for key, (name, meaning) in reasons.items():
        number = total(run.train, key)
        if number:
            share = number / completions if completions else None
            rows.append({"name": name, "count": count(number), "share": percent(share), "meaning": meaning})
    return rows


def ideal_ranges(run: Run) -> list[dict[str, str]]:
    """Return each number of the last steps that has an ideal range, with its verdict and how often it was not
    healthy."""
    algorithm = run.recipe.get("algorithm")
    guard = guard_of(algorithm)
    bounds = weight_bounds_of(algorithm)
    values: dict[str, list[float]] = {}  # by name
    words: dict[str, list[str]] = {}
    for record in run.train:
        for name, verdict in verdicts(record, guard, bounds).items():
            values.setdefault(name, []).append(record[name])
            words.setdefault(name, []).append(verdict)
    rows = []
    for name, (_, meaning) in metric_meanings(values).items():
        metric_range = range_of(name, guard, bounds)
        row = {
            "name": name,
            "value": significant(values[name][-1]),
            "verdict": words[name][-1],
            "meaning": meaning,
            "ideal": "" if metric_range is None else metric_range.words()["healthy"],
            "watch": str(words[name].count("watch")),
            "broken": str(words[name].count("broken")),
            "of": str(len(words[name])),
        }
        rows.append(row)
    return rows


def config_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Split the lines of config.yaml into (setting, source): the comment at the end of a line is the source."""
    if not folder.config.exists():
        return []
    lines = []
    for line in folder.config.read_text(encoding="utf-8", errors="replace").splitlines():
        setting, mark, source = line.rpartition("  # ")
        if mark:
            lines.append((setting.rstrip(), source))
        else:
            lines.append((line, ""))
    return lines


MANY = 0.1  # share of failed scores from which a banner reports them


def with_given_up(run: Run) -> Run:
    """Add what the step that a failed run gave up before its update generated and discarded, under the names of
    metrics.jsonl, to the training records; the run itself without such a step."""
    if run.status != "failed":
        return run
    path = run.files.rollout_file(run.steps + 1)
    rows = []
    try:
        if path.is_file():
            rows = read_rows(path, ["outcome", "tokens"])
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
    for name, scores, failed in (
        ("completions", total(run.train, "completions"), total(run.train, "reward/invalid")),
        ("held-out answers", total(run.evals, "answers"), total(run.evals, "invalid")),
    ):
        if scores and failed / scores >= MANY:
            shares.append(f"{count(failed)} of {count(scores)} {name} ({percent(failed / scores)})")
    if not shares:
        return None
    reasons = [f"{text} ({count(number)} ×)" for text, number in first_errors(run.files)]
    return {"share": " and ".join(shares), "reasons": reasons}


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
