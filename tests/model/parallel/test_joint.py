"""Dimensions together: whole updates on four ranks, which split matrices, tokens and experts at once, against the same
on one process."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from proxima.core import RewardLoss
from proxima.core.value import ValueLoss
from proxima.model.model_source import ModelSource
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.model.scalar_model import make_value_head
from proxima.train import LogProbStage, TrainStack, ValueObjective, ValueStage
from proxima.train.objectives.reward_objective import RewardObjective
from proxima.train.objectives.router_balance import RouterBalance
from proxima.train.objectives.sft_objective import SftObjective
from proxima.train.process_ranks import ProcessRanks
from tests.campaigns import campaign
from tests.model.parallel.ranks import run_ranks
from tests.model.rows import rows
from tests.train.helpers import ADVANTAGES, valued
from tests.train.shared_updates import close, follow, policy
from tests.train.test_reward_objective import pairs

T, C, E = "tensor_parallel", "context_parallel", "expert_parallel"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how its ranks lie; `routes`: recorded by a stage and replayed, with a balanced load."""

    model: str
    layout: dict[str, Any]
    trains: str = "policy"
    routes: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model} {self.trains} " + " ".join(f"{name}={value}" for name, value in self.layout.items())


AGAIN = {"gradient_checkpointing": True}
BOTH = {T: 2, C: 2}
HYBRID = {"kind": "hybrid"}
CASES = [Case(model="sparse", layout={C: 2, E: 4}, routes=True)]
BREADTH = (
    Case(model="qwen3", layout=BOTH, settings=AGAIN, trains="head"),
    Case(model="sparse", layout=BOTH, trains="reward"),
    Case(model="sparse", layout=BOTH, routes=True, settings=AGAIN),
    Case(model="sparse", layout={T: 2, **HYBRID}, routes=True),
    Case(model="windows", layout=BOTH, trains="reward"),
    Case(model="qwen2", layout={**BOTH, "offload": True}, settings=AGAIN),
    Case(model="heads", layout=BOTH),
    Case(model="sparse", layout={C: 2, E: 2, **HYBRID}, routes=True, settings=AGAIN),
    Case(model="sparse", layout={E: 4}, trains="sft"),
    Case(model="experts", layout=BOTH, routes=True),
    Case(model="experts", layout={C: 2, E: 2}, routes=True, settings=AGAIN, trains="head"),
    Case(model="sparse", layout={C: 4, E: 2}, routes=True, settings=AGAIN),
    Case(model="sparse", layout={**BOTH, "kind": "replicate"}, routes=True),
    Case(model="sparse", layout={C: 2, E: 2, "sum_gradients": "update"}, routes=True),
    Case(model="qwen2", layout=BOTH, trains="critic", settings=AGAIN),
    Case(model="qwen3", layout={T: 2}, trains="reward"),
    Case(model="sparse", layout={E: 2}, trains="reward", settings=AGAIN),
)


FEW = ((6, (5, 1, 9, 0)), (2, (3, 7)), (3, (2, 8)), (1, (1,)))  # the last is one token for four ranks


class Recorder(torch.optim.SGD):
    """Keeps the gradients of each step."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        vars(self).setdefault("seen", []).append([p.grad.clone() for p in every])
        super().step(closure)


class Recording:
    def build(self, parameters):
        return Recorder(parameters, lr=0.05)


def stack_of(folder: Path, case: Case, ranks: ProcessRanks | None) -> TrainStack:
    sharding = None if ranks is None else Sharding(**case.layout)
    source = ModelSource(
        path=str(folder / case.model), device="cpu", compute_dtype="float32", sharding=sharding, **case.settings
    )
    if case.trains in ("critic", "reward"):
        model = source.scalar(source.load_scalar(head_std=0.3))
    else:
        loaded = source.load()
        head = make_value_head(loaded.model, 0.3, 1) if case.trains == "head" else None
        model = source.policy(loaded, head, replays_routes=case.routes)
    settings = {} if ranks is None else {"ranks": ranks}
    return TrainStack(model, optimizer=Recording(), tokens_per_micro_batch=60, **settings)


def given(stack: TrainStack) -> list[Any]:
    """Trajectories whose behavior log-probs are near the model's own."""
    draw, out = np.random.default_rng(5), []
    plain = rows(*FEW, temperature=(1.0, 0.8))
    for i, (row, own) in enumerate(zip(plain, stack.log_prob(plain), strict=True)):
        moved = np.minimum(own + 0.3 * draw.normal(size=len(own)), -1e-3).astype(np.float32)
        out.append(
            replace(
                row,
                uid=row.group,
                sample=i,
                behavior_log_prob=moved,
                policy_version=(0,) * len(row.tokens),
                advantage=ADVANTAGES[i % len(ADVANTAGES)] or 0.3,
                loss_mask=tuple((t + i) % 5 != 4 for t in range(len(row.tokens))),
            )
        )
    return out


def job(case: Case, stack: TrainStack) -> tuple[Any, list[list[Any]]]:
    """The objective and its updates: of many items, and of one with fewer tokens than ranks."""
    if case.trains == "reward":
        return RewardObjective(loss=RewardLoss(center=0.1), pad=1), [pairs(), pairs()[:1]]
    if case.trains == "critic":
        items = valued([replace(item, advantage=0.0) for item in rows(*FEW)])
        return ValueObjective(loss=ValueLoss()), [items, items[-1:]]
    items = given(stack)
    updates = [items, items[-1:]]
    if case.trains == "sft":
        return SftObjective(), updates
    more: dict[str, Any] = {"replays_routes": True, "terms": [RouterBalance(coefficient=2.0)]}
    more = more if case.routes else {}
    if case.trains == "head":
        more["terms"] = [ValueObjective(coefficient=0.5), *more.get("terms", ())]
        updates = [valued(part) for part in updates]
    return policy(**more), updates


def stage_of(case: Case, stack: TrainStack) -> Any:
    if case.trains == "critic":
        return ValueStage(stack.model)
    return LogProbStage("reference_log_prob", stack.model, records_routes=case.routes)


def ran(stack: TrainStack, case: Case, work: tuple[Any, list[list[Any]]]) -> tuple[list[Any], dict[str, float]]:
    """Columns of a forward stage, and the metrics of the updates."""
    objective, updates = work
    columns = []
    if case.trains not in ("reward", "sft"):
        stage = stage_of(case, stack)
        columns = [stack.columns(stage, part) for part in updates]
        if case.trains != "critic":
            updates = [stack.fill([stage], part) for part in updates]
    if not case.routes:
        return columns, stack.update(objective, updates).metrics
    lacking = replace(updates[0][-1], routed_experts=None, prompt_routed_experts=None)  # its routers choose
    others = [replace(item, routed_experts=7 - item.routed_experts) for item in updates[0][:-1]]
    updates = [[*others, lacking], *updates[1:]]
    return columns, stack.update(objective, updates).metrics


def gradients(stack: TrainStack) -> list[list[torch.Tensor]]:
    return [[whole_tensor(gradient) for gradient in step] for step in stack.optimizer.seen]


def updates_of(rank: int, folder: Path, case: Case) -> None:
    ranks = ProcessRanks(rank, dist.get_world_size(), together=Sharding(**case.layout).together)
    stack = stack_of(folder, case, ranks)
    if rank:
        follow(stack, ranks, [stage_of(case, stack)] if case.trains != "reward" else [])
        gradients(stack)
        return
    reference = stack_of(folder, case, None)
    work = job(case, reference)
    (expected, wanted), (columns, metrics) = ran(reference, case, work), ran(stack, case, work)
    ranks.end(None)
    ours, theirs = gradients(stack), gradients(reference)
    same_columns(columns, expected)
    same_metrics(case, metrics, wanted)
    same_gradients(ours, theirs)


def same_metrics(case: Case, actual: dict[str, float], expected: dict[str, float]) -> None:
    assert actual.keys() == expected.keys()
    differing = {key: (actual[key], x) for key, x in expected.items() if not close(actual[key], x)}
    assert not differing, differing
    if case.routes:
        assert actual["routing/fallback_fraction"] > 0 < actual["routing/balance_loss"]


def same_gradients(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> None:
    """Of each step, within 1e-4 of the largest."""
    for step, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
        largest = max(float(g.abs().max()) for g in plain)
        worst = max(float((a - b).abs().max()) for a, b in zip(mine, plain, strict=True))
        assert worst <= 1e-4 * largest, (step, worst / largest)


def same_columns(actual: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, column in theirs.items():
            for a, b in zip(ours[name], column, strict=True):
                if "routed" in name:
                    assert a.dtype == b.dtype and np.array_equal(a, b), name
                else:
                    np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [*CASES, *campaign("tests/model/parallel/test_joint.py::test_updates_are_those_of_one_process", BREADTH)],
    ids=str,
)
def test_updates_are_those_of_one_process(case, models):
    run_ranks(updates_of, 4, models / "split", case)
