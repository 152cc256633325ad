"""Whole runs on a tiny model: a recipe, rewards that need no learning, and what two runs must have in common."""

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pyarrow import parquet
from safetensors.torch import load_file

from proxima.config.resolution import resolve
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, Where
from proxima.runtime.launch.run import train
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.summary import Summary
from proxima.runtime.watch.observer import Observer
from proxima.training.checkpoint import CARRIED_GROUPS, Checkpoint, checkpoints
from tests.runtime.prompt_rows import consumed_prompts

HOOK: Callable[[Prompt, Completion], None] | None = None  # a test's way into the middle of a step


@dataclass(frozen=True, kw_only=True)
class Even(WeightedReward):
    """The share of even token ids: every completion has another one. Correct: more than half.

    Args:
        fail_on: raises on a completion whose tokens sum to a multiple of this; 0: never.
        constant: the same value for every completion of a prompt whose uid is a multiple of this; 0: never.
        hold: a file with a prompt's uid; a call for that prompt announces itself in `<hold>.held` and waits until the
            file is gone.
    """

    fail_on: int = 0
    constant: int = 0
    hold: str = ""

    kind: ClassVar[str] = "even"
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        if self.hold and (file := Path(self.hold)).is_file() and prompt.uid == int(file.read_text()):
            file.with_suffix(".held").touch()
            while file.exists():
                time.sleep(0.01)
        if HOOK is not None:
            HOOK(prompt, completion)
        if self.fail_on and sum(completion.tokens) % self.fail_on == 0:
            raise RuntimeError("no opinion")
        share = sum(t % 2 == 0 for t in completion.tokens) / len(completion.tokens)
        if self.constant and prompt.uid % self.constant == 0:
            share = 0.25
        return Score(value=share, correct=share > 0.5)


class Right(Even):
    """1 if more than half of the token ids are even, else 0."""

    kind: ClassVar[str] = "right"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        score = super().score_one(prompt, completion)
        return replace(score, value=float(bool(score.correct)))


class Share(WeightedReward):
    """The share of even token ids, with that of odd ones as its own part; nothing is right or wrong."""

    kind: ClassVar[str] = "share"
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        share = sum(t % 2 == 0 for t in completion.tokens) / len(completion.tokens)
        return Score(value=share, parts={"odd": 1 - share})


class BySource(WeightedReward):
    """1 or 2, by the source of a mix that the prompt is from; half less for the first completion."""

    kind: ClassVar[str] = "by_source"
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        of_source = {"add": 1.0, "times": 2.0}[prompt.metadata["source"]]
        return Score(value=of_source - 0.5 * (completion.sample == 0))


NO_EVAL = {"eval__task": None, "eval__every": 0}


def recipe(model: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds: 3 steps of 4 prompts × 4 completions of at most 6 tokens. `changes`: dotted keys with `__` for
    the dots."""
    task = {"kind": "arithmetic", "low": 1, "high": 9, "held_out": 0.3}
    tree: dict[str, Any] = {
        "model": {"path": str(model), "compute_dtype": "float32", "device": "cpu"},
        "task": task | {"size": 10, "split": "train"},
        "reward": [{"kind": "tests.runtime.tiny_run:Even"}],
        "algorithm": {"preset": "cppo"},
        "engine": {"kind": "local", "dtype": "float32", "slots": 8},
        "sampling": {"max_tokens": 6},
        "train": {
            "steps": 3,
            "prompts_per_step": 4,
            "completions_per_prompt": 4,
            "optimizer": {"kind": "adamw", "lr": 3e-3},
            "warmup_steps": 2,
            "schedule": "cosine",
            "tokens_per_micro_batch": 200,
        },
        "eval": {"task": task | {"size": 5, "split": "test"}, "every": 2},
        "checkpoint": {"every": 1, "keep_last": 0},
        "runtime": {"threads": 1, "reward_timeout": 600.0},  # where the machine stands still, no reward is late
        "seed": 3,
    }
    return changed(tree, changes)


def recipe_with(**settings: Any) -> Callable[..., dict[str, Any]]:
    """`recipe` with further settings, which its callers may change."""
    return lambda model, **changes: recipe(model, **(settings | changes))


def changed(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with other values; dotted keys with `__` for the dots. What is passed stays as it is."""
    tree = copy.deepcopy(tree)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = copy.deepcopy(value)  # a later key may change a part of it
    return tree


def go(
    folder: Path, tree: Mapping[str, Any], *, observer: Any = None, resume: bool = False, overwrite: bool = False
) -> Summary:
    resolved = resolve({**tree, "folder": str(folder)}, root=None)
    return train(resolved.config, resolved=resolved, observer=observer, resume=resume, overwrite=overwrite)


class Watcher(Observer):
    """Keeps what it is told; `on(event, *facts)` may interfere."""

    def __init__(self, on: Any = None) -> None:
        self.on = on or (lambda event, *facts: None)
        self.warnings: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.events: list[str] = []

    def _tell(self, event: str, *facts: Any) -> None:
        self.events.append(event)
        self.on(event, *facts)

    def started(self, info: Any) -> None:
        self._tell("started", info)

    def progress(self, stage: Any, done: int, total: int, unit: str) -> None:
        self.on("progress", stage, done, total, unit)

    def evaluated(self, record: Any) -> None:
        self.records.append(dict(record))
        self._tell("evaluated", record)

    def step(self, record: Any) -> None:
        self.records.append(dict(record))
        self._tell("step", record)

    def warning(self, text: str) -> None:
        self.warnings.append(text)
        self._tell("warning", text)

    def finished(self, summary: Any) -> None:
        self._tell("finished", summary)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The records of training of a run."""
    return [record for record in RunFolder(folder).read_metrics() if record["kind"] == "train"]


def evals_of(folder: Path) -> list[dict[str, Any]]:
    """The records of evaluation of a run."""
    return [record for record in RunFolder(folder).read_metrics() if record["kind"] == "eval"]


def rollouts_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """The rows of the rollouts of a step."""
    return read_rows(RunFolder(folder).rollout_file(step))


def saved_in(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first."""
    return checkpoints(RunFolder(folder).checkpoints)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    clocked = ("time/", "tokens_per_second/", "device/")
    return {k: v for k, v in record.items() if k != "time" and not k.startswith(clocked)}


def traces(folder: Path) -> dict[str, Any]:
    """Everything of a run that may not depend on how often it was interrupted."""
    run = RunFolder(folder)
    last = checkpoints(run.checkpoints)[-1]
    state = {k: v for k, v in last.facts.items() if k not in ("torch_rng", "state_crc32")}
    carried = last.path / CARRIED_GROUPS  # compared by its rows: they have seconds
    state["crc32"] = {file: crc for file, crc in state.get("crc32", {}).items() if file != CARRIED_GROUPS}
    with Journal(run.journal) as journal:
        consumed = {
            step: [(e.uid, e.reason, e.reward, e.step) for e in consumed_prompts(journal, step)]
            for step in range(1, journal.step + 1)
        }
        counts = journal.counts()
    tensors = {
        f"{file.relative_to(last.path)}/{key}": value
        for file in sorted(last.path.rglob("*.safetensors"))
        for key, value in load_file(file).items()
    }
    return {
        "metrics": [timeless(r) for r in run.read_metrics()],
        "rollouts": {file.name: untimed(read_rows(file)) for file in sorted(run.rollouts.iterdir())},
        "evals": {file.name: untimed(read_rows(file)) for file in sorted(run.evals.iterdir())},
        "consumed": consumed,
        "counts": counts,
        "state": state,
        "carried": repr(untimed(parquet.read_table(carried).to_pylist())) if carried.is_file() else "",  # NaN is itself
        "step": last.step,
        "tensors": {key: value.numpy().tobytes() for key, value in tensors.items()},
    }


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the seconds that their episodes took."""
    for row in rows:
        if row.get("episode"):
            episode = json.loads(row["episode"])
            episode.pop("seconds", None)
            row["episode"] = json.dumps(episode)
    return rows


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in expected:
        if name == "tensors":
            differing = [key for key in expected[name] if actual[name].get(key) != expected[name][key]]
            assert not differing and actual[name].keys() == expected[name].keys(), (
                f"weights or moments differ: {differing[:3]}"
            )
        else:
            assert actual[name] == expected[name], name
