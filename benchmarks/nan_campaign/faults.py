"""Faults that make a number NaN or infinite: each patches the running process and takes effect in one step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

Fault = Callable[[int], None]
NAN, INF = math.nan, math.inf
NOW = {"step": 0}  # the current step of the run in this process


def watch_steps() -> None:
    """Keep `NOW` up to date."""
    from proxima.runtime.loop.controller import Controller

    inner = Controller.collect

    async def collect(self: Any, step: int) -> Any:
        NOW["step"] = step
        return await inner(self, step)

    Controller.collect = collect  # type: ignore[method-assign]


@dataclass(frozen=True)
class Weights:
    """Sets one entry of a parameter, or of its gradient or optimizer state, to `value`.

    Args:
        name: the end of the parameter's name.
        tensor: `weight`, `gradient`, `exp_avg` or `exp_avg_sq`.
        update: the update of the step before which the entry is set; -1: after the last one.
    """

    name: str
    value: float = NAN
    tensor: str = "weight"
    update: int = 0

    def __call__(self, at: int) -> None:
        from proxima.training.stack import TrainStack

        inner, count = TrainStack._step, {"updates": 0}

        def step(stack: Any) -> Any:
            here = NOW["step"] == at
            if here and count["updates"] == self.update:
                self.damage(stack)
            norm = inner(stack)
            count["updates"] += here
            if here and count["updates"] == 2 and self.update < 0:
                self.damage(stack)
            return norm

        TrainStack._step = step  # type: ignore[method-assign]

    @torch.no_grad()
    def damage(self, stack: Any) -> None:
        parameter = next(p for name, p in stack.model.model.named_parameters() if name.endswith(self.name))
        held = {"weight": parameter, "gradient": parameter.grad} | stack.optimizer.state[parameter]
        held[self.tensor].view(-1)[7] = self.value


def weights_before_the_step(at: int) -> None:
    """Set an entry of a norm weight to NaN before the forward pass."""
    from proxima.training.stack import TrainStack

    inner = TrainStack.update

    def update(stack: Any, *arguments: Any, **options: Any) -> Any:
        if NOW["step"] == at:
            Weights("model.norm.weight").damage(stack)
        return inner(stack, *arguments, **options)

    TrainStack.update = update  # type: ignore[method-assign]


@dataclass(frozen=True)
class Logits:
    """Sets logits to `value` where a token is drawn, at one call of the step: a whole row, or one entry of it."""

    call: int
    whole: bool = True
    value: float = NAN

    def __call__(self, at: int) -> None:
        from proxima.engine.local import scheduler

        inner, count = scheduler.sample_tokens, {"calls": 0}

        def sample(logits: Any, *arguments: Any) -> Any:
            if NOW["step"] == at:
                if count["calls"] == self.call:
                    logits = logits.clone()
                    logits[0, slice(None) if self.whole else 3] = self.value
                count["calls"] += 1
            return inner(logits, *arguments)

        scheduler.sample_tokens = sample


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Fault:
    """Return a fault that changes the result of `owner.name` once."""

    def fault(at: int) -> None:
        inner, done = getattr(owner, name), []

        def call(*arguments: Any, **options: Any) -> Any:
            result = inner(*arguments, **options)
            if NOW["step"] == at and not done:
                done.append(True)
                result = change(result)
            return result

        setattr(owner, name, call)

    return fault


def nan_times(loss: torch.Tensor) -> torch.Tensor:
    """Multiply the first entry of a loss by NaN, so that its gradient is NaN too."""
    return loss * with_nan(torch.ones_like(loss))


def with_nan(values: Any) -> Any:
    """Return a copy whose first entry is NaN."""
    if isinstance(values, torch.Tensor):
        values = values.clone()
    else:
        values = values.copy()
    values.reshape(-1)[0] = NAN
    return values


def faults() -> dict[str, tuple[int, Fault]]:
    """Return the faults by name, each with its step."""
    from proxima.core import Cppo
    from proxima.core.advantage.group import Grpo
    from proxima.data.flow import Score
    from proxima.engine.local import scheduler
    from tests.runtime.tiny_run import Even

    def engine_log_prob(columns: Any) -> Any:
        return columns | {"sampled_log_prob": with_nan(columns["sampled_log_prob"])}

    return {
        "tied embedding and head, before an update": (3, Weights("embed_tokens.weight")),
        "tied embedding and head, after the last update": (2, Weights("embed_tokens.weight", update=-1)),
        "projection, before the second update": (3, Weights("0.self_attn.q_proj.weight", update=1)),
        "projection, after the last update": (3, Weights("1.mlp.down_proj.weight", update=-1)),
        "projection, infinite, after the last update": (4, Weights("1.self_attn.o_proj.weight", INF, update=-1)),
        "norm weight, before the forward pass": (3, weights_before_the_step),
        "norm weight, in the first step": (1, Weights("0.input_layernorm.weight")),
        "norm weight, in the last step": (4, Weights("0.post_attention_layernorm.weight", update=-1)),
        "first moment": (3, Weights("0.mlp.up_proj.weight", tensor="exp_avg")),
        "second moment": (3, Weights("0.mlp.up_proj.weight", tensor="exp_avg_sq")),
        "second moment, infinite": (3, Weights("embed_tokens.weight", INF, tensor="exp_avg_sq")),
        "gradient": (2, Weights("1.mlp.gate_proj.weight", tensor="gradient")),
        "gradient, infinite, second update": (3, Weights("embed_tokens.weight", INF, tensor="gradient", update=1)),
        "logits of a prompt": (3, Logits(0)),
        "logits of a decode step": (3, Logits(9)),
        "one logit of a decode step": (2, Logits(5, whole=False)),
        "one logit, infinite": (3, Logits(5, whole=False, value=INF)),
        "log-prob of the engine": (3, changed(scheduler, "_columns", engine_log_prob)),
        "advantage": (3, changed(Grpo, "__call__", with_nan)),
        "loss of a token": (3, changed(Cppo, "__call__", lambda out: replace(out, loss=nan_times(out.loss)))),
        "reward": (3, changed(Even, "score_one", lambda score: Score(value=NAN, correct=score.correct))),
    }
