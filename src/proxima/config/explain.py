"""`proxima explain`: every value with where it came from, then what they add up to: batch, memory, time."""

import shutil
from collections.abc import Sequence
from typing import Any

from proxima.config.check import device_is_there, warnings
from proxima.config.describe import first_sentence
from proxima.config.estimate import Batch, Memory, Time, batch_of, gemm_rate, memory_of, model_facts, prompt_tokens, time_of
from proxima.config.resolve import Entry, Resolved
from proxima.config.scalars import in_one_line

VALUE_WIDTH = 36


def values_table(entries: Sequence[Entry], width: int | None = None) -> str:
    """Four columns: path, value, source, meaning. Lines are cut at `width`; None leaves them whole."""
    rows = [(entry.path, cut(in_one_line(entry.value), VALUE_WIDTH), entry.source, first_sentence(entry.help)) for entry in entries]
    path, value, source = (max((len(row[column]) for row in rows), default=0) for column in range(3))
    lines = (f"{a:<{path}}  {b:<{value}}  {c:<{source}}  {d}".rstrip() for a, b, c, d in rows)
    return "\n".join(line if width is None else cut(line, width) for line in lines)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


class Estimates:
    """Batch, memory and time of a config, each None where what it needs can't be read; `notes` says why.

    Args:
        resolved: the config.
        gemm: FLOP/s to reckon with; None measures it here.
    """

    def __init__(self, resolved: Resolved, gemm: float | None = None) -> None:
        config = resolved.config
        self.notes: list[str] = []
        self.model = self._read(lambda: model_facts(config.model.path, config.model.revision), "model size")
        self.prompt = None  # without a model there is no tokenizer; to try all the same would be another wait for the hub
        if self.model is not None:
            self.prompt = self._read(lambda: prompt_tokens(config), "prompt length")
        self.batch: Batch = batch_of(config, self.prompt if self.prompt is not None else 128)
        if self.prompt is None:
            self.notes.append("prompts are taken to have 128 tokens")
        if (refill := config.algorithm.dynamic_sampling) is not None:
            most = f"{refill.max_num_gen_batches}" if refill.max_num_gen_batches > 0 else "any number"
            self.notes.append(f"dynamic sampling: the time is that with one generation batch a step; to fill the batch there may be {most}")
        self.memory: Memory | None = None
        self.time: Time | None = None
        if self.model is not None:
            self.memory = memory_of(config, self.model, self.batch)
            if gemm is None and not any(device_is_there(resolved)):
                gemm = gemm_rate(config.model.compute_dtype, _device(config.model.device))
            self.time = None if gemm is None else time_of(config, self.model, self.batch, gemm)

    def _read(self, what: Any, name: str) -> Any:
        try:
            return what()
        except (ValueError, OSError, ImportError, AttributeError) as error:
            self.notes.append(f"{name} unknown: {' '.join(str(error).split())}")
            return None


def _device(name: str) -> str:
    from proxima.model.load import resolve_device

    return str(resolve_device(name))


def explain(resolved: Resolved, gemm: float | None = None, width: int | None = None) -> str:
    """The whole text."""
    estimates = Estimates(resolved, gemm)
    blocks = [values_table(resolved.entries, width), _batch_block(estimates)]
    if estimates.memory is not None and estimates.model is not None:
        blocks.append(_memory_block(estimates.memory, estimates.model.parameters))
    if estimates.time is not None:
        blocks.append(_time_block(estimates.time, resolved.config.train.steps))
    remarks = [f"note     {note}" for note in estimates.notes]
    remarks += [f"warning  {problem}" for problem in warnings(resolved)]
    return "\n\n".join([*blocks, *(["\n".join(remarks)] if remarks else [])])


def _batch_block(estimates: Estimates) -> str:
    batch = estimates.batch
    prompt = f"prompts have up to {estimates.prompt:,} tokens" if estimates.prompt is not None else "prompt length not known"
    return f"batch    {batch}\n         {prompt}; a step forwards up to {batch.tokens:,} tokens, the longest sequence has {batch.longest:,}"


def _memory_block(memory: Memory, parameters: int) -> str:
    parts = "  ".join(f"{name} {gibibytes(size)}" for name, size in memory.parts.items())
    return f"memory   about {gibibytes(memory.total)} GiB for {millions(parameters)} parameters, all at once\n         {parts}"


def _time_block(time: Time, steps: int) -> str:
    return (
        f"time     up to {duration(time.step)} a step (generate {duration(time.generate)}, train {duration(time.train)})"
        f", {duration(time.run)} for {steps} steps and their evaluations ({duration(time.evaluate)} each)\n"
        f"         if every completion takes all its tokens; from {time.gemm / 1e9:,.0f} GFLOP/s measured here, right within a factor 2"
    )


def as_json(resolved: Resolved, gemm: float | None = None) -> dict[str, Any]:
    """The same for programs: `values`, `batch`, `memory_bytes`, `seconds`, `notes`, `warnings`."""
    estimates = Estimates(resolved, gemm)
    time, memory = estimates.time, estimates.memory
    return {
        "values": [{"path": e.path, "value": e.value, "source": e.source, "help": e.help} for e in resolved.entries],
        "batch": vars(estimates.batch),
        "parameters": estimates.model.parameters if estimates.model else None,
        "memory_bytes": {**memory.parts, "total": memory.total} if memory else None,
        "seconds": {**vars(time), "step": time.step} if time else None,
        "notes": estimates.notes,
        "warnings": [str(problem) for problem in warnings(resolved)],
    }


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.2f}"


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e9 else f"{count / 1e9:,.2f} B"


def duration(seconds: float) -> str:
    """`3.1 s`, `4m 12s`, `2h 05m`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def terminal_width(stream: Any) -> int | None:
    """Columns of a terminal, None where there is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
