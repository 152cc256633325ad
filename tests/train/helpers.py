"""A trainer over a tiny model, trajectories with behavior log-probs near the policy's, and a reference gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core import PpoClip, TokenMean, policy_loss
from proxima.data import PolicyBatch, Trajectory
from proxima.model import PackedModel, Policy
from proxima.train import AdamW, Objective, PolicyObjective, Schedule, TrainStack
from proxima.train.stack import UpdateResult
from tests.model.rows import loaded, plain_log_prob, rows
from tests.tiny import tiny

SHAPES = ((6, (5, 1, 9, 0)), (2, (3, 3, 7)), (11, (4, 12)), (3, (2, 2, 2, 8)))
ADVANTAGES = (1.0, -0.5, 0.0, 2.0, -1.0, 0.0, 0.25, -2.0, 1.5, 0.0, -0.75, 0.5, 1.0)


@cache
@torch.no_grad()
def own_log_probs(kind: str, temperature: tuple[float, ...]) -> list[tuple[Trajectory, Tensor]]:
    """Rows of `SHAPES`, and the model's log-probs of them."""
    model = tiny(kind)
    return [(row, plain_log_prob(model, row)) for row in rows(*SHAPES, temperature=temperature)]


def trajectories(
    kind: str = "llama", *, advantages: Sequence[float] = ADVANTAGES, spread: float = 0.3, temperature=(1.0, 0.8)
) -> list[Trajectory]:
    """13 trajectories of four prompts; behavior log-probs are the model's own, moved by noise."""
    draw = torch.Generator().manual_seed(5)
    out = []
    for i, (row, own) in enumerate(own_log_probs(kind, temperature)):
        moved = (own + spread * torch.randn(len(own), generator=draw)).clamp(max=-1e-3)
        mask = tuple((t + i) % 5 != 3 for t in range(len(row.tokens)))
        out.append(
            replace(
                row,
                uid=row.group,
                sample=i,
                behavior_log_prob=moved,
                policy_version=(0,) * len(row.tokens),
                advantage=advantages[i % len(advantages)],
                loss_mask=mask,
                reference_log_prob=moved - 0.2,
            )
        )
    return out


def valued(items: Sequence[Trajectory]) -> list[Trajectory]:
    """With values and returns that no two tokens share."""
    draw = np.random.default_rng(2)
    return [
        replace(item, value=draw.normal(size=len(item.tokens)), returns=draw.normal(size=len(item.tokens)))
        for item in items
    ]


class Trainer:
    """A stack bound to one objective, for tests that use no other."""

    def __init__(self, stack: TrainStack, objective: PolicyObjective) -> None:
        self.stack, self.objective = stack, objective

    def update(self, plan, items, progress=None, version: int = 0, planned: int = 0, **hooks):
        """`plan` has the indices into `items` of each update."""
        updates = [[items[i] for i in indices] for indices in plan]
        return self.stack.update(self.objective.at_version(version), updates, progress, planned, **hooks)

    def __getattr__(self, name: str):
        return getattr(self.stack, name)


def trainer(kind: str = "llama", *, share_prompt: bool = True, attention: str = "auto", **settings) -> Trainer:
    return trainer_of(Policy(loaded(kind), share_prompt=share_prompt, attention=attention), **settings)


def trainer_of(policy: Policy, **settings) -> Trainer:
    """`settings` are fields of the stack, of the objective and of the schedule."""
    own = {name: settings.pop(name) for name in ("max_grad_norm", "tokens_per_micro_batch") if name in settings}
    schedule = Schedule(
        settings.pop("schedule", "constant"),
        **{name: settings.pop(name) for name in ("total_updates", "warmup", "final_ratio") if name in settings},
    )
    optimizer = settings.pop("optimizer", None) or AdamW(lr=1e-3)
    stack = TrainStack(policy, optimizer=optimizer, schedule=schedule, **({"max_grad_norm": 0.0} | own))
    return Trainer(stack, PolicyObjective(**({"surrogate": PpoClip(), "aggregate": TokenMean()} | settings)))


def weights(t: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in t.model.model.named_parameters()}


def gradients(t: Trainer, items: Sequence[Trajectory], updates=None) -> dict[str, Tensor]:
    """The gradient that the optimizer gets at the first update; its step is replaced by a recorder."""
    seen: dict[str, Tensor] = {}

    def record() -> None:
        if not seen:
            seen.update({name: p.grad.clone() for name, p in t.model.model.named_parameters()})

    t.optimizer.step = record
    t.update(updates or [list(range(len(items)))], items)
    return seen


def recorded(
    objective: Objective[Any],
    items: Sequence[Any],
    budget: int = 10_000,
    *,
    model: PackedModel | None = None,
    share_prompt: bool = True,
) -> tuple[dict[str, Tensor], UpdateResult]:
    """The gradient that the optimizer gets in an update, whose step is not made, and the result."""
    model = model or Policy(loaded("llama"), share_prompt=share_prompt)
    stack, seen = TrainStack(model, max_grad_norm=0.0, tokens_per_micro_batch=budget), {}
    stack.optimizer.step = lambda: seen.update({name: p.grad.clone() for name, p in model.named_parameters()})
    return seen, stack.update(objective, [items])


def unsplit(loss_of: Callable[[Any], Tensor], kind: str = "llama") -> tuple[dict[str, Tensor], float]:
    """Gradient and value of `loss_of(model)`: plain forward passes, one sequence at a time, and one backward pass."""
    model = tiny(kind)
    loss = loss_of(model)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(loss.detach())


def naive_gradients(
    kind: str, items: Sequence[Trajectory], *, surrogate=None, aggregate=None, penalty=None
) -> dict[str, Tensor]:
    """No trainer, no packing, no micro-batches."""

    def loss(model):
        batch = plain_batch(model, items)
        chosen = {"surrogate": surrogate or PpoClip(), "aggregate": aggregate or TokenMean(), "penalty": penalty}
        return policy_loss(batch, **chosen).value

    return unsplit(loss, kind)[0]


def plain_batch(model: Any, items: Sequence[Trajectory]) -> PolicyBatch:
    log_prob = torch.cat([plain_log_prob(model, row) for row in items if len(row.tokens)])
    lengths = torch.tensor([len(row.tokens) for row in items])
    return PolicyBatch(
        log_prob=log_prob,
        loss_mask=torch.tensor([m for row in items for m in row.loss_mask]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        advantage=torch.tensor([x for row in items for x in row.advantage]),
        behavior_log_prob=torch.tensor([x for row in items for x in row.behavior_log_prob]),
        reference_log_prob=torch.tensor([x for row in items for x in row.reference_log_prob]),
        group=torch.tensor([row.group for row in items]),
    )
