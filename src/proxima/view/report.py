"""report.html: a run in one file that needs no network and can be mailed.

It is made from the run folder alone, even of an unfinished run. Text of a model or a data set reaches the page through
jinja's escaping, or through JSON and `textContent`, never as markup.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from proxima.config.step_size import at_once, pruned
from proxima.core.selection import Prune
from proxima.data.atomic_files import write_atomic
from proxima.data.jsonl import dumps
from proxima.evaluate.headline import Headline
from proxima.lab.run_reader import existing_run, flat, read_config, read_mapping
from proxima.rollout.dynamic_sampling import DynamicSampling
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.watch.observer import Record, RunInfo
from proxima.view.chart import svg_text, variable
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, percent, rate, signed
from proxima.view.held_out_sets import sets_table
from proxima.view.log_lines import arithmetic, of_questions, why_unknown
from proxima.view.page import render
from proxima.view.report_curves import LARGE, all_charts, waiting_cards
from proxima.view.report_samples import first_errors, held_out_questions, select_samples
from proxima.view.timeline_plot import TimelineFigure

MANY = 0.1  # share of failed scores from which a banner reports them


def write_report(path: Path | str) -> Path:
    """Write `report.html` of a run folder and return its path.

    Raises: UserError if `path` is not a run, or a file in it is damaged; OSError if the disk is full (an earlier report
        stays intact).
    """
    folder = existing_run(path)
    write_atomic(folder.report, render("report", styles=("report.css",), **report_values(folder)))
    return folder.report


def report_values(folder: RunFolder) -> dict[str, Any]:
    """Everything that the page shows, with every number formatted."""
    records = folder.read_metrics()
    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    summary, config = read_mapping(folder.summary), read_config(folder.config)
    settings = dict(flat(config))
    charts, waiting = all_charts(train, evals), waiting_cards(train)
    for number, chart in enumerate((*charts, *waiting)):
        chart["number"] = number
    steps, samples, unreadable = select_samples(folder)
    return {
        "title": title(summary, settings, folder),
        "status": status(summary, train, settings),
        "replay": replay(summary, settings),
        "invalid": failed_scores(train, evals, folder),
        "warnings": told_warnings(summary),
        "headline": headline(evals),
        "sets": sets_table(evals),
        "training": training_figure(train),
        "not_evaluated": not_evaluated(evals, settings),
        "tiles": tiles(summary, train),
        "arithmetic": batch_arithmetic(config, folder),
        "charts": [("Curves", charts[:LARGE], charts[LARGE:]), ("Where the time goes", [], waiting)],
        "timeline": last_steps(folder),
        "questions": held_out_questions(folder),
        "discarded": discarded(train),
        "config": config_lines(folder),
        "environment": [
            (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
            for name, value in flat(read_mapping(folder.environment))
        ],
        "unreadable": unreadable,
        "sample_steps": steps,
        "data": script_json(
            {
                "steps": [r["step"] for r in train],
                "charts": [c["values"] for c in (*charts, *waiting)],
                "samples": samples,
            }
        ),
    }


def headline(evals: Sequence[Record]) -> dict[str, Any] | None:
    """The held-out figure at the first and the last evaluation with its 95 % interval, or why it is unknown."""
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
        when = "before the first step" if record["step"] == 0 else f"after step {record['step']}"
        if value is None:
            return {"value": NONE, "unknown": f"unknown: {why_unknown(record)}", "when": when}
        least, most = figure.bounds(record) or (value, value)
        of = of_questions(record, figure)
        return {
            "value": fixed(value, 3),
            "unknown": "",
            "when": f"{'right ' if '/' in of else ''}{when}",  # of a share that is a count
            "interval": f"{fixed(least, 3)} to {fixed(most, 3)}" if figure.bounds(record) else "",
            "of": of,
            "left": place(least),
            "width": round(place(most) - place(least), 2),
            "at": place(value),
        }

    sides = [side(record, value) for record, value in zip(shown, values, strict=True)]
    gain = values[1] - values[0] if len(values) > 1 and values[0] is not None and values[1] is not None else None
    return {
        "title": figure.title,
        "sides": sides,
        "gain": None if gain is None else signed(gain),
        "better": gain is not None and round(-gain if figure.lower_is_better else gain, 3) > 0,
        "only_before": len(evals) == 1 and evals[0]["step"] == 0,
        "ends": (fixed(low, 0 if figure.share else 3), fixed(high, 0 if figure.share else 3)),
    }


def training_figure(train: Sequence[Record]) -> dict[str, str] | None:
    """The mean reward of the first and of the last step, or their loss on a fixed data set."""
    if not train:
        return None
    name, key = ("Loss", "loss") if "examples" in train[0] else ("Mean reward", "reward/mean")
    return {"name": name, "first": fixed(train[0].get(key)), "last": fixed(train[-1].get(key))}


def padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis that shows the values, with a tenth of it to spare on both sides."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def last_steps(folder: RunFolder) -> dict[str, Any] | None:
    """The last steps of timeline.json; None if it has none."""
    figure = TimelineFigure.of(folder.timeline, folder.path.resolve().name) if folder.timeline.is_file() else None
    if figure is None:
        return None
    with figure.plotted(variable) as drawn:
        label = f'class="chart" aria-label="{escape(figure.title)}"'
        return {"title": f"Steps {figure.steps[0][0]} to {figure.steps[-1][0]}", "svg": Markup(svg_text(drawn, label))}


def not_evaluated(evals: Sequence[Record], settings: Mapping[str, Any]) -> str:
    """Why the run has no held-out figure, and what to do about it."""
    if evals:
        return f"The held-out evaluations have no score: {why_unknown(evals[-1])}."
    if settings.get("eval.task.kind"):
        return "The run ended, or is, before its first held-out evaluation."
    return "There was no held-out evaluation: set eval.task to measure on questions that are not trained on."


def failed_scores(train: Sequence[Record], evals: Sequence[Record], folder: RunFolder) -> dict[str, Any] | None:
    """The shares of failed scores and their commonest reasons, for a banner; None if they are few."""
    shares = []
    for records, total_key, failed_key, name in (
        (train, "completions", "reward/invalid", "completions"),
        (evals, "answers", "invalid", "held-out answers"),
    ):
        total, lost = (sum(r.get(key) or 0 for r in records) for key in (total_key, failed_key))
        if total and lost / total >= MANY:
            shares.append(f"{count(lost)} of {count(total)} {name} ({percent(lost / total)})")
    if not shares:
        return None
    return {"share": " and ".join(shares), "reasons": [f"{text} ({count(n)} ×)" for text, n in first_errors(folder)]}


def told_warnings(summary: Record) -> list[dict[str, str]]:
    """The warnings of the run, each with the steps of the first and the last time, and whether it persists."""
    return [
        {"text": told["text"], "when": when_warned(told, int(summary.get("steps") or 0))}
        for told in summary.get("warnings") or ()
    ]


def when_warned(told: Record, steps: int) -> str:
    """`at step 3, not since`, `at steps 2 to 9 (4 times), still at the last step`."""
    first, last, times = told["step"], told.get("last"), told["times"]  # earlier versions recorded no last step
    if not first and not last:
        return "before the first step"
    if last is None:
        return f"first at step {first}, {count(times)} time{'s' * (times != 1)}"
    span = f"at step {last}" if first == last else f"at steps {first} to {last}"
    often = f" ({count(times)} times)" if first and first != last and times != last - first + 1 else ""
    return f"{span}{often}, {'still at the last step' if last >= steps else 'not since'}"


def title(summary: Record, settings: Mapping[str, Any], folder: RunFolder) -> dict[str, str]:
    """Names of algorithm, model and run."""
    model = summary.get("model") or settings.get("model.path") or "unknown model"
    return {
        "algorithm": str(summary.get("algorithm") or settings.get("algorithm.surrogate.kind") or "run"),
        "model": Path(str(model)).name,
        "seed": str(summary.get("seed", settings.get("seed", NONE))),
        "folder": folder.path.resolve().name,
    }


def status(summary: Record, train: Sequence[Record], settings: Mapping[str, Any]) -> dict[str, str]:
    """How the run ended; without a summary it is still running, or was killed."""
    steps, planned = train[-1]["step"] if train else 0, settings.get("train.steps")
    return {
        "state": str(summary.get("status", "unfinished")),
        "steps": f"{count(steps)} of {count(planned)}" if planned else count(steps),
        "error": str(summary.get("error") or ""),
        "plateau": str(summary.get("plateau") or ""),
    }


def replay(summary: Record, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """The run whose rollouts were trained on, and their SHA-256, which an unfinished run lacks; None: no replay."""
    known = summary.get("replay") or {"run": settings.get("rollouts"), "sha256": None}
    return {"run": str(known["run"]), "sha256": str(known["sha256"] or "")} if known["run"] else None


def tiles(summary: Record, train: Sequence[Record]) -> list[tuple[str, str]]:
    """The run in a few numbers."""
    seconds = summary.get("seconds") or (train[-1]["time"] if train else None)
    speed = summary.get("tokens_per_second") or {}
    times = [float(r["time/step"]) for r in train if r.get("time/step") is not None]

    def mean_speed(name: str, tokens: str) -> float | None:
        total, time = sum(r.get(f"tokens/{tokens}") or 0 for r in train), sum(r.get(f"time/{name}") or 0 for r in train)
        return speed.get(name) or (total / time if time else None)

    first = [("duration", duration(seconds)), ("per step", duration(statistics.median(times) if times else None))]
    memory = summary.get("peak_memory_bytes")
    peak = ("peak memory", f"{fixed(memory / 2**30, 1)} GiB" if memory else NONE)
    trained = ("tokens trained", magnitude(sum(r.get("tokens/trained") or 0 for r in train)))
    if any("examples" in r for r in train):
        examples = ("examples", count(sum(r.get("examples") or 0 for r in train)))
        epochs = ("epochs", fixed(train[-1].get("epoch"), 3))
        return [*first, ("train", rate(mean_speed("train", "trained"))), examples, epochs, peak, trained]
    return [
        *first,
        ("generate", rate(mean_speed("generate", "generated"))),
        ("train", rate(mean_speed("train", "trained"))),
        ("completions", count(sum(r.get("completions") or 0 for r in train))),
        peak,
        ("tokens generated", magnitude(sum(r.get("tokens/generated") or 0 for r in train))),
        trained,
    ]


def batch_arithmetic(config: Mapping[str, Any], folder: RunFolder) -> str | None:
    """The line that `log_lines.arithmetic` gave at the start, from config.yaml; None if that is missing or damaged."""
    try:
        train, algorithm = config["train"], config.get("algorithm") or {}
        if "examples_per_step" in train:
            examples, budget = train["examples_per_step"], train["tokens_per_micro_batch"]
            return arithmetic(_batch_info(folder, examples=examples, tokens_per_micro_batch=budget))
        specs = [dict(spec) for spec in algorithm.get("selection") or ()]
        prunes = [Prune(**spec) for spec in specs if spec.pop("kind", None) == "prune"]
        refill = algorithm.get("dynamic_sampling")
        prompts, kept = pruned(train["prompts_per_step"], train["completions_per_prompt"], prunes)
        info = _batch_info(
            folder,
            prompts=prompts,
            completions=train["completions_per_prompt"],
            kept=kept,
            at_once=at_once(prompts, DynamicSampling(**refill) if refill else None),
            updates=train["updates_per_step"] * train["epochs_per_step"],
            tokens_per_micro_batch=train["tokens_per_micro_batch"],
        )
        return arithmetic(info)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _batch_info(folder: RunFolder, **batch: Any) -> RunInfo:
    return RunInfo(version="", algorithm="", model="", seed=0, folder=folder.path, steps=0, **batch)


def discarded(train: Sequence[Record]) -> list[dict[str, str]]:
    """Completions of the whole run that were not trained on, by reason."""
    total = sum(r.get("completions") or 0 for r in train)
    reasons = {"reward/invalid": ("invalid", "a reward failed or timed out; left out of all means")}
    for key in sorted({k for r in train for k in r if k.startswith("dropped/")} - {"dropped/invalid"}):
        reasons[key] = (f"dropped: {key.partition('/')[2]}", "dropped by a selection")
    reasons["skipped_zero_advantage"] = ("advantage 0", "no effect on the update: forward and backward were skipped")
    return [
        {"name": name, "count": count(number), "share": percent(number / total if total else None), "meaning": meaning}
        for key, (name, meaning) in reasons.items()
        if (number := sum(r.get(key) or 0 for r in train))
    ]


def config_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """config.yaml as (setting, source): the comment at the end of a line is the source."""
    if not folder.config.exists():
        return []
    lines = []
    for line in folder.config.read_text(encoding="utf-8", errors="replace").splitlines():
        setting, mark, source = line.rpartition("  # ")
        lines.append((setting.rstrip(), source) if mark else (line, ""))
    return lines


def script_json(value: Any) -> Markup:
    """JSON for a <script> element: it has no `<`, hence no `</script>` or `<!--`."""
    text = dumps(value)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
