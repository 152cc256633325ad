"""Batch, memory and time of training on a fixed data set."""

import math
from dataclasses import dataclass
from typing import Any

from proxima.config.estimate import BYTES, TRAIN_SHARE, Time, training_memory
from proxima.config.model_estimate import ModelEstimates
from proxima.config.offline_schema import OfflineConfig
from proxima.config.resolve import Resolved
from proxima.data import FieldError
from proxima.model.load import context_limit, load_config, load_tokenizer

SAMPLE_ROWS = 64  # rows whose tokens are counted
ASSUMED_TOKENS = 256  # of an example, where none can be read


@dataclass(frozen=True)
class ExampleStep:
    """The arithmetic of a step on a fixed data set.

    Args:
        examples: of a step.
        mean, longest: tokens of an example, all of its sequences together, among the first rows.
        tokens: forwarded in a step of examples of the mean length.
        micro_batches: that these make.
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
        micro = f"{self.micro_batches:,} micro-batch{'es' * (self.micro_batches > 1)}"
        return f"{self.examples:,} examples → about {micro} of ≤ {self.budget:,} tokens → 1 update"


class OfflineEstimates(ModelEstimates):
    """As `Estimates`, from the lengths of the first rows."""

    def __init__(self, resolved: Resolved[OfflineConfig], gemm: float | None = None) -> None:
        super().__init__(resolved)
        config, train = resolved.config, resolved.config.train
        rows, lengths = (None if self.known_size else self._read(lambda: _rows(config), "example length")) or (0, [])
        if not lengths:
            self.notes.append(f"examples are taken to have {ASSUMED_TOKENS} tokens")
        mean = round(sum(lengths) / len(lengths)) if lengths else ASSUMED_TOKENS
        tokens = train.examples_per_step * mean
        self.batch = ExampleStep(
            examples=train.examples_per_step,
            mean=mean,
            longest=max(lengths, default=ASSUMED_TOKENS),
            tokens=tokens,
            micro_batches=math.ceil(tokens / train.tokens_per_micro_batch),
            budget=train.tokens_per_micro_batch,
            steps=train.steps or (train.steps_of(rows) if rows else 0),
        )
        if self.model is None:
            return
        forwarded = max(min(train.tokens_per_micro_batch, tokens), self.batch.longest)
        samples = getattr(config.eval, "samples", 0) if config.eval.task is not None else 0
        copy = self.model.parameters * BYTES["bfloat16"] if samples else 0
        parts = training_memory(config.model, self.model, forwarded) | {"engine's copy of the weights": copy}
        self.memory = {name: size for name, size in parts.items() if size}
        if (rate := self._rate(resolved, gemm)) is not None:
            self.time = self._time(config, rate)
        if self.time is not None and config.eval.task is not None and not self.time.evaluate:
            self.notes.append("evaluations are not in the time: eval.limit=0 takes all held-out rows")

    def _time(self, config: OfflineConfig, gemm: float) -> Time:
        """6 FLOP a parameter and token to train, 4 with LoRA, 2 to evaluate, over a share of the GEMM rate."""
        assert self.model is not None
        second = self.model.parameters / (TRAIN_SHARE * gemm)
        train = second * self.batch.tokens * (6 if config.model.lora is None else 4)
        spec, steps = config.eval, self.batch.steps
        if spec.task is None:
            return Time(0.0, train, 0.0, steps * train, gemm)
        evaluations = spec.before + spec.after + ((steps - 1) // spec.every if spec.every else 0)
        evaluate = 2 * second * self.batch.mean * spec.limit
        return Time(0.0, train, evaluate, steps * train + evaluations * evaluate, gemm)


def _rows(config: OfflineConfig) -> tuple[int, list[int]]:
    """How many rows there are, and the tokens of the first ones that can be used."""
    tokenizer: Any = load_tokenizer(config.model.path, config.model.revision)
    text = load_config(config.model.path, config.model.revision).get_text_config()
    limit = context_limit(text)
    context, rows, lengths = min(config.model.max_length or limit, limit), config.task.rows(config.seed), []
    for number in range(min(SAMPLE_ROWS, len(rows))):
        try:
            lengths.append(sum(map(len, config.sequences_of(number, rows[number], tokenizer, context))))
        except FieldError:  # the run skips it, or is refused
            continue
    return len(rows), [length for length in lengths if length]
