"""The size of a step: the sequences that it generates, and the tokens and micro-batches that it forwards."""

from dataclasses import dataclass

from proxima.config.step_groups import group_arithmetic


@dataclass(frozen=True)
class StepSize:
    """The arithmetic of a step.

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
    kept: int | None = None
    at_once: int | None = None
    greedy: bool = False

    @property
    def generated(self) -> int:
        """Sequences of the first generation batch, the only one without dynamic sampling."""
        return max(self.at_once or 0, self.prompts) * (self.completions + self.greedy)

    def __str__(self) -> str:
        micro = f"{self.micro_batches:,} micro-batch" + ("es" if self.micro_batches > 1 else "")
        sequences = group_arithmetic(self.prompts, self.completions, self.kept, self.at_once)
        return f"{sequences} → ≤ {micro} of ≤ {self.budget:,} tokens → {self.updates} update{'s' * (self.updates > 1)}"


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
        micro = f"{self.micro_batches:,} micro-batch{'es' * (self.micro_batches > 1)}"
        return f"{self.examples:,} examples → about {micro} of ≤ {self.budget:,} tokens → 1 update"
