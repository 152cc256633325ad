"""Runs that are killed on one number of ranks and resumed on another."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ranks.cases import Case
from benchmarks.ranks.compare import records, tensors
from benchmarks.ranks.launch import run_command, start, wait
from benchmarks.ranks.run import Place, compared, row_of

PLACED = "placement=torchrun"
CASES = (
    Case(name="GRPO with a trust region", row="resume", overrides=("checkpoint.every=1",)),
    Case(name="critic", row="resume", recipe="cpu/ppo_critic", overrides=("checkpoint.every=1",)),
    Case(name="DPO", row="resume", recipe="cpu/dpo", overrides=("checkpoint.every=1",)),
    Case(  # the reference is loaded once more
        name="DPO, reference not cached",
        row="resume",
        recipe="cpu/dpo",
        overrides=("checkpoint.every=1", "preference.cache=null"),
    ),
)


def words_on(case: Case, place: Place, folder: Path, ranks: int, *more: str) -> list[str]:
    return [*case.words(place.models, folder), *([PLACED] if ranks > 1 else []), *more]


def resumed(case: Case, place: Place) -> Iterator[dict[str, Any]]:
    """Yield the rows of a case: killed on 2 ranks and resumed on 2, 1 and 4; killed on 1 and resumed on 2."""
    folder = place.root / "runs"
    for ranks, again in ((2, (2, 1, 4)), (1, (2,))):
        whole, killed = folder / f"whole-{ranks}", folder / f"killed-{ranks}"
        failure = run_command(words_on(case, place, whole, ranks), ranks, folder / "whole.log")
        if failure:
            yield row_of(case, ranks, failure=failure)
            continue
        processes = start(words_on(case, place, killed, ranks), ranks, folder / "killed.log")
        metrics = killed / "metrics.jsonl"

        def third_step(metrics: Path = metrics) -> bool:
            return metrics.exists() and '"train", "step": 3' in metrics.read_text(encoding="utf-8")

        wait(processes, folder / "killed.log", until=third_step)
        before = {line.get("step") for line in records(killed)}
        for size in again:
            copy = folder / f"{ranks}-{size}"
            shutil.copytree(killed, copy)
            log = folder / f"{ranks}-{size}.log"
            failure = run_command(words_on(case, place, copy, size, "--resume"), size, log)
            named = replace(case, name=f"{case.name}, killed on {ranks}, resumed")
            if failure:
                yield row_of(named, size, failure=failure)
                continue
            row = compared(named, size, whole, copy, place) | {"killed_after_step": max(before, default=0)}
            if size == ranks:  # to the bit
                row["within"] = row["within"] and row["metric"] == row["weight"] == 0 and same_tensors(whole, copy)
            yield row


def same_tensors(folder: Path, other: Path) -> bool:
    """Return True if weights and optimizer state of the last checkpoints are equal bit for bit."""
    first, second = by_place(tensors(folder)), by_place(tensors(other))
    return first.keys() == second.keys() and all(bool((second[name] == x).all()) for name, x in first.items())


def by_place(tensors: dict[str, Any]) -> dict[str, Any]:
    """Key scalars without their file: a step count is the same on all ranks, and any of them may write it."""
    return {name if x.dim() else name.partition(":")[2]: x for name, x in tensors.items()}
