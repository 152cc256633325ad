"""Batch, memory and time of a config, with the comment of its recipe and the warnings: what `proxima explain` shows."""

from dataclasses import replace
from typing import Any

from proxima.config.builder import ResolvedValue
from proxima.config.engine_checks import engine_notes
from proxima.config.estimate import batch_of, critic_facts, longest_prompt, memory_of, model_facts, time_of
from proxima.config.model_estimate import ModelEstimates
from proxima.config.offline_estimate import OfflineEstimates
from proxima.config.offline_schema import OfflineConfig
from proxima.config.problems import Problem
from proxima.config.resolve import Resolved
from proxima.config.schema import RunConfig
from proxima.config.validate import to_do, warnings
from proxima.data import UserError
from proxima.data.recipe_files import find_recipe
from proxima.task.column_mapping import ColumnMapping


class Estimates(ModelEstimates):
    """Batch, memory and time of a config, each None where what it needs can't be read; `notes` says why.

    Args:
        resolved: the config.
        gemm: FLOP/s to reckon with; None measures it here.
    """

    def __init__(self, resolved: Resolved[RunConfig], gemm: float | None = None) -> None:
        super().__init__(resolved)
        config = resolved.config
        self.prompt: int | None = None  # without a model, trying its tokenizer would only wait for the hub again
        if self.model is not None and not self.known_size:
            self.prompt = self._read(lambda: longest_prompt(config), "prompt length")
        self.batch = batch_of(config, self.prompt if self.prompt is not None else 128)
        if self.prompt is None:
            self.notes.append("prompts are taken to have 128 tokens")
        self.notes += engine_notes(config)
        if config.replayed is not None:
            note = f"replay of {config.replayed}: the groups are those it stored"
            self.notes.append(f"{note}; only answers are generated")
        elif (refill := config.algorithm.dynamic_sampling) is not None:
            most = f"{refill.max_num_gen_batches}" if refill.max_num_gen_batches > 0 else "any number"
            note = "dynamic sampling: the time is that with one generation batch a step; to fill the batch there may be"
            self.notes.append(f"{note} {most}")
        if any(getattr(spec, "by_accuracy", False) for spec in config.algorithm.selection):
            rule = "groups are compared by accuracy; those of which no reward says what is right, by their rewards"
            self.notes.append(f"drop_uniform_groups: {rule}")
        if (own := self.model) is not None:
            distillation, teacher = config.algorithm.distillation, None
            if distillation is not None:
                teacher = self._read(lambda: model_facts(distillation.path), "teacher size")
            critic = self._read(lambda: critic_facts(config, own), "critic size")
            self.memory = memory_of(config, own, self.batch, teacher, critic)
            if (rate := self._rate(resolved, gemm)) is not None:
                self.time = time_of(config, own, self.batch, rate, teacher, critic)
        if self.time is not None and config.eval.task is not None and not self.time.evaluate:
            self.notes.append("evaluations are not in the time: how many questions they ask can't be read")


def shown_entries(resolved: Resolved[Any]) -> list[ResolvedValue]:
    """The values with their sources; null for the column of answers that the data lacks, where a local file tells."""
    return [_as_read(resolved, entry) for entry in resolved.entries]


def _as_read(resolved: Resolved[Any], entry: ResolvedValue) -> ResolvedValue:
    path, _, name = entry.path.rpartition(".")
    if name != "answer" or not isinstance(task := resolved.get(path), ColumnMapping):
        return entry
    try:
        columns = task.columns()
    except (UserError, OSError, ValueError):
        return entry  # missing or broken data has its own line
    absent = columns is not None and task.lacks_answer(columns)
    return replace(entry, value=None, source="the data has no such column", is_default=False) if absent else entry


def estimates_of(resolved: Resolved[Any], gemm: float | None = None) -> Estimates | OfflineEstimates:
    """The estimates of a config of any training command."""
    offline = isinstance(resolved.config, OfflineConfig)
    return OfflineEstimates(resolved, gemm) if offline else Estimates(resolved, gemm)


def header_of(resolved: Resolved[Any]) -> str:
    """The comment that the recipe's file begins with: source, published figures, machine, commands; may be empty."""
    if resolved.recipe is None or not (file := find_recipe(resolved.recipe)).is_file():
        return ""
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            text = line.removeprefix("#").removeprefix(" ").rstrip()
            lines.append("".join(char for char in text if char.isprintable()))
    return "\n".join(lines).strip("\n")


def config_remarks(resolved: Resolved[Any]) -> list[Problem]:
    """The warnings, and what is still to do: an error of `train`, a warning for a reader."""
    return [*warnings(resolved), *to_do(resolved)]


def as_json(resolved: Resolved[Any], gemm: float | None = None) -> dict[str, Any]:
    """The same for programs: `header`, `values`, `batch`, `memory_bytes`, `seconds`, `notes`, `warnings`."""
    estimates = estimates_of(resolved, gemm)
    time, memory = estimates.time, estimates.memory
    return {
        "header": header_of(resolved),
        "values": [
            {"path": e.path, "value": e.value, "source": e.source, "help": e.help} for e in shown_entries(resolved)
        ],
        "batch": vars(estimates.batch),
        "parameters": estimates.model.parameters if estimates.model else None,
        "known_size": estimates.known_size,
        "memory_bytes": {**memory, "total": sum(memory.values())} if memory else None,
        "seconds": {**vars(time), "step": time.step} if time else None,
        "notes": estimates.notes,
        "warnings": [str(problem) for problem in config_remarks(resolved)],
    }
