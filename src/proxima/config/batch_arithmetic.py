"""The batch arithmetic of a recipe, whether it generates or trains on a fixed data set: from the config, the first rows
of its data and the tokenizer. Memory and time are forecast by `proxima plan`, another distribution."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from proxima.config.data_here import DataHere
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.sections.data import few_questions_note, longest_completion, text_notes
from proxima.config.sections.offline import OfflineConfig
from proxima.core import SELECTIONS
from proxima.core.advantage.protocol import needs_baseline
from proxima.core.selection.protocol import prompts_factor
from proxima.data import FieldError
from proxima.data.columns import Ints
from proxima.data.errors import counted
from proxima.data.trajectory import Trajectory
from proxima.model.chat.template_inputs import clock_notes, fixed_clock
from proxima.model.demo_model import is_downloadable
from proxima.model.micro_batch import micro_batches
from proxima.rollout.prompt_limits import DynamicSampling
from proxima.task import TASKS
from proxima.task.mix import held_out_part
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Rows, about_rows

# first rows whose tokens are counted
SAMPLE_PROMPTS = 16
SAMPLE_EXAMPLES = 64
# tokens, if none can be counted
ASSUMED_PROMPT = 128
ASSUMED_EXAMPLE = 256

Value = TypeVar("Value")


@dataclass(frozen=True)
class GroupStep:
    """The arithmetic of a step on groups.

    Args:
        prompts, completions, sequences: prompts of a step, including those that `allocate` adds, and completions of
            each; sequences = prompts × completions.
        longest: tokens of the longest sequence, prompt + completion.
        tokens: most tokens forwarded for one pass over the step, shared prompts once with `model.share_prompt`.
        micro_batches: most forwards of one pass over the step.
        budget: tokens of a micro-batch.
        updates: optimizer updates per step, over all epochs.
        kept: completions of each prompt that pruning leaves for the forwards; None: no pruning.
        at_once: prompts of a generation batch under dynamic sampling, 0: as many as it takes to fill the batch; None:
            no dynamic sampling.
        greedy: one more completion of each prompt is generated, as the baseline of the advantage.
    """

    prompts: int
    completions: int
    sequences: int
    longest: int
    tokens: int
    micro_batches: int
    budget: int
    updates: int
    kept: int | None
    at_once: int | None
    greedy: bool

    @property
    def generated(self) -> int:
        """Sequences of the first generation batch, the only one without dynamic sampling."""
        return max(self.at_once or 0, self.prompts) * (self.completions + self.greedy)

    def __str__(self) -> str:
        sequences = group_arithmetic(self.prompts, self.completions, self.kept, self.at_once)
        micro = _in_micro_batches(self.micro_batches)
        updates = "update" if self.updates <= 1 else "updates"
        return f"{sequences} → ≤ {micro} of ≤ {self.budget:,} tokens → {self.updates} {updates}"


@dataclass(frozen=True)
class ExampleStep:
    """The arithmetic of a step on a fixed data set.

    Args:
        examples: rows of a step.
        mean, longest: tokens of an example, all of its sequences together, among the first rows.
        tokens: forwarded in a step of examples of the mean length.
        micro_batches: micro-batches for these tokens.
        budget: tokens of a micro-batch.
        steps: of the run; 0: the number of rows is not known.
    """

    examples: int
    mean: int
    longest: int
    tokens: int
    micro_batches: int
    budget: int
    steps: int

    def __str__(self) -> str:
        micro = _in_micro_batches(self.micro_batches)
        return f"{counted(self.examples, 'example')} → about {micro} of ≤ {self.budget:,} tokens → 1 update"


def _in_micro_batches(count: int) -> str:
    noun = "micro-batch" if count <= 1 else "micro-batches"
    return f"{count:,} {noun}"


class BatchArithmetic:
    """The batch arithmetic of a config; `notes` say what was assumed, `warnings` what is wrong with the rows.

    Args:
        resolved: the config.
        data: what `open_data_here` has opened; None: nothing, and the rows of the task are read if they are here.
        reads_model: False: its model is not here, and asking for its tokenizer would wait for the hub.
    """

    def __init__(self, resolved: Resolved[Any], data: DataHere | None = None, *, reads_model: bool = True) -> None:
        config: RunConfig | OfflineConfig = resolved.config
        self.notes: list[str] = []
        self.warnings = [] if data is None else list(data.notes)
        self.prompt: int | None = None
        self.data = data or DataHere()
        self._config = config
        splits = TASKS.holds(config.task, "mix") or held_out_part(config.task) is not None
        if splits and (data is None or "task" in data.rows):
            about = self._read(lambda: about_rows(self._rows), "rows")
            if about:
                self.notes.append(f"task: {about}")
        downloadable = is_downloadable(config.model.path)
        if downloadable:
            name = Path(config.model.path).name
            self.notes.append(f"{name}: it is not downloaded yet; `proxima train` downloads it (93 MB)")
        self._here = reads_model and not downloadable
        self.batch: GroupStep | ExampleStep
        clock_of_run = fixed_clock(config.data.template_date) if self._here else nullcontext()
        with clock_of_run as clock:
            if isinstance(config, RunConfig):
                self.batch = self._groups(config)
            else:
                self.batch = self._examples(config)
        self.notes += clock_notes(clock, config.data.template_date)

    @cached_property
    def _rows(self) -> Rows:
        """The rows of the task: those that are open, or read here."""
        opened = self.data.rows.get("task")
        if opened is not None:
            return opened
        rows: Rows = self._config.task.rows(self._config.seed)
        return rows

    def _read(self, read: Callable[[], Value], name: str) -> Value | None:
        try:
            return read()
        except (ValueError, OSError, ImportError, AttributeError) as error:
            self.notes.append(f"{name} unknown: {' '.join(str(error).split())}")
            return None

    def _groups(self, config: RunConfig) -> GroupStep:
        """The step of a run that generates; adds notes on what its figures leave out."""
        if self._here:
            prompt = self._read(lambda: longest_prompt(config, self.notes, self._rows), "prompt length")
            if prompt is not None:
                self.prompt = max(1, len(prompt))
                of_images = int((prompt < 0).sum())
                if of_images:
                    self.notes.append(
                        f"the longest prompt read has {len(prompt)} tokens, {of_images} of them of images"
                    )
        if self.prompt is None:
            self.notes.append(assuming("prompts", ASSUMED_PROMPT))
        if config.replayed is not None:
            note = f"replay of {config.replayed}: uses its stored groups"
            self.notes.append(f"{note}; only evaluations generate")
        elif config.algorithm.dynamic_sampling is not None:
            most = config.algorithm.dynamic_sampling.max_num_gen_batches
            batches = most if most > 0 else "any number"
            note = "dynamic sampling: the figures are for one generation batch per step; to fill a step there may"
            self.notes.append(f"{note} be {batches}")
        prompt_length = ASSUMED_PROMPT if self.prompt is None else self.prompt
        batch = batch_of(config, prompt_length)
        if batch.prompts != config.train.prompts_per_step:
            self.notes.append(allocated(config.train.prompts_per_step, batch.prompts))
        if "task" in self.data.rows:
            self.warnings += few_questions_note(batch.prompts, len(self._rows))
        return batch

    def _examples(self, config: OfflineConfig) -> ExampleStep:
        """The step of a run on a fixed data set, from the lengths of its first rows."""
        train = config.train
        counted = None
        if self._here:
            counted = self._read(lambda: example_lengths(config, self.notes, self._rows), "example length")
        rows, lengths = counted or (0, [])
        if not lengths:
            self.notes.append(assuming("examples", ASSUMED_EXAMPLE))
        mean = ASSUMED_EXAMPLE
        if lengths:
            mean = round(sum(lengths) / len(lengths))
        steps = train.steps or 0
        if not steps and rows:
            steps = train.steps_of(rows)
        tokens = train.examples_per_step * mean
        return ExampleStep(
            examples=train.examples_per_step,
            mean=mean,
            longest=max(lengths, default=ASSUMED_EXAMPLE),
            tokens=tokens,
            micro_batches=math.ceil(tokens / train.tokens_per_micro_batch),
            budget=train.tokens_per_micro_batch,
            steps=steps,
        )


def assuming(what: str, tokens: int) -> str:
    """What the figures stand on without data or a tokenizer, and what to do about it."""
    remedy = "with the data and the model's tokenizer on this machine they are counted"
    return f"assuming that {what} have {tokens} tokens: {remedy}"


def allocated(written: int, prompts: int) -> str:
    """Why a step has more prompts than `train.prompts_per_step`."""
    factor = prompts // written
    what = f"train.prompts_per_step={written} becomes {prompts:,}: `prune` with allocate=true drops completions"
    return f"{what}, and takes {factor} times as many prompts, so that an update has as many sequences as without it"


def longest_prompt(config: RunConfig, notes: list[str] | None, rows: Rows) -> Ints:
    """The longest prompt among the first of these questions, in tokens, chat template included; ValueError, with the
    reason, if the data or the tokenizer can't be read. `notes` receives what the template does to the rows."""
    model = config.model.unloaded([config.task, config.episode])
    if notes is not None:
        notes += config.data.template_notes(model, rows, config.sampling.stop)
    count = min(SAMPLE_PROMPTS, len(rows))
    asked = config.data.system, config.data.template_arguments
    prompts = [to_prompt(rows[i], i, model.tokenizer, *asked) for i in range(count)]
    if notes is not None:
        notes += text_notes(config, model, prompts)
    return max((prompt.tokens for prompt in prompts), key=len, default=np.empty(0, np.int32))


def example_lengths(config: OfflineConfig, notes: list[str], rows: Rows) -> tuple[int, list[int]]:
    """The number of rows, and the lengths in tokens of the first usable ones; `notes` as in `longest_prompt`."""
    model = config.model.unloaded([config.task])
    lengths = list[int]()
    notes += config.data.template_notes(model, rows)
    for number in range(min(SAMPLE_EXAMPLES, len(rows))):
        try:
            sequences = config.sequences_of(number, rows[number], model.tokenizer, model.context)
        except FieldError:  # the run skips such a row, or is refused
            continue
        lengths.append(sum(map(len, sequences)))
    return len(rows), [length for length in lengths if length]


def batch_of(config: RunConfig, prompt: int) -> GroupStep:
    """The batch arithmetic for prompts of at most `prompt` tokens and completions of the longest source of the task."""
    train = config.train
    length = longest_completion(config.task, config.sampling)
    prompts, kept = prompts_and_kept(train.prompts_per_step, train.completions_per_prompt, config.algorithm.selection)
    size = kept or train.completions_per_prompt
    shared = config.model.share_prompt
    of_group = size * (prompt + length)
    if shared:
        of_group = prompt + size * length
    groups = prompts // train.updates_per_step
    of_update = _micro_batches(groups, size, prompt, length, train.tokens_per_micro_batch, shared)
    return GroupStep(
        prompts=prompts,
        completions=train.completions_per_prompt,
        sequences=prompts * train.completions_per_prompt,
        longest=prompt + length,
        tokens=prompts * of_group,
        micro_batches=train.updates_per_step * of_update,
        budget=train.tokens_per_micro_batch,
        updates=train.updates_per_step * train.epochs_per_step,
        kept=kept,
        at_once=prompts_at_once(prompts, config.algorithm.dynamic_sampling),
        greedy=needs_baseline(config.algorithm.advantage),
    )


def _micro_batches(prompts: int, completions: int, prompt: int, length: int, budget: int, shared: bool) -> int:
    """The number of micro-batches that the trainer's packing makes of `prompts` groups of maximum length."""
    question = np.zeros(max(prompt, 1), np.int32)
    answer = np.zeros(length, np.int32)
    longest = []
    for group in range(prompts):
        trajectory = Trajectory(prompt_tokens=question, tokens=answer, group=group)
        longest += [(trajectory,)] * completions
    return len(micro_batches(longest, budget, share_prompt=shared))


def prompts_and_kept(prompts: int, size: int, selection: Sequence[object]) -> tuple[int, int | None]:
    """The prompts per step, including those that `allocate` adds, and the completions of each that are trained on;
    None: all. From `train.prompts_per_step`, `train.completions_per_prompt` and the specs that prune."""
    specs: list[Any] = [spec for spec in selection if SELECTIONS.holds(spec, "prune")]
    prompts *= prompts_factor(specs, size)
    kept = size
    for spec in specs:
        if spec.scope == "group":
            kept = spec.kept(kept)
        else:
            kept = math.ceil(spec.kept(prompts * kept) / prompts)
    if not specs:
        return prompts, None
    return prompts, kept


def prompts_at_once(prompts: int, refill: DynamicSampling | None) -> int | None:
    """Prompts of a generation batch: 0 if the running acceptance decides, None without dynamic sampling."""
    if refill is None:
        return None
    return refill.generation_batch(prompts) or 0


def group_arithmetic(prompts: int, completions: int, kept: int | None, at_once: int | None) -> str:
    """Describe the sequences of a step, with pruning and dynamic sampling:
    `8 prompts × 16 completions = 128 sequences, 4 of 16 kept, 96 prompts at a time until it is full`."""
    sequences = counted(prompts * completions, "sequence")
    text = f"{counted(prompts, 'prompt')} × {counted(completions, 'completion')} = {sequences}"
    if kept is not None:
        text += f", {kept} of {completions} kept"
    if at_once is None:
        return text
    how = f"{at_once:,} prompts at a time" if at_once else "generated"
    return f"{text}, {how} until it is full"
