"""README.md of an exported model: what it was trained from and how, and what its evaluations say."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from proxima.config.recipe_reader import read_yaml
from proxima.evaluation.headline import Headline
from proxima.runtime.state.folder import RunFolder

LEFT_OUT = (
    "checkpoint",
    "engine",
    "folder",
    "monitor",
    "runtime",
    "view",
)  # of the machine, or of the people who ran it
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(folder: RunFolder, step: int, library: str) -> str:
    """Markdown with the hub's metadata; paths on this machine are reduced to their last name."""
    config = read_yaml(folder.config).to_python() if folder.config.is_file() else {}
    recipe = _without_places({key: value for key, value in config.items() if key not in LEFT_OUT})
    base = str((config.get("model") or {}).get("path", ""))
    facts: dict[str, Any] = {"library_name": library, "tags": ["proxima", "reinforcement-learning"]}
    if HUB_NAME.fullmatch(base) and not Path(base).exists():
        facts["base_model"] = base
    parts = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False)}---",
        f"# {folder.path.resolve().name}",
        f"{_without_places(base) or 'A model'}, trained with proxima: the weights of step {step}.",
    ]
    if table := _evaluations(folder):
        parts.append(f"## Held-out results of the run\n\n{table}")
    if recipe:
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        parts.append(f"## Recipe\n\n```yaml\n{text}```")
    return "\n\n".join(parts) + "\n"


def _evaluations(folder: RunFolder) -> str:
    """A row for each evaluation; empty without any."""
    evals = [record for record in folder.read_metrics() if record["kind"] == "eval"]
    headline, rows = Headline.of(evals), []
    for record in evals:
        if (value := headline.value(record)) is not None:
            low, high = headline.bounds(record) or (None, None)
            interval = "" if low is None else f"{low:.3f} to {high:.3f}"
            rows.append(f"| {record['step']} | {value:.3f} | {interval} |")
    head = f"| step | {headline.title} | 95 % interval |\n|---|---|---|\n"
    return head + "\n".join(rows) if rows else ""


def _without_places(value: Any) -> Any:
    """Absolute paths as their last name, and addresses without user and password."""
    if isinstance(value, Mapping):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return re.sub(r"//[^/@\s]*@", "//", value) if isinstance(value, str) else value
