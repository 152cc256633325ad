"""The meaning of each metric of a step: metrics.yaml, for the charts of the page and the tables of docs/."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path

import yaml

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
    groups = metric_groups()
    vital = list(groups[VITAL])
    lines = [(group, *line) for group, of_group in groups.items() if group != VITAL for line in of_group.items()]
    for place, (group, names, meaning) in enumerate(lines, len(vital)):
        if any(fnmatchcase(name, pattern) for pattern in names.split(", ")):
            text = re.sub(r"\[|\]\([^)]*\)|[`*]", "", meaning)
            return (vital.index(name), VITAL, text) if name in vital else (place, group, text)
    raise AssertionError("the last line of metrics.yaml matches every name")
