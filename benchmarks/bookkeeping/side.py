"""Run quickstart steps and count the CPU seconds of bookkeeping that only kills and stale samples make necessary."""

import functools
import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.side import Channel, argument
from proxima.runtime.state.completion_columns import write_rows

SPENT: defaultdict[str, float] = defaultdict(float)
_outer: list[str] = []  # the part being timed; its calls into other parts count towards it


def counted(owner: Any, name: str, part: str) -> None:
    """Wrap a method so that the CPU time it takes in its thread is added to `part`."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _outer:
            return method(*args, **kwargs)
        _outer.append(part)
        start, begin = time.thread_time(), time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            cpu = time.thread_time() - start
            SPENT[part] += cpu
            SPENT["waiting"] += time.perf_counter() - begin - cpu
            _outer.pop()

    setattr(owner, name, wrapper)


def counted_transition(owner: Any, name: str) -> None:
    """Count the CPU time of the executor's `pause` and `resume` without their engine's. They wait for nothing else."""
    method = getattr(owner, name)

    @functools.wraps(method)
    async def wrapper(self: Any, *args: Any) -> None:
        inner = getattr(self.engine, name)
        within = 0.0

        async def engine(*args: Any) -> None:
            nonlocal within
            begin = time.thread_time()
            await inner(*args)
            within += time.thread_time() - begin

        setattr(self.engine, name, engine)
        start = time.thread_time()
        try:
            await method(self, *args)
        finally:
            delattr(self.engine, name)
            SPENT["hooks"] += max(0.0, time.thread_time() - start - within)

    setattr(owner, name, wrapper)


def version_columns(lengths: Sequence[int], slots: int, repeats: int = 20) -> float:
    """Measure the CPU seconds that the versions of a step's tokens take from the scheduler to the Parquet, in
    isolation: write them as the engine does (here at each decoding step), read them back for each completion, pack
    them, take the groups' ages, and write the column."""
    schema = pa.schema([pa.field("policy_version", pa.list_(pa.int32()))])
    start = time.thread_time()
    for _ in range(repeats):
        columns = list[NDArray[Any]]()
        for at in range(0, len(lengths), slots):
            part = lengths[at : at + slots]
            column = np.empty((len(part), max(part)), np.int32)
            for step in range(max(part)):
                column[np.arange(len(part)), np.full(len(part), step)] = 1
            columns += [column[i, :length].copy() for i, length in enumerate(part)]
        columns = [np.broadcast_to(c[:1].copy(), len(c)) if (c == c[0]).all() else c for c in columns]
        np.concatenate(columns, dtype=np.int32)
        min(int(column.min()) for column in columns)
        write_rows(io.BytesIO(), schema, [{"policy_version": c} for c in columns])
    return (time.thread_time() - start) / repeats


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.config import resolve
    from proxima.engine.executor import Executor
    from proxima.runtime.launch.run import train
    from proxima.runtime.state.journal import Journal
    from proxima.runtime.watch.activity import Activity
    from proxima.runtime.watch.observer import Observer
    from proxima.runtime.watch.timeline import Timeline

    torch.set_num_threads(settings["threads"])
    for name in ("enqueue", "generating", "scored", "select", "consume", "metrics", "get", "set", "prompt", "counts"):
        counted(Journal, name, "journal")
    for name in ("admitted", "generated", "scored", "taken", "moved", "advanced", "published"):
        counted(Activity, name, "timeline")
    for name in ("span", "mark", "count", "flush"):
        counted(Timeline, name, "timeline")
    for name in ("pause", "resume"):
        counted_transition(Executor, name)

    marks: list[dict[str, float]] = []
    lengths: list[list[int]] = []

    class Marks(Observer):
        def step(self, record: Any, sample: Any) -> None:
            marks.append({**SPENT, "cpu": record["time/cpu"], "tokens": record["tokens/generated"]})
            lengths.append([round(record["length/mean"])] * record["completions"])

    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "model.path": settings["model"],
            "train.steps": settings["steps"] + 1,
            "eval.before": False,
            "eval.after": False,
            "eval.every": 0,
            "checkpoint.every": 0,
            "runtime.threads": settings["threads"],
            "folder": f"{folder}/run",
        }
        resolved = resolve("recipes/quickstart.yaml", [f"{key}={value}" for key, value in overrides.items()])
        train(resolved.config, resolved=resolved, observer=Marks())
        slots = resolved.config.engine.slots
    parts = sorted(SPENT)
    steps = [
        {part: after[part] - before.get(part, 0.0) for part in parts}
        | {"versions": version_columns(length, slots), "cpu": after["cpu"], "tokens": after["tokens"]}
        for before, after, length in zip(marks, marks[1:], lengths[1:], strict=False)
    ]
    channel.send(steps=steps)


if __name__ == "__main__":
    main()
