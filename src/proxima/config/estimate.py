"""What a run will need: micro-batches, memory, time. From the config and the model's config.json; no weights are read.

Every figure is an upper bound or says what it rests on. Measured figures of a run are in its metrics.jsonl.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from proxima.config.critic_schema import ModelCritic
from proxima.config.schema import ModelConfig, RunConfig
from proxima.core.advantage import needs_baseline
from proxima.core.selection import Prune, prompts_factor
from proxima.data import Trajectory
from proxima.engine import LocalProcess
from proxima.model.load import load_shape, load_tokenizer
from proxima.model.lora import Lora, adapter_parameters
from proxima.model.micro_batch import micro_batches
from proxima.reward import ModelReward
from proxima.rollout.dynamic_sampling import DynamicSampling
from proxima.task import Jsonl, Parquet
from proxima.task.prompts import to_prompt

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# share of the machine's GEMM rate that generation and training reach: SmolLM2-135M, 2 cores, bf16
GENERATE_SHARE = 0.31  # 1,100 of 3,600 tok/s
TRAIN_SHARE = 0.43  # 520 of 1,200 tok/s
SAMPLE_ROWS = 16  # questions looked at for the length of a prompt


@dataclass(frozen=True)
class ModelFacts:
    """A model's size.

    Args:
        parameters: number of weights, tied ones once.
        layers, hidden, intermediate, vocabulary: as in config.json.
        kv_width: elements of one layer's keys of one token: key-value heads × head size.
        adapter: number of an adapter's weights; None: without `model.lora`, or not counted.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    adapter: int | None = None


def model_facts(path: str, revision: str | None = None, lora: Lora | None = None) -> ModelFacts:
    """Read config.json and build the model without weights (on the meta device), which counts its parameters exactly.
    UserError if the model can't be found, its architecture is not known, or it lacks the layers of an adapter."""
    model = load_shape(path, revision)
    text: Any = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        adapter=None if lora is None else adapter_parameters(model, lora),
    )


def longest_prompt(config: RunConfig) -> int:
    """The longest prompt among the first questions, tokens, chat template included; ValueError, which says why, if the
    data or the tokenizer can't be read."""
    tokenizer: Any = load_tokenizer(config.model.path, config.model.revision)
    rows = config.task.rows(config.seed)
    count = min(SAMPLE_ROWS, len(rows))
    asked = config.data.system, config.data.template_arguments
    return max((len(to_prompt(rows[i], i, tokenizer, *asked).tokens) for i in range(count)), default=1)


@dataclass(frozen=True)
class StepSize:
    """The arithmetic of a step.

    Args:
        prompts, completions, sequences: of a step, those that `allocate` adds included; sequences = prompts ×
            completions.
        longest: tokens of the longest sequence, prompt + completion.
        tokens: most tokens forwarded for one pass over the step, shared prompts once where that is on.
        micro_batches: most forwards of one pass over the step.
        budget: tokens of a micro-batch.
        updates: optimizer steps a step, all epochs.
        kept: completions of each prompt that pruning leaves for the forwards; None: it is not asked for.
        at_once: prompts of a generation batch under dynamic sampling, 0: as many as it takes to fill the batch; None:
            it is not asked for.
        greedy: one more completion of each prompt is generated, the baseline that the advantage compares with.
    """

    prompts: int
    completions: int
    sequences: int
    longest: int
    tokens: int
    micro_batches: int
    budget: int
    updates: int
    kept: int | None = None
    at_once: int | None = None
    greedy: bool = False

    @property
    def generated(self) -> tuple[int, int]:
        """Prompts and sequences of the first generation batch; without dynamic sampling there is no other."""
        prompts = max(self.at_once or 0, self.prompts)
        return prompts, prompts * (self.completions + self.greedy)

    def __str__(self) -> str:
        micro = f"{self.micro_batches:,} micro-batch" + ("es" if self.micro_batches > 1 else "")
        updates = f"{self.updates} update" + ("s" if self.updates > 1 else "")
        sequences = f"{self.prompts} prompts × {self.completions} completions = {self.sequences:,} sequences"
        left = besides(self.completions, self.kept, self.at_once)
        return f"{sequences}{left} → ≤ {micro} of ≤ {self.budget:,} tokens → {updates}"


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


def pruned(prompts: int, size: int, selection: Sequence[object]) -> tuple[int, int | None]:
    """Prompts a step, those included that `allocate` adds, and how many completions of each are trained on; None: all.
    From `train.prompts_per_step`, `train.completions_per_prompt` and the specs that prune."""
    specs = [spec for spec in selection if isinstance(spec, Prune)]
    prompts *= prompts_factor(specs, size)
    kept = size
    for spec in specs:
        kept = spec.kept(kept) if spec.scope == "group" else math.ceil(spec.kept(prompts * kept) / prompts)
    return prompts, kept if specs else None


def at_once(prompts: int, refill: DynamicSampling | None) -> int | None:
    """Prompts of a generation batch: 0 where the running acceptance says it, None without dynamic sampling."""
    return None if refill is None else refill.generation_batch(prompts) or 0


def besides(completions: int, kept: int | None, together: int | None) -> str:
    """`, 4 of 16 kept, 96 prompts at a time until it is full`: what pruning and dynamic sampling add to a step."""
    left = "" if kept is None else f", {kept} of {completions} kept"
    if together is None:
        return left
    return f"{left}, {f'{together:,} prompts at a time' if together else 'generated'} until it is full"


def _micro_batches(prompts: int, completions: int, prompt: int, length: int, budget: int, shared: bool) -> int:
    """What the trainer's own packing makes of `prompts` groups when everything is as long as it can be."""
    question, answer = np.zeros(max(prompt, 1), np.int32), np.zeros(length, np.int32)
    groups = (Trajectory(prompt_tokens=question, tokens=answer, group=group) for group in range(prompts))
    longest = [(trajectory,) for trajectory in groups for _ in range(completions)]
    return len(micro_batches(longest, budget, share_prompt=shared))


def critic_facts(config: RunConfig, model: ModelFacts) -> ModelFacts | None:
    """The size of a critic with weights of its own, those of an output layer included if it has one; None without."""
    critic = config.critic
    if not isinstance(critic, ModelCritic):
        return None
    return model_facts(critic.path, critic.revision) if critic.path else replace(model, adapter=None)


def memory_of(
    config: RunConfig,
    model: ModelFacts,
    batch: StepSize,
    teacher: ModelFacts | None = None,
    critic: ModelFacts | None = None,
) -> dict[str, int]:
    """Bytes of a run on one device, by what they hold; the sum counts engine and trainer, which take turns, at once."""
    reward_bytes = sum(
        model_facts(reward.path, reward.revision).parameters * BYTES[reward.dtype]
        for reward in {*config.reward, *(spec for one in config.eval.sets for spec in one.reward)}
        if isinstance(reward, ModelReward)
    )
    p, master = model.parameters, BYTES[config.model.dtype]
    engine_bytes = _weight_bytes(config, config.engine)
    rows = batch.generated[1]
    slots = min(rows, getattr(config.engine, "slots", None) or getattr(config.engine, "max_rows", None) or rows)
    slots = slots if _here(config.engine) else 0  # a server's memory is its own
    handed = 0 if _here(config.engine) or getattr(config.engine, "weight_folder", None) else p * master
    row = math.ceil(batch.longest / 64) * 64
    forwarded = max(min(batch.budget, batch.tokens), batch.longest)
    parts = training_memory(config.model, model, forwarded)
    activations, logits = parts.pop(ACTIVATIONS), parts.pop("logits")
    if critic is not None:
        own = training_memory(replace(config.model, lora=None), critic, forwarded)
        activations = max(activations, own[ACTIVATIONS])  # they take turns
        parts["critic's weights"] = own["weights"] + own["autocast copy of the weights"]
        parts["critic's gradients and Adam's moments"] = own["gradients"] + own["Adam's two moments"]
    parts |= {
        "reward models": reward_bytes,
        "reference model": _reference_bytes(config, p),
        "teacher model": 0 if teacher is None else _teacher_bytes(config, teacher.parameters),
        "engine's copy of the weights": p * engine_bytes if config.engine.needs_weights else 0,
        "new weights, for the servers to read": handed,
        "perturbed copy of them, for servers that return": handed,
        "weights shared with the engine's process": p * master if isinstance(config.engine, LocalProcess) else 0,
        "KV cache": 2 * model.layers * model.kv_width * row * slots * engine_bytes,
        ACTIVATIONS: activations,
        "logits": logits + slots * model.vocabulary * 4,
    }
    return {name: size for name, size in parts.items() if size}


def _here(engine: Any) -> bool:
    """Whether an engine holds its weights on this machine's account; a server has `urls`."""
    return not hasattr(engine, "urls")


def _weight_bytes(config: RunConfig, engine: Any) -> int:
    """Of each weight of an engine, and each element of its keys and values."""
    return BYTES.get(str(getattr(engine, "dtype", None)), BYTES[config.model.compute_dtype])


def _reference_bytes(config: RunConfig, parameters: int) -> int:
    """Weights of the frozen reference here: the policy without its adapter needs none of its own."""
    algorithm = config.algorithm
    if not algorithm.needs_reference or (engine := algorithm.reference_engine) is None:
        alone = algorithm.needs_reference and config.model.lora is None
        return parameters * BYTES[config.model.dtype] if alone else 0
    copied = BYTES[config.model.dtype] + _weight_bytes(config, engine)
    return parameters * copied if engine.needs_weights else 0


ACTIVATIONS = "activations of a micro-batch"


def training_memory(spec: ModelConfig, model: ModelFacts, forwarded: int) -> dict[str, int]:
    """Bytes of the trainer alone, by what they hold, with `forwarded` tokens in a micro-batch; an entry may be 0."""
    p, compute, master = model.parameters, BYTES[spec.compute_dtype], BYTES[spec.dtype]
    per_layer = model.hidden if spec.gradient_checkpointing else 10 * model.hidden + 4 * model.intermediate
    adapter = model.adapter or 0
    trained, gradients = (p, p * master) if spec.lora is None else (adapter, adapter * 4)
    return {
        "weights": p * master,
        "adapter": adapter * 4,
        "gradients": gradients,
        "Adam's two moments": 2 * trained * 4,
        "autocast copy of the weights": p * compute if compute != master else 0,
        ACTIVATIONS: forwarded * model.layers * per_layer * compute,
        "logits": 3 * min(spec.log_prob_chunk, forwarded) * model.vocabulary * 4,
    }


def _teacher_bytes(config: RunConfig, parameters: int) -> int:
    """Weights of a teacher of so many parameters, and the copy of an engine that runs it."""
    engine = config.algorithm.distillation and config.algorithm.distillation.engine
    if engine is not None and not _here(engine):
        return 0
    copied = _weight_bytes(config, engine) if engine and engine.needs_weights else 0
    return parameters * (BYTES[config.model.dtype] + copied)


@dataclass(frozen=True)
class Time:
    """Seconds, for completions that all take `max_tokens`; `gemm` is the rate, FLOP/s, that it rests on."""

    generate: float
    train: float
    evaluate: float
    run: float
    gemm: float

    @property
    def step(self) -> float:
        return self.generate + self.train


def time_of(
    config: RunConfig,
    model: ModelFacts,
    batch: StepSize,
    gemm: float,
    teacher: ModelFacts | None = None,
    critic: ModelFacts | None = None,
) -> Time:
    """2 FLOP a parameter and token to generate, 6 to train, 4 with LoRA (2 more for each extra forward), over a share
    of the GEMM rate; `proximal: next` as if every completion had one more. Under dynamic sampling only the first
    generation batch counts: how many there are, only the questions know."""
    p, length = model.parameters, config.sampling.max_tokens
    prompts, sequences = batch.generated
    sequences, prompts = (sequences, prompts) if config.replayed is None else (0, 0)  # a replay generates none
    generate = 2 * p * (sequences * length + prompts * (batch.longest - length)) / (GENERATE_SHARE * gemm)
    algorithm = config.algorithm
    following = 2 * (algorithm.proximal == "next")  # one version later, at most once a token
    if algorithm.next_from == "engine":
        generate += following * p * sequences * batch.longest / (GENERATE_SHARE * gemm)
    extra = 2 * (algorithm.proximal in ("recompute", "next")) + 2 * algorithm.needs_reference
    extra += following if algorithm.next_from == "trainer" else 0
    products = 6 if config.model.lora is None else 4  # frozen weights have no gradient
    of_teacher = 2 * teacher.parameters if teacher is not None else 0
    flop = p * (products * config.train.epochs_per_step + extra) + of_teacher
    train = (batch.tokens * flop + _critic_flop(config, batch, critic)) / (TRAIN_SHARE * gemm)
    evaluations, questions = _evaluations(config)
    answer = config.eval.sampling.max_tokens if config.eval.sampling else length
    evaluate = 2 * p * questions * (answer + batch.longest - length) / (GENERATE_SHARE * gemm)
    return Time(generate, train, evaluate, config.train.steps * (generate + train) + evaluations * evaluate, gemm)


def _critic_flop(config: RunConfig, batch: StepSize, critic: ModelFacts | None) -> int:
    """A forward pass for the values, and training on every completion, pruned ones too."""
    if critic is None or not isinstance(config.critic, ModelCritic):
        return 0
    dropped = 0 if batch.kept is None else batch.prompts * (batch.completions - batch.kept) * config.sampling.max_tokens
    return critic.parameters * (2 + 6 * config.critic.training(config.train).epochs_per_step) * (batch.tokens + dropped)


def _evaluations(config: RunConfig) -> tuple[int, int]:
    """How many evaluations, and completions in each."""
    spec, answers = config.eval, 0
    if spec.task is None:
        return 0, 0
    during = (config.train.steps - 1) // spec.every if spec.every else 0
    for one in spec.all_sets.values():
        questions = one.limit
        if questions == 0 or isinstance(one.task, Jsonl | Parquet):  # a file here; others may be a download
            with suppress(ValueError):
                count = len(one.task.rows(config.seed))
                questions = min(questions or count, count)
        answers += questions * one.samples
    return spec.before + spec.after + during, answers


def gemm_rate(dtype: str, device: str = "cpu", size: int = 1024, seconds: float = 0.2) -> float:
    """FLOP/s of `size`³ matrix products in `dtype`, best of several; takes about `seconds`."""
    from torch.utils.benchmark import Timer  # warms up, and waits for the device

    kind = getattr(torch, dtype)
    a, b = (torch.linspace(-1, 1, size * size, device=device).view(size, size).to(kind) for _ in range(2))
    timer = Timer("mm(a, b)", globals={"mm": torch.mm, "a": a, "b": b}, num_threads=torch.get_num_threads())
    return float(2 * size**3 / min(timer.blocked_autorange(min_run_time=seconds).times))
