"""What a run's page draws: the curves of its steps with the meaning of each metric (metrics.yaml), its evaluations, the
recipe's choices, and the last steps of timeline.json: what works, what waits, and the stage of each prompt."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.health import ANY, Range, verdicts
from proxima.data import FieldError
from proxima.evaluation.headline import Headline
from proxima.runtime.watch.timeline import (
    ENGINE,
    EPISODES,
    PROCESSES,
    REWARDS,
    TRAINER,
    Lane,
    TimelineSpan,
    timeline_spans,
    union,
)

SLOTS = ("surrogate", "advantage", "correction", "aggregate", "proximal", "reference_kl", "penalty", "selection")


def trend_of(records: Sequence[Mapping[str, Any]], algorithm: Mapping[str, Any], after: int = 0) -> dict[str, Any]:
    """Return the curves of a run: every number in the records of metrics.jsonl, for the steps after `after`, with its
    group and meaning, and a verdict where it has an ideal range. `before` is the number of earlier steps. The
    evaluations and the specs in the recipe's `algorithm` are there, too."""
    steps = [record for record in records if record["kind"] == "train"]
    train = [record for record in steps if record["step"] > after]
    evals = [record for record in records if record["kind"] == "eval"]
    numbers = list(map(_numbers, train))
    named = set(chain.from_iterable(numbers)) - {"step"}
    about = metric_meanings(named)
    guard = guard_of(algorithm)
    bounds = weight_bounds_of(algorithm)
    judged = [verdicts(record, guard, bounds) for record in train]
    with_verdict = set(chain.from_iterable(judged)) & named
    return {
        "before": len(steps) - len(train),
        "steps": [record["step"] for record in train],
        "metrics": {name: [of_step.get(name) for of_step in numbers] for name in about},
        "about": about,
        "verdicts": {name: [of_step.get(name) for of_step in judged] for name in sorted(with_verdict)},
        "evals": [
            {"step": record["step"], "label": str(record.get("label", "")), "metrics": _numbers(record)}
            for record in evals
        ],
        "specs": {name: algorithm.get(name) for name in SLOTS},
        "headline": Headline.of(evals).key,
    }


def guard_of(algorithm: object) -> MismatchGuard:
    """Return the guard that the `algorithm` of a recipe sets; the default one if it is missing or damaged."""
    fields = None
    if isinstance(algorithm, Mapping):
        fields = algorithm.get("mismatch")
    try:
        if isinstance(fields, Mapping):
            return MismatchGuard(**fields)
        return MismatchGuard()
    except (TypeError, FieldError):
        return MismatchGuard()


def weight_bounds_of(algorithm: object) -> Range:
    """Return lower and upper bound of the weights of the first correction that has some; infinite where it has none."""
    corrections = None
    if isinstance(algorithm, Mapping):
        corrections = algorithm.get("correction")
    if not isinstance(corrections, list):
        corrections = [corrections]
    for fields in corrections:
        if isinstance(fields, Mapping) and _is_number(fields.get("upper")):
            lower: Any = fields.get("lower")
            if not _is_number(lower):
                lower = -math.inf
            return float(lower), float(fields["upper"])
    return ANY


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record, by name."""
    return {name: value for name, value in record.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


VITAL = "Vital signs"
FILE = Path(__file__).with_name("metrics.yaml")


@cache
def metric_groups() -> dict[str, dict[str, str]]:
    """Return the lines of metrics.yaml by group: the names of some metrics, and their meaning in Markdown. The first
    group is `VITAL`, names without a meaning."""
    groups = yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return {VITAL: dict.fromkeys(groups.pop("vital"), ""), **groups}


def metric_meanings(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the group and the meaning of each metric, in the order in which they are shown: the vital ones first."""
    shown = sorted((*_line(name), name) for name in names)
    return {name: [group, meaning] for _, group, meaning, name in shown}


@lru_cache(4096)
def _line(name: str) -> tuple[int, str, str]:
    """Return the place, the group and the meaning, as plain text, of a metric."""
    vital = list(metric_groups()[VITAL])
    for place, (group, names, meaning) in enumerate(_lines(), len(vital)):
        if any(fnmatchcase(name, pattern) for pattern in names.split(", ")):
            text = re.sub(r"\[|\]\([^)]*\)|[`*]", "", meaning)
            if name in vital:
                return (vital.index(name), VITAL, text)
            return (place, group, text)
    raise AssertionError("the last line of metrics.yaml matches every name")


def _lines() -> Iterator[tuple[str, str, str]]:
    """The lines of metrics.yaml that have a meaning: group, names and meaning."""
    for group, lines in metric_groups().items():
        if group != VITAL:
            for names, meaning in lines.items():
                yield group, names, meaning


STEPS = 6  # drawn
MOST_SPANS = 4000  # drawn
MOST_LANES = 10  # of prompts, and of episodes
ENVIRONMENTS = Lane(1, 4)  # while some episode waits for its environment; derived, not in the file
NAMES = {TRAINER: "trainer", ENGINE: "engine", ENVIRONMENTS: "environments", REWARDS: "rewards"}


def last_stages(file: Path) -> list[dict[str, Any]] | None:
    """Return the spans of the last steps, lane by lane: process, activity, start and end in seconds of the run; None
    without the file."""
    if not file.is_file():
        return None
    every = list(timeline_spans(file))
    starts = [span.start for span in every if span.name == "step"]
    begin = starts[-STEPS:][0] if starts else 0.0
    last = [span._replace(start=max(span.start, begin)) for span in every if span.end > begin][-MOST_SPANS:]
    leaves = with_environments([span for span in last if not span.name.startswith(("prompt ", "episode "))])
    drawn = [span for span in leaves if span.lane.thread <= MOST_LANES]
    return list(map(_as_json, sorted(drawn, key=_place)))


def _as_json(span: TimelineSpan) -> dict[str, Any]:
    process = PROCESSES.get(span.lane.process, "").removesuffix("s")
    thread: int | str = span.lane.thread
    if span.lane in NAMES:
        process = NAMES[span.lane]
        thread = ""
    return {
        "name": span.name,
        "process": process,
        "thread": thread,
        "start": span.start,
        "end": span.end,
        "facts": span.facts,
    }


def _place(span: TimelineSpan) -> tuple[int, int]:
    """Sort key: the stages first, in the order of `NAMES`, then episodes, then prompts."""
    if span.lane in NAMES:
        return (0, list(NAMES).index(span.lane))
    return (-span.lane.process + 9, span.lane.thread)


def with_environments(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Add a lane for the times in which some episode waits for its environment. With episodes, the engine's lane shows
    the times in which one of them waits for a turn, rather than the whole time of a prompt."""
    played = [span for span in spans if span.lane.process == EPISODES]
    if not played:
        return [*spans]
    shown = [span for span in spans if span.lane != ENGINE]
    for name, lane in (("turn", ENGINE), ("environment", ENVIRONMENTS)):
        times = [(span.start, span.end) for span in played if span.name == name]
        shown += [TimelineSpan(name, lane, start, end, {}) for start, end in union(times)]
    return shown
