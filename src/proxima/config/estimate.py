"""Estimate the micro-batches, memory and time of a run, whether it generates or trains on a fixed data set, from the
config and the model's config.json; no weights are read.

Every figure is an upper bound or states its assumptions. Measured figures of a run are in its metrics.jsonl.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from proxima.config.describe import kind_of
from proxima.config.families import command_of
from proxima.config.memory_size import AnyConfig, host_memory, memory_of
from proxima.config.model_size import ModelFacts, critic_facts, known_facts, model_facts
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.sections.critic_section import ModelCritic
from proxima.config.sections.model_section import device_exists
from proxima.config.sections.offline_section import OfflineConfig
from proxima.config.sections.ranks_section import launched_ranks
from proxima.config.step_size import ExampleStep, StepSize, at_once, pruned
from proxima.config.training_memory import Share, rank_share
from proxima.core.advantage import needs_baseline
from proxima.data import FieldError, Trajectory
from proxima.model.demo_path import is_downloadable
from proxima.model.micro_batch import micro_batches
from proxima.model.pretrained import context_limit, load_config, load_tokenizer, resolve_device
from proxima.task import TASKS
from proxima.task.prompts import to_prompt

# share of the machine's GEMM rate that generation and training reach: SmolLM2-135M, 2 cores, bf16
GENERATE_SHARE = 0.31  # 1,100 of 3,600 tok/s
TRAIN_SHARE = 0.43  # 520 of 1,200 tok/s
SAMPLE_PROMPTS, SAMPLE_EXAMPLES = 16, 64  # first rows whose tokens are counted
ASSUMED_PROMPT, ASSUMED_EXAMPLE = 128, 256  # tokens, if none can be counted

Value = TypeVar("Value")


class Estimates:
    """Batch, memory and time of a config; memory and time are None if their inputs can't be read, and `notes` says why.

    The size of a model whose config.json can't be read comes from `model_size.KNOWN`, and `known_size` is true; a model
    that is not listed there has no size.

    Args:
        resolved: the config.
        gemm: FLOP/s to assume; None: measured on this machine.
        share: the share of a rank; None: that of the config's placement.
    """

    def __init__(self, resolved: Resolved[Any], gemm: float | None = None, share: Share | None = None) -> None:
        config: AnyConfig = resolved.config
        self.share = share or rank_share(config.placement)
        self.notes: list[str] = []
        self.known_size = False
        self.model = self._size(config)
        self.prompt: int | None = None
        self.memory: dict[str, int] | None = None
        self.host: dict[str, int] = {}
        self.time: Time | None = None
        if share is None and self.share.ranks > 1 and not hasattr(config.placement, "ranks") and not launched_ranks():
            unknown = f"torchrun sets the number of ranks; memory is estimated for {self.share.ranks}"
            self.notes.append(f"{unknown}: set WORLD_SIZE=8 before this command for another number")
        task = config.task
        if TASKS.holds(task, "mix") and (shares := self._read(lambda: task.shares(config.seed), "shares")):
            self.notes.append(f"task: {shares}")
        self.batch: StepSize | ExampleStep
        if isinstance(config, RunConfig):
            self.batch, self.steps = self._groups(config), config.train.steps
        else:
            self.batch = self._examples(config)
            self.steps = self.batch.steps
        if (own := self.model) is None:
            return
        teacher, critic = None, None
        if isinstance(config, RunConfig):
            if (distillation := config.algorithm.distillation) is not None:
                teacher = self._read(lambda: model_facts(distillation.path), "teacher size")
            critic = self._read(lambda: critic_facts(config, own), "critic size")
        self.memory = self._read(lambda: memory_of(config, own, self.batch, teacher, critic, self.share), "memory")
        self.host = self._read(lambda: host_memory(config, own, self.share), "host memory") or {}
        if gemm is None and not any(device_exists(config.model)):
            gemm = gemm_rate(config.model.compute_dtype, str(resolve_device(config.model.device)))
        if gemm is not None:
            self.time = self._read(lambda: time_of(config, own, self.batch, gemm, teacher, critic), "time")
        if self.time is not None and self.share.ranks > 1:
            self.notes.append(f"the time is that of one process; {self.share.ranks} ranks share the training")
        if self.time is not None and config.eval.task is not None and not self.time.evaluate:
            why = "eval.limit=0 takes all held-out rows"
            if isinstance(config, RunConfig):
                why = "how many questions they ask can't be read"
            self.notes.append(f"evaluations are not in the time: {why}")

    def _read(self, read: Callable[[], Value], name: str) -> Value | None:
        try:
            return read()
        except (ValueError, OSError, ImportError, AttributeError) as error:
            self.notes.append(f"{name} unknown: {' '.join(str(error).split())}")
            return None

    def _size(self, config: AnyConfig) -> ModelFacts | None:
        spec, counted = config.model, None
        if not is_downloadable(spec.path):
            counted = self._read(lambda: model_facts(spec.path, spec.revision, spec.lora), "model size")
        if counted is not None or (published := known_facts(spec.path)) is None:
            return counted
        self.known_size = True
        not_here = f"it is not downloaded yet; `proxima {command_of(config)}` downloads it (93 MB)"
        reason = not_here if is_downloadable(spec.path) else "its config.json can't be read here"
        self.notes = [f"known size: that of {Path(spec.path).name} as published; {reason}"]
        if spec.lora is not None:
            self.notes.append("the memory excludes the adapter, whose size is unknown until the model is downloaded")
        return published

    def _groups(self, config: RunConfig) -> StepSize:
        """The step of a run that generates; adds notes on what its figures leave out."""
        if self.model is not None and not self.known_size:  # else trying its tokenizer would wait for the hub again
            self.prompt = self._read(lambda: longest_prompt(config), "prompt length")
        if self.prompt is None:
            self.notes.append(f"prompts are taken to have {ASSUMED_PROMPT} tokens")
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
        return batch_of(config, ASSUMED_PROMPT if self.prompt is None else self.prompt)

    def _examples(self, config: OfflineConfig) -> ExampleStep:
        """The step of a run on a fixed data set, from the lengths of its first rows."""
        train = config.train
        counted = None if self.known_size else self._read(lambda: example_lengths(config), "example length")
        rows, lengths = counted or (0, [])
        if not lengths:
            self.notes.append(f"examples are taken to have {ASSUMED_EXAMPLE} tokens")
        mean = round(sum(lengths) / len(lengths)) if lengths else ASSUMED_EXAMPLE
        tokens = train.examples_per_step * mean
        return ExampleStep(
            examples=train.examples_per_step,
            mean=mean,
            longest=max(lengths, default=ASSUMED_EXAMPLE),
            tokens=tokens,
            micro_batches=math.ceil(tokens / train.tokens_per_micro_batch),
            budget=train.tokens_per_micro_batch,
            steps=train.steps or (train.steps_of(rows) if rows else 0),
        )


@dataclass(frozen=True)
class Time:
    """Seconds, if all completions have `max_tokens` tokens; `gemm` is the assumed rate, FLOP/s."""

    generate: float
    train: float
    evaluate: float
    run: float
    gemm: float

    @property
    def step(self) -> float:
        return self.generate + self.train


def longest_prompt(config: RunConfig) -> int:
    """The length of the longest prompt among the first questions, in tokens, chat template included; ValueError, with
    the reason, if the data or the tokenizer can't be read."""
    tokenizer: Any = load_tokenizer(config.model.path, config.model.revision)
    rows = config.task.rows(config.seed)
    count = min(SAMPLE_PROMPTS, len(rows))
    asked = config.data.system, config.data.template_arguments
    return max((len(to_prompt(rows[i], i, tokenizer, *asked).tokens) for i in range(count)), default=1)


def example_lengths(config: OfflineConfig) -> tuple[int, list[int]]:
    """The number of rows, and the lengths in tokens of the first usable ones."""
    tokenizer: Any = load_tokenizer(config.model.path, config.model.revision)
    text = load_config(config.model.path, config.model.revision).get_text_config()
    limit = context_limit(text)
    context, rows, lengths = min(config.model.max_length or limit, limit), config.task.rows(config.seed), []
    for number in range(min(SAMPLE_EXAMPLES, len(rows))):
        try:
            lengths.append(sum(map(len, config.sequences_of(number, rows[number], tokenizer, context))))
        except FieldError:  # the run skips such a row, or is refused
            continue
    return len(rows), [length for length in lengths if length]


def engine_notes(config: Any) -> Iterator[str]:
    """Yield a line for each engine that is a server, on the data sent to it, and one for an engine that differs from
    the trainer on purpose."""
    algorithm = config.algorithm
    places = [("engine", config.engine, "prompts, completions and, at the start and after each step, all weights")]
    if algorithm.needs_reference:
        places.append(("algorithm.reference_engine", algorithm.reference_engine, "tokens, for the reference"))
    if algorithm.distillation is not None:
        places.append(("algorithm.distillation.engine", algorithm.distillation.engine, "tokens, for the teacher"))
    for path, spec, goods in places:
        if (urls := getattr(spec, "urls", None)) is not None:
            yield f"{path}: {kind_of(spec)} {_where(spec, urls)} gets {goods}"
    if settings := getattr(config.engine, "mismatch", ""):
        yield f"engine: differs from the trainer on purpose, by {settings}: see docs/mismatch.md"
    if getattr(config.engine, "urls", None) is not None:
        folder = config.engine.weight_folder or "a folder in memory (/dev/shm)"
        yield (
            f"engine: new weights are written to {folder} (weights={config.engine.weights}), read by each server and "
            f"proven by {config.engine.probe_tokens} tokens; their memory is not included, and the time to generate is "
            "that of the engine here"
        )


def _where(spec: Any, urls: tuple[str, ...]) -> str:
    if spec.serve is None:
        return f"at {', '.join(urls)}"
    count = spec.serve.replicas
    return f"in {count} process{'es' if count > 1 else ''} of its own, started and stopped with the run,"


def batch_of(config: RunConfig, prompt: int) -> StepSize:
    """The batch arithmetic for prompts of at most `prompt` tokens and completions of `sampling.max_tokens`."""
    train, length = config.train, config.sampling.max_tokens
    prompts, kept = pruned(train.prompts_per_step, train.completions_per_prompt, config.algorithm.selection)
    size, shared = kept or train.completions_per_prompt, config.model.share_prompt
    groups = prompts // train.updates_per_step
    return StepSize(
        prompts=prompts,
        completions=train.completions_per_prompt,
        sequences=prompts * train.completions_per_prompt,
        longest=prompt + length,
        tokens=prompts * (prompt + size * length if shared else size * (prompt + length)),
        micro_batches=train.updates_per_step
        * _micro_batches(groups, size, prompt, length, train.tokens_per_micro_batch, shared),
        budget=train.tokens_per_micro_batch,
        updates=train.updates_per_step * train.epochs_per_step,
        kept=kept,
        at_once=at_once(prompts, config.algorithm.dynamic_sampling),
        greedy=needs_baseline(config.algorithm.advantage),
    )


def _micro_batches(prompts: int, completions: int, prompt: int, length: int, budget: int, shared: bool) -> int:
    """The number of micro-batches that the trainer's packing makes of `prompts` groups of maximum length."""
    question, answer = np.zeros(max(prompt, 1), np.int32), np.zeros(length, np.int32)
    groups = (Trajectory(prompt_tokens=question, tokens=answer, group=group) for group in range(prompts))
    longest = [(trajectory,) for trajectory in groups for _ in range(completions)]
    return len(micro_batches(longest, budget, share_prompt=shared))


def time_of(
    config: AnyConfig,
    model: ModelFacts,
    batch: StepSize | ExampleStep,
    gemm: float,
    teacher: ModelFacts | None = None,
    critic: ModelFacts | None = None,
) -> Time:
    """Estimate the time: 2 FLOP per parameter and token to generate, 6 to train, 4 with LoRA (2 more for each extra
    forward), over a share of the GEMM rate; `proximal: next` as if every completion had one more forward. With dynamic
    sampling only the first generation batch counts, because the number of batches depends on the questions."""
    products, spec = 6 if config.model.lora is None else 4, config.eval  # frozen weights have no gradient
    if isinstance(config, RunConfig):
        assert isinstance(batch, StepSize)
        sampling = config.eval.sampling or config.sampling
        steps, generate = config.train.steps, model.parameters * _generation(config, batch) / (GENERATE_SHARE * gemm)
        flop = model.parameters * (products * config.train.epochs_per_step + 2 * _extra_forwards(config))
        flop = batch.tokens * (flop + (2 * teacher.parameters if teacher is not None else 0))
        train = (flop + _critic_flop(config, batch, critic)) / (TRAIN_SHARE * gemm)
        prompt, length = batch.longest - config.sampling.max_tokens, sampling.max_tokens
        evaluate = 2 * model.parameters * _answers(config) * (prompt + length) / (GENERATE_SHARE * gemm)
    else:
        assert isinstance(batch, ExampleStep)
        steps, generate = batch.steps, 0.0
        train = model.parameters * batch.tokens * products / (TRAIN_SHARE * gemm)
        rows = spec.limit if spec.task is not None else 0
        evaluate = 2 * model.parameters * batch.mean * rows / (TRAIN_SHARE * gemm)
    during = (steps - 1) // spec.every if spec.every else 0
    evaluations = spec.before + spec.after + during if spec.task is not None else 0
    return Time(generate, train, evaluate, steps * (generate + train) + evaluations * evaluate, gemm)


def _generation(config: RunConfig, batch: StepSize) -> int:
    """The engine's FLOP per parameter in a step; 0 for a replay, which generates nothing."""
    if config.replayed is not None:
        return 0
    (prompts, sequences), length = batch.generated, config.sampling.max_tokens
    flop = 2 * (sequences * length + prompts * (batch.longest - length))
    scored = config.algorithm.proximal == "next" and config.algorithm.next_from == "engine"
    return flop + 2 * sequences * batch.longest * scored  # scored one version later, at most once per token


def _extra_forwards(config: RunConfig) -> int:
    """The number of forwards of each token of a step, not counting those of its updates."""
    algorithm = config.algorithm
    following = algorithm.proximal == "next" and algorithm.next_from == "trainer"
    return (algorithm.proximal in ("recompute", "next")) + algorithm.needs_reference + following


def _critic_flop(config: RunConfig, batch: StepSize, critic: ModelFacts | None) -> int:
    """The critic's FLOP in a step: a forward for the values, and training on all completions, pruned ones too."""
    if critic is None or not isinstance(config.critic, ModelCritic):
        return 0
    dropped = 0 if batch.kept is None else batch.prompts * (batch.completions - batch.kept) * config.sampling.max_tokens
    return critic.parameters * (2 + 6 * config.critic.training(config.train).epochs_per_step) * (batch.tokens + dropped)


def _answers(config: RunConfig) -> int:
    """The number of completions of an evaluation; a set of unknown size counts as 0."""
    answers = 0
    for held_out in config.eval.all_sets.values():
        questions = held_out.limit
        if questions == 0 or TASKS.holds(held_out.task, "jsonl", "parquet"):  # a local file; others may need a download
            with suppress(ValueError):
                count = len(held_out.task.rows(config.seed))
                questions = min(questions or count, count)
        answers += questions * held_out.samples
    return answers


def gemm_rate(dtype: str, device: str = "cpu", size: int = 1024, seconds: float = 0.2) -> float:
    """Measure the FLOP/s of `size`³ matrix products in `dtype`, the best of several; takes about `seconds`."""
    from torch.utils.benchmark import Timer  # warms up, and waits for the device

    kind = getattr(torch, dtype)
    a, b = (torch.linspace(-1, 1, size * size, device=device).view(size, size).to(kind) for _ in range(2))
    timer = Timer("mm(a, b)", globals={"mm": torch.mm, "a": a, "b": b}, num_threads=torch.get_num_threads())
    return float(2 * size**3 / min(timer.blocked_autorange(min_run_time=seconds).times))
