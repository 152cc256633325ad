"""`proxima explain`: every value with where it came from, then what they add up to: batch, memory, time."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.config.builder import ResolvedValue
from proxima.config.describe import first_sentence
from proxima.config.errors import Problem
from proxima.config.estimate import (
    Batch,
    Memory,
    Time,
    batch_of,
    gemm_rate,
    memory_of,
    model_facts,
    prompt_tokens,
    time_of,
)
from proxima.config.known_models import known_facts
from proxima.config.machine_checks import data_files_exist, device_exists
from proxima.config.resolve import Resolved
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig
from proxima.config.validate import warnings

VALUE_WIDTH = 36


def values_table(entries: Sequence[ResolvedValue], width: int | None = None) -> str:
    """Four columns: path, value, source, meaning. Lines are cut at `width`; None leaves them whole."""
    rows = [
        (entry.path, cut(in_one_line(entry.value), VALUE_WIDTH), entry.source, first_sentence(entry.help))
        for entry in entries
    ]
    path, value, source = (max((len(row[column]) for row in rows), default=0) for column in range(3))
    lines = (f"{a:<{path}}  {b:<{value}}  {c:<{source}}  {d}".rstrip() for a, b, c, d in rows)
    return "\n".join(line if width is None else cut(line, width) for line in lines)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


class Estimates:
    """Batch, memory and time of a config, each None where what it needs can't be read; `notes` says why.

    The size of a model whose config.json can't be read is that of `known_models`, and `known_size` is true; else it is
    not known.

    Args:
        resolved: the config.
        gemm: FLOP/s to reckon with; None measures it here.
    """

    def __init__(self, resolved: Resolved[RunConfig], gemm: float | None = None) -> None:
        config = resolved.config
        self.notes: list[str] = []
        self.model = self._read(lambda: model_facts(config.model.path, config.model.revision), "model size")
        self.prompt = (
            None  # without a model there is no tokenizer; to try all the same would be another wait for the hub
        )
        self.known_size = False
        if self.model is None and (known := known_facts(config.model.path)) is not None:
            self.model, self.known_size = known, True
            self.notes = [
                f"known size: that of {Path(config.model.path).name} as published; its config.json can't be read here"
            ]
        elif self.model is not None:
            self.prompt = self._read(lambda: prompt_tokens(config), "prompt length")
        self.batch: Batch = batch_of(config, self.prompt if self.prompt is not None else 128)
        if self.prompt is None:
            self.notes.append("prompts are taken to have 128 tokens")
        if (refill := config.algorithm.dynamic_sampling) is not None:
            most = f"{refill.max_num_gen_batches}" if refill.max_num_gen_batches > 0 else "any number"
            self.notes.append(
                "dynamic sampling: the time is that with one generation batch a step; to fill the batch there may "
                f"be {most}"
            )
        self.memory: Memory | None = None
        self.time: Time | None = None
        if self.model is not None:
            self.memory = memory_of(config, self.model, self.batch)
            if gemm is None and not any(device_exists(resolved)):
                gemm = gemm_rate(config.model.compute_dtype, _device(config.model.device))
            self.time = None if gemm is None else time_of(config, self.model, self.batch, gemm)
        if self.time is not None and config.eval.task is not None and not self.time.evaluate:
            self.notes.append("evaluations are not in the time: how many questions they ask can't be read")

    def _read(self, what: Any, name: str) -> Any:
        try:
            return what()
        except (ValueError, OSError, ImportError, AttributeError) as error:
            self.notes.append(f"{name} unknown: {' '.join(str(error).split())}")
            return None


def _device(name: str) -> str:
    from proxima.model.load import resolve_device

    return str(resolve_device(name))


def explain(resolved: Resolved[RunConfig], gemm: float | None = None, width: int | None = None) -> str:
    """The whole text: what the recipe says of itself, its values, and last what they add up to, where it stays on a
    terminal."""
    estimates = Estimates(resolved, gemm)
    header = header_of(resolved)
    blocks = [*([header] if header else []), values_table(resolved.entries, width), _batch_block(estimates)]
    if estimates.memory is not None and estimates.model is not None:
        blocks.append(_memory_block(estimates.memory, estimates.model.parameters, estimates.known_size))
    if estimates.time is not None:
        blocks.append(_time_block(estimates.time, resolved.config.train.steps))
    remarks = [f"note     {note}" for note in estimates.notes]
    remarks += [f"warning  {problem}" for problem in remarks_on(resolved)]
    return "\n\n".join([*blocks, *(["\n".join(remarks)] if remarks else [])])


def header_of(resolved: Resolved[RunConfig]) -> str:
    """The comment that the recipe's file begins with: source, published figures, machine, commands. Empty where there
    is none."""
    if resolved.recipe is None or not Path(resolved.recipe).is_file():
        return ""
    lines = []
    for line in Path(resolved.recipe).read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            text = line.removeprefix("#").removeprefix(" ").rstrip()
            lines.append("".join(char for char in text if char.isprintable()))
    return "\n".join(lines).strip("\n")


def remarks_on(resolved: Resolved[RunConfig]) -> list[Problem]:
    """The warnings, and the data that are not there yet: those stop a run, not somebody who reads what it would be."""
    return [*warnings(resolved), *data_files_exist(resolved)]


def _batch_block(estimates: Estimates) -> str:
    batch = estimates.batch
    prompt = (
        f"prompts have up to {estimates.prompt:,} tokens" if estimates.prompt is not None else "prompt length not known"
    )
    return (
        f"batch    {batch}\n         {prompt}; a step forwards up to {batch.tokens:,} tokens, the longest "
        f"sequence has {batch.longest:,}"
    )


def _memory_block(memory: Memory, parameters: int, known: bool) -> str:
    parts = "  ".join(f"{name} {gibibytes(size)}" for name, size in memory.parts.items())
    size = f"{millions(parameters)} parameters{' (known size)' if known else ''}"
    return f"memory   about {gibibytes(memory.total)} GiB for {size}, all at once\n         {parts}"


def _time_block(time: Time, steps: int) -> str:
    evaluations = f" and their evaluations ({duration(time.evaluate)} each)" if time.evaluate else ""
    return (
        f"time     up to {duration(time.step)} a step (generate {duration(time.generate)}, train "
        f"{duration(time.train)})"
        f", {duration(time.run)} for {steps} steps{evaluations}\n"
        f"         if every completion takes all its tokens; from {time.gemm / 1e9:,.0f} GFLOP/s measured here, "
        "right within a factor 2"
    )


def as_json(resolved: Resolved[RunConfig], gemm: float | None = None) -> dict[str, Any]:
    """The same for programs: `header`, `values`, `batch`, `memory_bytes`, `seconds`, `notes`, `warnings`."""
    estimates = Estimates(resolved, gemm)
    time, memory = estimates.time, estimates.memory
    return {
        "header": header_of(resolved),
        "values": [{"path": e.path, "value": e.value, "source": e.source, "help": e.help} for e in resolved.entries],
        "batch": vars(estimates.batch),
        "parameters": estimates.model.parameters if estimates.model else None,
        "known_size": estimates.known_size,
        "memory_bytes": {**memory.parts, "total": memory.total} if memory else None,
        "seconds": {**vars(time), "step": time.step} if time else None,
        "notes": estimates.notes,
        "warnings": [str(problem) for problem in remarks_on(resolved)],
    }


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.2f}"


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.2f} B"


def duration(seconds: float) -> str:
    """`3.1 s`, `4m 12s`, `2h 05m`, `9 days`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= 100 * 3600:
        return f"{seconds / 86400:,.0f} days"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def terminal_width(stream: Any) -> int | None:
    """Columns of a terminal, None where there is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
