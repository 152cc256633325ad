"""report.html: what a run did and what came of it, in one file that needs no network and can be mailed.

Made from the run folder alone, so also for a run that is still going, or was killed. What a model or a data set wrote reaches the page
through jinja's escaping or through JSON and `textContent`, never as markup; a content security policy forbids any other script and any
request.
"""

import base64
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from proxima.config.estimate import at_once, pruned
from proxima.config.schema import DynamicSamplingConfig
from proxima.core.selection import Prune
from proxima.runtime.files import write_whole
from proxima.runtime.folder import RunFolder
from proxima.runtime.observer import RunInfo
from proxima.runtime.records import dumps
from proxima.runtime.rollouts import read_rows
from proxima.view.chart import Series, bar_chart, line_chart
from proxima.view.numbers import NONE, count, duration, fixed, magnitude, percent, rate, signed, significant
from proxima.view.plain import arithmetic, bounds, trials

QUESTIONS = 5  # answered before and after
SAMPLED_STEPS, SAMPLED_GROUPS, SAMPLED_COMPLETIONS = 60, 2, 4
CUT = 1500  # characters of a completion shown
COLORS = ("var(--a)", "var(--b)")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Curve:
    """A chart of the report: its title, the keys of metrics.jsonl with their names, how a value is written, what it tells."""

    title: str
    keys: Mapping[str, str]
    write: Callable[[float | None], str]
    tells: str
    zero: bool = True
    smooth: bool = True
    scale: float = 1.0


CURVES = (
    Curve("Reward", {"reward/mean": "mean"}, lambda v: fixed(v, 3), "mean over the valid completions of a step", zero=False),
    Curve("Accuracy", {"accuracy": "training"}, lambda v: fixed(v, 3), "share of right answers; dots: held-out, with 95 % interval"),
    Curve("Length", {"length/mean": "mean", "length/max": "longest"}, lambda v: fixed(v, 1), "tokens of a completion"),
    Curve("Entropy", {"entropy/mean": "mean"}, lambda v: fixed(v, 3), "nats a token; at 0 the policy has stopped exploring"),
    Curve("KL", {"approx_kl": "behavior to current"}, significant, "nats a token, how far an update moved the policy"),
    Curve("Masked", {"masked_fraction": "masked"}, lambda v: f"{fixed(v, 2)} %", "% of tokens, outside the trust region", scale=100.0),
    Curve("Gradient norm", {"grad_norm": "before clipping"}, lambda v: fixed(v, 3), "of the whole update"),
    Curve("Speed", {"tokens_per_second/generate": "generate", "tokens_per_second/train": "train"}, rate, "tokens a second"),
    Curve("Loss", {"loss": "surrogate"}, significant, "its level says little in policy gradients; jumps do", zero=False),
    Curve("Cut off", {"truncated_fraction": "cut off"}, lambda v: f"{fixed(v, 1)} %", "% of completions, at the length limit", scale=100.0),
    Curve("Engine against trainer", {"rollout_replay_logp_absdiff_mean": "mean |Δ log-prob|"}, significant, "nats a token"),
    Curve("Learning rate", {"lr": "lr"}, significant, "at the last update of the step", smooth=False),
)  # fmt: skip
PHASES = {"time/generate": "generate", "time/score": "score", "time/train": "train", "time/publish": "publish"}
PHASE_COLORS = {"generate": "var(--a)", "train": "var(--b)", "score": "var(--c)", "publish": "var(--d)", "other": "var(--e)"}


def write_report(path: Path | str) -> Path:
    """Make `report.html` of a run folder and return where it lies.

    Raises:
        ValueError: `path` holds no run, or a file in it is damaged; names it and the remedy.
        OSError: the disk is full; a former report stays whole.
    """
    folder = RunFolder(path)
    if not folder.has_run:
        raise ValueError(f"{folder.path} holds no run; give the folder that `proxima train` named in its first line")
    script = (HERE / "report.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((HERE / "report.html.j2").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode()
    style = Markup((HERE / "report.css").read_text(encoding="utf-8"))
    page = template.render(**gather(folder), script=Markup(script), script_digest=digest, style=style)
    write_whole(folder.report, page)
    return folder.report


def gather(folder: RunFolder) -> dict[str, Any]:
    """All that the page shows, with every number written out."""
    records = folder.read_metrics()
    train = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    summary, config = _json_file(folder.summary), _yaml_file(folder.config)
    charts = [c for curve in CURVES if (c := chart(curve, train, evals)) is not None] + phase_chart(train)
    steps, samples, torn = pick_samples(folder)
    return {
        "title": title(summary, config, folder),
        "status": status(summary, train, config),
        "headline": headline(evals),
        "reward": None if evals or not train else (fixed(train[0].get("reward/mean")), fixed(train[-1].get("reward/mean"))),
        "tiles": tiles(summary, train),
        "arithmetic": batch_arithmetic(config, folder),
        "charts": charts,
        "questions": questions(folder),
        "left_out": left_out(train),
        "config": config_lines(folder),
        "environment": flatten(_json_file(folder.environment)),
        "torn": torn,
        "sample_steps": steps,
        "data": script_json({"steps": [r["step"] for r in train], "charts": [c["values"] for c in charts], "samples": samples}),
    }


def chart(curve: Curve, train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A card: the drawing, and each series' value at each step for the ruler. None when no record has any of the keys."""
    known = {key: name for key, name in curve.keys.items() if any(r.get(key) is not None for r in train)}
    drawn, legend, values = [], [], []
    for color, (key, name) in zip(COLORS, known.items(), strict=False):
        points = [(float(r["step"]), None if r.get(key) is None else curve.scale * float(r[key])) for r in train]
        drawn.append(Series(name=name, points=points, color=color, smooth=curve.smooth and not key.endswith("max")))
        written = [curve.write(v) for _, v in points]
        legend.append({"name": name, "color": color, "last": written[-1]})
        values.append(written)
    if curve.title == "Accuracy" and (held := [r for r in evals if r.get("accuracy") is not None]):
        spread = [bounds(r) for r in held]
        points = [(float(r["step"]), float(r["accuracy"])) for r in held]
        drawn.append(Series(name="held-out", points=points, color="var(--b)", spread=spread))
        legend.append({"name": "held-out", "color": "var(--b)", "last": fixed(held[-1]["accuracy"], 3)})
    if not drawn:
        return None
    picture = line_chart(drawn, label=f"{curve.title} by step", zero=curve.zero, unit_interval=curve.title == "Accuracy")
    return {"title": curve.title, "tells": curve.tells, "svg": picture, "legend": legend, "values": values} if picture else None


def phase_chart(train: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the seconds of a step went, stacked; what no phase names is `other`."""
    known = {key: name for key, name in PHASES.items() if any(r.get(key) for r in train)}
    if not known:
        return []
    columns = {name: [float(r.get(key) or 0.0) for r in train] for key, name in known.items()}
    whole = [float(r.get("time/step") or 0.0) for r in train]
    columns["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(whole, *columns.values(), strict=True)]
    steps = [float(r["step"]) for r in train]
    series = [Series(name=n, points=list(zip(steps, c, strict=True)), color=PHASE_COLORS[n]) for n, c in columns.items()]
    legend = [{"name": s.name, "color": s.color, "last": duration(s.points[-1][1])} for s in series]
    picture = bar_chart(series, label="Seconds of a step by phase")
    values = [[duration(v) for _, v in s.points] for s in series]
    return [{"title": "Time per phase", "tells": "seconds of a step", "svg": picture, "legend": legend, "values": values}]


def headline(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Held-out accuracy at the first and the last evaluation, with its 95 % interval."""
    known = [r for r in evals if r.get("accuracy") is not None]
    if not known:
        return None

    def shown(record: Mapping[str, Any]) -> dict[str, Any]:
        low, high = bounds(record)
        place = {"left": round(100 * low, 2), "width": round(100 * (high - low), 2), "at": round(100 * record["accuracy"], 2)}
        when = "before the first step" if record["step"] == 0 else f"after step {record['step']}"
        text = {"accuracy": fixed(record["accuracy"], 3), "interval": f"{fixed(low, 3)} to {fixed(high, 3)}", "when": when}
        return {**text, "right": f"{record['correct']}/{trials(record)}", **place}

    gain = signed(known[-1]["accuracy"] - known[0]["accuracy"]) if len(known) > 1 else None
    return {"before": shown(known[0]), "after": shown(known[-1]) if len(known) > 1 else None, "gain": gain}


def title(summary: Mapping[str, Any], config: Mapping[str, Any], folder: RunFolder) -> dict[str, str]:
    """Names of algorithm, model and run."""
    surrogate = _under(config, "algorithm", "surrogate", "kind")
    model = summary.get("model") or _under(config, "model", "path") or "unknown model"
    seed = summary.get("seed", config.get("seed", NONE))
    return {"algorithm": str(summary.get("algorithm") or surrogate or "run"), "model": Path(str(model)).name, "seed": str(seed),
            "folder": folder.path.resolve().name}  # fmt: skip


def status(summary: Mapping[str, Any], train: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, str]:
    """How the run ended; without a summary it is going on, or was killed."""
    steps = train[-1]["step"] if train else 0
    planned = _under(config, "train", "steps")
    state = str(summary.get("status", "unfinished"))
    return {"state": state, "steps": f"{count(steps)} of {count(planned)}" if isinstance(planned, int) else count(steps),
            "error": str(summary.get("error") or "")}  # fmt: skip


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
    names = ("prompts_per_step", "completions_per_prompt", "updates_per_step", "epochs_per_step", "tokens_per_micro_batch")
    if not isinstance(train, dict) or not all(isinstance(train.get(name), int) for name in names):
        return None
    prompts, completions, updates, epochs, tokens = (train[name] for name in names)
    selection, refill = _of_algorithm(config.get("algorithm"))
    prompts, kept = pruned(prompts, completions, selection)
    nameless = RunInfo(version="", algorithm="", model="", seed=0, folder=folder.path, steps=0, prompts=prompts, completions=completions)
    return arithmetic(
        replace(nameless, kept=kept, at_once=at_once(prompts, refill), updates=updates * epochs, tokens_per_micro_batch=tokens)
    )


def _of_algorithm(section: Any) -> tuple[list[Prune], DynamicSamplingConfig | None]:
    """What the algorithm of a config.yaml prunes, and its dynamic sampling; nothing of what can't be read."""
    found = section if isinstance(section, dict) else {}
    specs = [one for one in found.get("selection") or [] if isinstance(one, dict) and one.get("kind") == "prune"]
    try:
        prunes = [Prune(**{key: value for key, value in one.items() if key != "kind"}) for one in specs]
        return prunes, DynamicSamplingConfig(**found["dynamic_sampling"]) if found.get("dynamic_sampling") else None
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
            rows.append({"name": name, "count": count(number), "share": percent(number / total if total else None), "meaning": meaning})
    return rows


def questions(folder: RunFolder) -> dict[str, Any] | None:
    """The first held-out questions with the first answer of the first and of the last evaluation."""
    files = sorted(folder.evals.glob("[0-9]*.parquet"))
    if not files:
        return None
    columns = ("prompt_uid", "sample", "question", "answer", "text", "correct", "reward", "valid")
    sets = [{r["prompt_uid"]: r for r in reversed(read_rows(file, columns))} for file in {files[0]: 0, files[-1]: 0}]
    rows = []
    for uid in sorted(sets[0])[:QUESTIONS]:
        answers = [
            {"text": _cut(row["text"]), "mark": {True: "right", False: "wrong", None: "unscored"}[row["correct"]]}
            for row in (each.get(uid) for each in sets)
            if row is not None
        ]
        rows.append({"question": _cut(sets[0][uid]["question"]), "answer": plain_answer(sets[0][uid]["answer"]), "answers": answers})
    return {"rows": rows, "of": len(sets[0]), "labels": ["before", "after"] if len(sets) == 2 else ["answer"]}


def pick_samples(folder: RunFolder) -> tuple[list[int], list[list[dict[str, Any]]], list[str]]:
    """Steps spread evenly over the run, and for each some completions of its first groups, failed ones first; and unreadable files."""
    files = sorted(folder.rollouts.glob("[0-9]*.parquet"))
    many = min(SAMPLED_STEPS, len(files))
    wanted = sorted({files[round(i * (len(files) - 1) / max(many - 1, 1))] for i in range(many)})
    columns = ("prompt_uid", "sample", "question", "answer", "text", "reward", "parts", "correct", "error", "advantage", "outcome")
    steps, samples, torn = [], [], []
    for file in wanted:
        try:
            rows = read_rows(file, columns)
        except ValueError:
            torn.append(file.name)
            continue
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["prompt_uid"], []).append(row)
        steps.append(int(file.stem))
        failed_first = sorted(groups.values(), key=lambda group: all(row["error"] is None for row in group))
        samples.append([_sample(group) for group in failed_first[:SAMPLED_GROUPS]])
    return steps, samples, torn


def _sample(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    completions = [
        {
            "text": _cut(row["text"]),
            "reward": "invalid" if row["reward"] is None else fixed(row["reward"], 2),
            "mark": {True: "right", False: "wrong", None: ""}[row["correct"]],
            "parts": "  ".join(f"{name} {fixed(value, 2)}" for name, value in row["parts"].items()),
            "note": row["error"]
            or (row["outcome"].replace("_", " ") + (f", advantage {signed(row['advantage'], 2)}" if row["advantage"] else "")),
        }
        for row in group[:SAMPLED_COMPLETIONS]
    ]
    return {
        "question": _cut(group[0]["question"]),
        "answer": plain_answer(group[0]["answer"]),
        "completions": completions,
        "of": len(group),
    }


def plain_answer(answer: Any) -> str:
    """An expected answer as a person writes it: text bare, anything else as JSON."""
    return "" if answer is None else _cut(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))


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


def _cut(text: str) -> str:
    return text if len(text) <= CUT else text[:CUT] + " …"


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
        raise ValueError(f"{path} can't be read ({str(error).splitlines()[0]}); restore it, or delete it to report without") from error
    return value if isinstance(value, dict) else {}
