"""The durations of a simulated run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from proxima.config.builder import Builder
from proxima.config.layers import merged
from proxima.config.problems import ConfigError
from proxima.config.recipe_reader import read_yaml
from proxima.config.resolved import ResolvedValue
from proxima.config.slots import Slot
from proxima.config.tree import DEFAULT, Node, Source, node_of
from proxima.data import require
from proxima.lab.simulate.distributions import Constant, Distribution

PREFIX = "times."
KINDS = "proxima.lab.simulate.distributions:DISTRIBUTIONS"
SCORE = Constant(0.1)
MOST = 100_000.0  # seconds (about a day), or tokens of a prompt; a simulation checks every simulated minute for a stall


@dataclass(frozen=True, kw_only=True)
class Times:
    """The durations of a simulated run, in seconds.

    A decode step gives each of the n running completions one token and takes `step + sequence * n`. A prefill takes
    `prefill_token` per token: for a prompt before its first completion, and under `engine.interrupt: recompute` for
    all running completions when weights are published; later turns of an episode reuse the KV of earlier ones. An
    update takes `update`, plus `update_token` per token of the completions in the groups that the step uses.
    """

    length: Annotated[
        Any, Slot(KINDS), "tokens of a completion, or of a turn, cut off at sampling.max_tokens; null: always as many"
    ] = None
    turns: Annotated[Any, Slot(KINDS), "turns of an episode; null: prompts are answered at once"] = None
    environment: Annotated[Any, Slot(KINDS), "that an environment takes after each turn; null: none"] = None
    prompt_length: Annotated[float, "tokens of a prompt"] = 100.0
    step: Annotated[float, "of a decode step, however many completions run"] = 0.02
    sequence: Annotated[float, "more of a decode step for each completion that runs"] = 0.0005
    prefill_token: Annotated[float, "of each token of a prefill"] = 0.0005
    score: Annotated[Any, Slot(KINDS, default="constant"), "until the rewards of a group are known"] = SCORE
    update: Annotated[float, "of an update, however many tokens it has"] = 0.0
    update_token: Annotated[float, "more of an update for each token of its completions"] = 0.002
    pause: Annotated[float, "until the engine stops for new weights; it samples meanwhile, and the trainer waits"] = 0.0
    publish: Annotated[float, "from then on until the engine has them"] = 0.2
    other: Annotated[float, "of a step outside all of these: advantages, files"] = 0.0
    evaluate: Annotated[float, "of an evaluation, every eval.every steps; 0: none"] = 0.0
    checkpoint: Annotated[float, "of a checkpoint, every checkpoint.every steps; 0: none"] = 0.0
    accepted: Annotated[float, "share of the groups that dynamic sampling keeps"] = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), int | float):
                require(0 <= value <= MOST, field.name, value, f"must be in [0, {MOST:,.0f}]")
        fast = self.step + self.sequence
        require(fast > 0, "step", self.step, "must be > 0 seconds where times.sequence is 0")
        require(0 < self.accepted <= 1, "accepted", self.accepted, "must be a share in (0, 1]")
        require(self.prompt_length >= 1, "prompt_length", self.prompt_length, "must be >= 1")
        alone = self.environment is not None and self.turns is None
        require(
            not alone, "environment", self.environment, "has no meaning without times.turns", remedy="set times.turns"
        )
        require(self.score is not None, "score", None, "must be a distribution", remedy="times.score.value=0 is none")

    def lengths(self, max_tokens: int) -> Distribution:
        """Return the distribution of the tokens of a completion, before it is cut off at `max_tokens`."""
        return Constant(max_tokens) if self.length is None else self.length

    def decode_step(self, running: int) -> float:
        """Return the seconds of a decode step, which gives each of the running completions one token."""
        return self.step + self.sequence * running

    def update_step(self, lengths: Sequence[int]) -> float:
        """Return the seconds of an update with completions of these lengths."""
        return self.update + self.update_token * sum(lengths)


def read_times(
    file: Path | None, overrides: Sequence[str] = (), fitted: Mapping[str, Any] | None = None, of: str = ""
) -> tuple[Times, tuple[ResolvedValue, ...]]:
    """Return the times, and the source of each.

    Args:
        file: YAML, a mapping of the fields of `Times`.
        overrides: `times.KEY=VALUE`, over the file.
        fitted, of: values of the lowest priority, and the run that they come from.

    Raises:
        ConfigError: lists each problem in one line.

    """
    score = {"score": {"kind": "constant", "value": SCORE.value}}  # a slot's own default has no fields
    layers = [node_of(score, DEFAULT), node_of(dict(fitted or {}), Source(f"fitted from {of}"))]
    if file is not None:
        layers.append(read_yaml(file))
    tree, _ = merged(layers, [text.removeprefix(PREFIX) for text in overrides], Times)
    builder = Builder()
    times = builder.dataclass(Times, Node(tree.value, DEFAULT), PREFIX.rstrip("."), "times")
    if problems := builder.all_problems():
        raise ConfigError(problems)
    return times, tuple(builder.entries)
