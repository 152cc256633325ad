"""A trainer over a tiny model, trajectories with behavior log-probs near the policy's, and a reference gradient."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.core import PpoClip, TokenMean
from proxima.data.policy_batch import PolicyBatch
from proxima.data.trajectory import LabeledCompletion, PreferencePair, Trajectory
from proxima.model.packed_model import PackedModel
from proxima.model.policy import Policy
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.objectives.protocol import Objective
from proxima.training.optimizer import AdamW, Schedule
from proxima.training.stack import TrainStack, UpdateResult
from tests.model.rows import loaded, plain_log_prob, rows
from tests.tiny import tiny

SHAPES = ((6, (5, 1, 9, 0)), (2, (3, 3, 7)), (11, (4, 12)), (3, (2, 2, 2, 8)))
ADVANTAGES = (1.0, -0.5, 0.0, 2.0, -1.0, 0.0, 0.25, -2.0, 1.5, 0.0, -0.75, 0.5, 1.0)


TEMPERATURES = (1.0, 0.8)


@cache
@torch.no_grad()
def own_log_probs(kind: str) -> tuple[list[Trajectory], list[Tensor]]:
    """Rows of `SHAPES`, and the model's log-probs of them."""
    model, plain = tiny(kind), rows(*SHAPES, temperature=TEMPERATURES)
    return plain, [plain_log_prob(model, row) for row in plain]


def trajectories(kind: str = "llama", **settings) -> list[Trajectory]:
    """13 trajectories of four prompts with behavior log-probs near those of the tiny model; see `near`."""
    return near(*own_log_probs(kind), **settings)


def near(
    plain: Sequence[Trajectory],
    own_log_probs: Sequence[Tensor],
    *,
    advantages: Sequence[float] = ADVANTAGES,
    spread: float = 0.3,
) -> list[Trajectory]:
    """With behavior log-probs that are a model's own, moved by noise, with advantages and holes in the loss."""
    draw = torch.Generator().manual_seed(5)
    out = []
    for i, (row, own) in enumerate(zip(plain, own_log_probs, strict=True)):
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


@cache
def completions() -> tuple[Trajectory, ...]:
    """Ten trajectories of five prompts, each with the log-probs of a reference that is a little off."""
    plain = rows((6, (5, 1)), (2, (3, 7)), (11, (4, 12)), (3, (2, 8)), (4, (6, 6)))
    draw, model = np.random.default_rng(3), tiny("llama")
    with torch.no_grad():
        own = [plain_log_prob(model, row).numpy() for row in plain]
    moved = [x + draw.normal(0, 0.4, len(x)).astype(np.float32) for x in own]
    return tuple(replace(row, reference_log_prob=x) for row, x in zip(plain, moved, strict=True))


def pairs(items: Sequence[Trajectory] | None = None) -> list[PreferencePair]:
    items = items or completions()
    return [PreferencePair(row=i, chosen=items[2 * i], rejected=items[2 * i + 1]) for i in range(5)]


def labeled(items: Sequence[Trajectory] | None = None) -> list[LabeledCompletion]:
    """For KTO, with the completion of another prompt each."""
    items = items or completions()
    others = [
        replace(items[(i + 3) % 10], prompt_tokens=items[i].prompt_tokens, group=items[i].group) for i in range(10)
    ]
    return [LabeledCompletion(row=i, completion=items[i], good=i % 3 != 1, mismatched=others[i]) for i in range(10)]


def reward_pairs(margins: Sequence[float | None] = (None, None, None)) -> list[PreferencePair]:
    plain = rows((4, (3, 6)), (5, (4, 1)), (6, (2, 2)))
    return [
        PreferencePair(row=i, chosen=plain[2 * i], rejected=plain[2 * i + 1], margin=margin)
        for i, margin in enumerate(margins)
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


def gradients(t: Trainer, items: Sequence[Trajectory]) -> dict[str, Tensor]:
    return _recorded(t.stack, t.objective, items)[0]


def recorded(
    objective: Objective[Any], items: Sequence[Any], budget: int = 10_000, *, model: PackedModel | None = None
) -> tuple[dict[str, Tensor], UpdateResult]:
    model = model or Policy(loaded("llama"))
    return _recorded(TrainStack(model, max_grad_norm=0.0, tokens_per_micro_batch=budget), objective, items)


def _recorded(stack: TrainStack, objective: Any, items: Sequence[Any]) -> tuple[dict[str, Tensor], UpdateResult]:
    """The gradient that the optimizer gets in an update, whose step is not made, and the result."""
    seen: dict[str, Tensor] = {}
    named = list(stack.model.named_parameters())
    stack.optimizer.step = lambda: seen.update({name: p.grad.clone() for name, p in named})
    return seen, stack.update(objective, [items])


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
