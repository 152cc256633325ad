"""report.html: what a run did and what came of it, in one file that needs no network and can be mailed.

Made from the run folder alone, so also for a run that is still going, or was killed. What a model or a data set wrote
reaches the page through jinja's escaping or through JSON and `textContent`, never as markup; a content security policy
forbids any other script and any request.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from proxima.config.estimate import at_once, pruned
from proxima.core.selection import Prune
from proxima.data import UserError
from proxima.data.atomic_files import write_whole
from proxima.data.jsonl import dumps
from proxima.rollout.dynamic_sampling import DynamicSampling
from proxima.runtime.folder import RunFolder
from proxima.runtime.observer import RunInfo
from proxima.view.formatting import NONE, count, duration, fixed, magnitude, percent, rate, signed
from proxima.view.log_lines import arithmetic, bounds, no_accuracy, trials
from proxima.view.page import render
from proxima.view.report_curves import all_charts
from proxima.view.report_samples import first_errors, pick_samples, questions

MANY = 0.1  # share of failed scores from which the page begins with it


def write_report(path: Path | str) -> Path:
    """Make `report.html` of a run folder and return where it lies.

    Raises:
        ValueError: `path` holds no run, or a file in it is damaged; names it and the remedy.
        OSError: the disk is full; a former report stays whole.
    """
    folder = RunFolder(path)
    if not folder.has_run:
        raise UserError(f"{folder.path} holds no run; give the folder that `proxima train` named in its first line")
    page = render("report", styles=("report.css",), **gather(folder))
    write_whole(folder.report, page)
    return folder.report


def gather(folder: RunFolder) -> dict[str, Any]:
    """All that the page shows, with every number written out."""
    records = folder.read_metrics()
    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    summary, config = _json_file(folder.summary), _yaml_file(folder.config)
    charts = all_charts(train, evals)
    steps, samples, torn = pick_samples(folder)
    return {
        "title": title(summary, config, folder),
        "status": status(summary, train, config),
        "invalid": invalid(train, evals, folder),
        "headline": headline(evals),
        "reward": (fixed(train[0].get("reward/mean")), fixed(train[-1].get("reward/mean"))) if train else None,
        "evaluated": bool(evals),
        "no_accuracy": no_accuracy(evals[-1]).removeprefix("accuracy unknown: ") if evals else "",
        "tiles": tiles(summary, train),
        "arithmetic": batch_arithmetic(config, folder),
        "charts": charts,
        "questions": questions(folder),
        "left_out": left_out(train),
        "config": config_lines(folder),
        "environment": flatten(_json_file(folder.environment)),
        "torn": torn,
        "sample_steps": steps,
        "data": script_json(
            {"steps": [r["step"] for r in train], "charts": [c["values"] for c in charts], "samples": samples}
        ),
    }


def headline(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Held-out accuracy at the first and the last evaluation, with its 95 % interval; an evaluation whose scores failed
    says that."""
    if not any(r.get("accuracy") is not None for r in evals):
        return None

    def shown(record: Mapping[str, Any]) -> dict[str, Any]:
        when = "before the first step" if record["step"] == 0 else f"after step {record['step']}"
        if record.get("accuracy") is None:
            return {"accuracy": NONE, "unknown": no_accuracy(record).removeprefix("accuracy "), "when": when}
        low, high = bounds(record)
        place = {
            "left": round(100 * low, 2),
            "width": round(100 * (high - low), 2),
            "at": round(100 * record["accuracy"], 2),
        }
        text = {
            "accuracy": fixed(record["accuracy"], 3),
            "interval": f"{fixed(low, 3)} to {fixed(high, 3)}",
            "when": when,
        }
        return {**text, "unknown": "", "right": f"{record['correct']}/{trials(record)}", **place}

    first, last = evals[0], evals[-1]
    known = first.get("accuracy") is not None and last.get("accuracy") is not None
    gain = signed(last["accuracy"] - first["accuracy"]) if known and len(evals) > 1 else None
    only_before = len(evals) == 1 and first["step"] == 0
    return {
        "before": shown(first),
        "after": shown(last) if len(evals) > 1 else None,
        "gain": gain,
        "only_before": only_before,
    }


def invalid(
    train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], folder: RunFolder
) -> dict[str, Any] | None:
    """What a banner says of failed scores: their share of a kind of answers, and the commonest reasons; None where they
    are few."""
    shares = []
    for records, whole, failed, name in (
        (train, "completions", "reward/invalid", "completions"),
        (evals, "answers", "invalid", "held-out answers"),
    ):
        total, lost = (sum(r.get(key) or 0 for r in records) for key in (whole, failed))
        if total and lost / total >= MANY:
            shares.append(f"{count(lost)} of {count(total)} {name} ({percent(lost / total)})")
    if not shares:
        return None
    return {"share": " and ".join(shares), "reasons": [f"{text} ({count(n)} ×)" for text, n in first_errors(folder)]}


def title(summary: Mapping[str, Any], config: Mapping[str, Any], folder: RunFolder) -> dict[str, str]:
    """Names of algorithm, model and run."""
    surrogate = _under(config, "algorithm", "surrogate", "kind")
    model = summary.get("model") or _under(config, "model", "path") or "unknown model"
    seed = summary.get("seed", config.get("seed", NONE))
    return {
        "algorithm": str(summary.get("algorithm") or surrogate or "run"),
        "model": Path(str(model)).name,
        "seed": str(seed),
        "folder": folder.path.resolve().name,
    }


def status(summary: Mapping[str, Any], train: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, str]:
    """How the run ended; without a summary it is going on, or was killed."""
    steps = train[-1]["step"] if train else 0
    planned = _under(config, "train", "steps")
    state = str(summary.get("status", "unfinished"))
    return {
        "state": state,
        "steps": f"{count(steps)} of {count(planned)}" if isinstance(planned, int) else count(steps),
        "error": str(summary.get("error") or ""),
    }


def tiles(summary: Mapping[str, Any], train: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The run in a few figures."""
    seconds = summary.get("seconds") or (train[-1]["time"] if train else None)
    speed = summary.get("tokens_per_second") or {}
    times = [float(r["time/step"]) for r in train if r.get("time/step") is not None]

    def mean_speed(name: str, tokens: str) -> float | None:
        total, time = sum(r.get(f"tokens/{tokens}") or 0 for r in train), sum(r.get(f"time/{name}") or 0 for r in train)
        return speed.get(name) or (total / time if time else None)

    return [
        ("duration", duration(seconds)),
        ("a step", duration(statistics.median(times) if times else None)),
        ("generate", rate(mean_speed("generate", "generated"))),
        ("train", rate(mean_speed("train", "trained"))),
        ("completions", count(sum(r.get("completions") or 0 for r in train))),
        ("peak memory", f"{fixed(memory / 2**30, 1)} GiB" if (memory := summary.get("peak_memory_bytes")) else NONE),
        ("tokens generated", magnitude(sum(r.get("tokens/generated") or 0 for r in train))),
        ("tokens trained", magnitude(sum(r.get("tokens/trained") or 0 for r in train))),
    ]


def batch_arithmetic(config: Mapping[str, Any], folder: RunFolder) -> str | None:
    """The line that the run began with, out of config.yaml; None when that is missing."""
    train = config.get("train")
    names = (
        "prompts_per_step",
        "completions_per_prompt",
        "updates_per_step",
        "epochs_per_step",
        "tokens_per_micro_batch",
    )
    if not isinstance(train, dict) or not all(isinstance(train.get(name), int) for name in names):
        return None
    prompts, completions, updates, epochs, tokens = (train[name] for name in names)
    selection, refill = _of_algorithm(config.get("algorithm"))
    prompts, kept = pruned(prompts, completions, selection)
    nameless = RunInfo(
        version="",
        algorithm="",
        model="",
        seed=0,
        folder=folder.path,
        steps=0,
        prompts=prompts,
        completions=completions,
    )
    return arithmetic(
        replace(
            nameless,
            kept=kept,
            at_once=at_once(prompts, refill),
            updates=updates * epochs,
            tokens_per_micro_batch=tokens,
        )
    )


def _of_algorithm(section: Any) -> tuple[list[Prune], DynamicSampling | None]:
    """What the algorithm of a config.yaml prunes, and its dynamic sampling; nothing of what can't be read."""
    found = section if isinstance(section, dict) else {}
    specs = [one for one in found.get("selection") or [] if isinstance(one, dict) and one.get("kind") == "prune"]
    try:
        prunes = [Prune(**{key: value for key, value in one.items() if key != "kind"}) for one in specs]
        return prunes, DynamicSampling(**found["dynamic_sampling"]) if found.get("dynamic_sampling") else None
    except (TypeError, ValueError):
        return [], None


def left_out(train: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What was generated and not learnt from, by reason, over the whole run."""
    total = sum(r.get("completions") or 0 for r in train)
    reasons = {"reward/invalid": ("invalid", "a scorer failed or timed out; enters no mean")}
    for key in sorted({k for r in train for k in r if k.startswith("dropped/")} - {"dropped/invalid"}):
        reasons[key] = (f"dropped: {key.partition('/')[2]}", "taken out by a selection")
    reasons["skipped_zero_advantage"] = ("advantage 0", "would change nothing: forward and backward were skipped")
    rows = []
    for key, (name, meaning) in reasons.items():
        if number := sum(r.get(key) or 0 for r in train):
            rows.append(
                {
                    "name": name,
                    "count": count(number),
                    "share": percent(number / total if total else None),
                    "meaning": meaning,
                }
            )
    return rows


def config_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """config.yaml as (setting, where it comes from): the comment at a line's end is the provenance."""
    if not folder.config.exists():
        return []
    lines = []
    for line in folder.config.read_text(encoding="utf-8", errors="replace").splitlines():
        setting, mark, source = line.rpartition("  # ")
        lines.append((setting.rstrip(), source) if mark else (line, ""))
    return lines


def flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as (path, value) rows."""
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows


def script_json(value: Any) -> Markup:
    """JSON that can stand inside a <script> element: no `<`, so no `</script>` or `<!--`, whatever a model wrote."""
    text = dumps(value)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _under(config: Mapping[str, Any], *path: str) -> Any:
    value: Any = config
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _json_file(path: Path) -> dict[str, Any]:
    return _mapping(path, json.loads)


def _yaml_file(path: Path) -> dict[str, Any]:
    return _mapping(path, yaml.safe_load)


def _mapping(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    """The file's mapping, empty when it is absent.

    Raises:
        ValueError: it can't be parsed.
    """
    if not path.exists():
        return {}
    try:
        value = load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} can't be read ({str(error).splitlines()[0]}); restore it, or delete it to report without"
        ) from error
    return value if isinstance(value, dict) else {}
