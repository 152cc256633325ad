"""What every rank does in `test_ranks` and `test_joint`: updates on several ranks against the same on one process."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from proxima.core import AGGREGATES, CORRECTIONS, PENALTIES, SURROGATES, RewardLoss, TokenMean
from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.value import ValueLoss
from proxima.data import NotFiniteError
from proxima.data.trajectory import Trajectory
from proxima.model.architecture import vision_parameters
from proxima.model.chat.encode import prompt_tokens
from proxima.model.images.image_store import ImageStore, ImageTokenizer
from proxima.model.packed_model import PackedModel
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.model.pretrained import load_tokenizer
from proxima.runtime.placement.follower import RankModels
from proxima.training.critic import ValueObjective, ValueStage
from proxima.training.forward_stage import LogProbStage, TeacherStage
from proxima.training.learner import EarlyStop
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.objectives.preference_objective import KtoObjective, PreferenceObjective
from proxima.training.objectives.router_balance import RouterBalance
from proxima.training.offline.reward_method import RewardObjective
from proxima.training.offline.sft_method import SftObjective
from proxima.training.optimizer import Schedule
from proxima.training.process_ranks import ProcessRanks
from proxima.training.ranks import End, RankError, Refused
from proxima.training.stack import TrainStack
from tests.model.parallel.passes import model_of, source
from tests.model.rows import rows, same
from tests.tiny import VOCABULARY
from tests.tiny_images import picture
from tests.training.helpers import SHAPES, TEMPERATURES, labeled, near, pairs, reward_pairs, trajectories, valued

GIVEN = {
    "log_prob",
    "proximal_log_prob",
    "behavior_log_prob",
    "reference_log_prob",
    "advantage",
    "policy_version",
    "entropy",
    "group",
}


@dataclass(frozen=True)
class Sgd:
    """AdamW would hide what is small beside its epsilon, and blow up what is rounding."""

    lr: float = 0.05

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


Layout = dict[str, Any]
SUM_LATER = {"sum_gradients": "update"}
FEW = ((6, (5, 1, 9, 0)), (2, (3, 7)), (3, (2, 8)), (1, (1,)))  # the last feeds one token, fewer than ranks


def train_stack(model: PackedModel, ranks: ProcessRanks | None, budget: int) -> TrainStack:
    settings = {} if ranks is None else {"ranks": ranks}
    return TrainStack(
        model, optimizer=Sgd(), schedule=Schedule(total_updates=9), tokens_per_micro_batch=budget, **settings
    )


class Stacks:
    """Stacks that have not been trained, on one model of each kind: to load and shard it takes as long as its updates.

    Args:
        ranks: that share the models, laid out like this; None: one process has each.
    """

    def __init__(
        self, folder: Path, ranks: ProcessRanks | None, layout: Layout, budget: int = 20, **settings: Any
    ) -> None:
        self.ranks, self.budget = ranks, budget
        self.source = source(folder, sharding=None if ranks is None else Sharding(**layout), **settings)
        self.kept: dict[str, tuple[PackedModel, list[torch.Tensor]]] = {}

    def new(self, trains: str) -> TrainStack:
        if trains not in self.kept:
            made = model_of(self.source, trains)
            self.kept[trains] = made, [p.detach().clone() for _, p in made.named_parameters()]
        model, weights = self.kept[trains]
        with torch.no_grad():
            for (_, parameter), weight in zip(model.named_parameters(), weights, strict=True):
                parameter.copy_(weight)
                parameter.grad = None
        return train_stack(model, self.ranks, self.budget)


def stacks_of(rank: int, folder: Path, layout: Layout, **settings: Any) -> tuple[ProcessRanks, Stacks, Stacks]:
    """The ranks, their stacks, and those of one process."""
    ranks = ProcessRanks(rank, dist.get_world_size(), ranks_per_share=Sharding(**layout).ranks_per_share)
    return ranks, Stacks(folder, ranks, layout, **settings), Stacks(folder, None, {}, **settings)


def weights_of(stack: TrainStack) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(parameter) for name, parameter in stack.model.model.named_parameters()}


def policy(**settings) -> PolicyObjective:
    return PolicyObjective(**({"surrogate": SURROGATES["ppo_clip"](), "aggregate": TokenMean()} | settings))


Case = tuple[str, str, Any, list[list[Any]]]


def cases(items: list[Trajectory]) -> Iterator[Case]:
    """A name, its kind first; what is trained, see `model_of`; the objective, and the items of each update."""
    two = [items[:5], items[5:]]
    for name, surrogate in SURROGATES.items():
        if surrogate().needs <= GIVEN:
            yield f"surrogate {name}", "policy", policy(surrogate=surrogate()), two
    for name, aggregate in AGGREGATES.items():
        yield f"aggregate {name}", "policy", policy(aggregate=aggregate()), two
    for name, correction in CORRECTIONS.items():
        spec = correction()
        if spec.needs <= GIVEN:
            yield f"correction {name}", "policy", policy(corrections=[spec]), two
    yield "reference KL", "policy", policy(penalties=[PENALTIES["k3"](coefficient=0.1)]), two
    yield "first forward", "policy", policy(proximal="first_forward"), two
    yield "one trajectory", "policy", policy(), [items[:1]]
    yield "few tokens", "policy", policy(), [items, items[1:2]]  # fewer than ranks
    yield "a rank without any in the second", "policy", policy(), [items, items[1:2], items[4:7]]
    yield "nothing to train", "policy", policy(), [[replace(items[0], advantage=0.0)], items]
    yield "SFT", "policy", SftObjective(), two
    value = ValueObjective(coefficient=0.5)
    yield "value head", "head", policy(terms=[value]), [valued(part) for part in two]
    terms = [value, RouterBalance(coefficient=2.0)]
    yield "routes", "routes", policy(terms=terms, replays_routes=True), [valued(items), valued(items[-1:])]
    yield "critic", "scalar", ValueObjective(loss=ValueLoss()), [valued(items), valued(items[1:2])]
    yield (
        "reward model",
        "scalar",
        RewardObjective(loss=RewardLoss(center=0.1), pad=1),
        [reward_pairs(), reward_pairs()[:1]],
    )
    yield "KTO", "policy", KtoObjective(spec=Kto(beta=0.3)), [labeled(), labeled()[:3]]
    for name, preference in PREFERENCES.items():
        yield f"preference {name}", "policy", PreferenceObjective(terms=[preference()]), [pairs(), pairs()[2:4]]


def follow(stack: TrainStack, ranks: ProcessRanks, stages=()) -> None:
    models = RankModels(stacks={"policy": stack}, stages={"policy": stages})
    while not isinstance(message := ranks.receive(), End):
        try:
            models.take_part(message)
        except (Refused, NotFiniteError):
            continue


def close(metric: str, ours: float, theirs: float) -> bool:
    """Equal but for rounding, of which the square of a sequence's ratio has twice the sum of its tokens'."""
    return ours == pytest.approx(theirs, rel=1e-4 if metric.endswith("_seq") else 1e-5, abs=4e-6, nan_ok=True)


def same_update(name: str, shared: TrainStack, alone: TrainStack, objective: Any, updates: list[list[Any]]) -> set[str]:
    """On rank 0: an update of both, what is measured of it, and the weights that it leaves; which of these moved."""
    begun = {key: weight.detach().clone() for key, weight in weights_of(alone).items()}
    expected, got = alone.update(objective, updates), shared.update(objective, updates)
    shared.ranks.end(None)
    assert got.metrics.keys() == expected.metrics.keys(), name
    differing = {
        key: (got.metrics[key], x) for key, x in expected.metrics.items() if not close(key, got.metrics[key], x)
    }
    assert not differing, (name, differing)
    assert (got.updates, got.skipped) == (expected.updates, expected.skipped), name
    assert got.tokens >= 0.8 * expected.tokens, name  # a prompt may be fed in more cuts
    assert got.token_statistics.keys() == expected.token_statistics.keys(), name
    for key, statistics in expected.token_statistics.items():
        np.testing.assert_allclose(got.token_statistics[key].log_prob, statistics.log_prob, atol=2e-5, err_msg=name)
        np.testing.assert_array_equal(got.token_statistics[key].keep, statistics.keep, err_msg=name)
    before, after = weights_of(alone), weights_of(shared)
    most = 1e-4 * max(float((weight - begun[key]).abs().max()) for key, weight in before.items()) + 2e-7
    for parameter, weight in before.items():
        torch.testing.assert_close(
            after[parameter], weight, rtol=0, atol=most, msg=lambda m, n=parameter: f"{name}, {n}: {m}"
        )
    return {key for key, weight in before.items() if not torch.equal(weight, begun[key])}


def stage_of(trains: str, stack: TrainStack) -> Any:
    """A forward stage whose columns are compared."""
    if trains == "scalar":
        return ValueStage(stack.model)
    return LogProbStage("proximal_log_prob", stack.model, records_routes=trains == "routes")


def same_columns(trains: str, shared: TrainStack, alone: TrainStack, parts: Sequence[list[Trajectory]]) -> None:
    for part in parts:
        got, expected = (stack.columns(stage_of(trains, stack), part) for stack in (shared, alone))
        assert got.keys() == expected.keys()
        for name, column in expected.items():
            for ours, theirs in zip(got[name], column, strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_allclose(ours, theirs, atol=0 if "routed" in name else 2e-5, err_msg=name)


def replayed(stack: TrainStack, updates: list[list[Trajectory]]) -> list[list[Trajectory]]:
    """With the experts that the routers choose; in the first update with others, but for one, which has none."""
    (*others, last), *rest = (stack.fill([stage_of("routes", stack)], part) for part in updates)
    lacking = replace(last, routed_experts=None, prompt_routed_experts=None)
    return [[*(replace(item, routed_experts=7 - item.routed_experts) for item in others), lacking], *rest]


def same_updates(
    rank: int, folder: Path, layout: Layout, names: Sequence[str], *, columns: bool = False, **settings: Any
) -> None:
    """Of the cases of these names, or of all that need no experts.

    Args:
        columns: those of a forward stage are compared first.
        settings: of the model.
    """
    ranks, shared, alone = stacks_of(rank, folder, layout, **settings)
    items = rows(*(FEW if columns else SHAPES), temperature=TEMPERATURES)
    if rank == 0:
        stack = alone.new("policy")
        items = near(items, [torch.from_numpy(own) for own in stack.log_prob(items)])
    names = names or [name for name, trains, *_ in cases(items) if trains != "routes"]
    chosen = [case for case in cases(items) if case[0] in names]
    assert len(chosen) >= len(names)
    for name, trains, objective, updates in chosen:
        stack = shared.new(trains)
        if rank > 0:
            follow(stack, ranks, [stage_of(trains, stack)])
            weights_of(stack)
            continue
        reference = alone.new(trains)
        if columns:
            same_columns(trains, stack, reference, [items, items[-1:]])
        if trains == "routes":
            updates = replayed(reference, updates)
        same_update(name, stack, reference, objective, updates)


def same_joint_updates(rank: int, folder: Path, name: str, layout: Layout, settings: dict[str, Any]) -> None:
    same_updates(rank, folder, layout, [name], columns=True, budget=60, **settings)


def same_weights_and_ends(rank: int, folder: Path) -> None:
    """Forward stages, weights for an engine, and calls that rank 0 ends; four ranks are two shares."""
    ranks, shared, alone = stacks_of(rank, folder, {"context_parallel": 2} if dist.get_world_size() == 4 else SUM_LATER)
    assert ranks.maximum(rank) == ranks.size - 1
    for trains in ("policy", "scalar"):
        stack = shared.new(trains)
        if rank > 0:
            follow(stack, ranks, [stage_of(trains, stack)])
            same_schedule(stack)
            continue
        reference, items = alone.new(trains), trajectories()
        same_columns(trains, stack, reference, (items, items[2:3], []))
        whole = stack.gathered()
        assert same(dict(whole.model.named_parameters()), dict(reference.model.model.named_parameters()))
        assert stack.gathered() is whole  # one copy, however often
        if trains == "policy":
            ended_calls(stack, items)
        ranks.end(None)
        same_schedule(stack)


@contextmanager
def received_bytes() -> Iterator[list[int]]:
    """The bytes of the tensors that other ranks have sent to this one, one entry for each."""
    received = list[int]()

    def counting(operation):
        def counted(tensor, *args, **kwargs):
            received.append(tensor.numel() * tensor.element_size())
            return operation(tensor, *args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("broadcast", "scatter", "recv"):
            patch.setattr(dist.distributed_c10d, name, counting(getattr(dist, name)))
        yield received


def only_its_share(rank: int, folder: Path) -> None:
    """A rank receives its part of the items and no other, whatever it computes: each column of a run with a reference,
    a critic and a teacher, and its update."""
    ranks, shared, _ = stacks_of(rank, folder, {}, budget=600)
    stack, critic, draw = shared.new("policy"), shared.new("scalar"), np.random.default_rng(4)
    items = [
        replace(
            row,
            behavior_log_prob=-draw.random(len(row.tokens)),
            reference_log_prob=-draw.random(len(row.tokens)),
            advantage=draw.normal(size=len(row.tokens)),
        )
        for row in near(rows(*[(9, (250, 260))] * 8), [torch.zeros(260)[: 250 + 10 * (i % 2)] for i in range(16)])
    ]
    whole = len(pickle.dumps(items))
    stages = {
        "log-probs": (stack, LogProbStage("proximal_log_prob", stack.model)),
        "reference": (stack, LogProbStage("reference_log_prob", stack.model)),
        "teacher": (stack, TeacherStage(policy=stack.model, top_k=2, top_k_of="teacher", vocabulary=VOCABULARY)),
        "values": (critic, ValueStage(critic.model)),
    }
    objective = policy(penalties=[PENALTIES["k3"](coefficient=0.1)])
    calls = {name: partial(of.columns, stage, items) for name, (of, stage) in stages.items()}
    calls["update"] = partial(stack.update, objective, [items])
    for name, call in calls.items():
        if rank == 0:
            call()
            ranks.end(None)
            continue
        of, *own = stages.get(name, (stack,))
        with received_bytes() as received:
            follow(of, ranks, own)
        assert sum(received) < 1.3 * whole / ranks.shares, (name, received, whole)


class FailsOnOne(PolicyObjective):
    """As where one rank of a group has no memory left for its loss."""

    def losses(self, batch, outputs, statistics=None):
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return super().losses(batch, outputs, statistics)


def one_of_a_group_fails(rank: int, folder: Path) -> None:
    """Two ranks compute each share; the loss of one fails in the first of several micro-batches, and both hear it."""
    ranks, shared, _ = stacks_of(rank, folder, {"context_parallel": 2})
    stack = shared.new("policy")
    if rank > 0:
        follow(stack, ranks)
        return
    objective = FailsOnOne(surrogate=SURROGATES["ppo_clip"](), aggregate=TokenMean())
    with pytest.raises(RankError, match="rank 1: RuntimeError: out of memory"):
        stack.update(objective, [trajectories()])
    assert stack.updates == 0 and not stack.ranks.in_call
    assert stack.update(policy(), [trajectories()]).updates == 1
    ranks.end(None)


def same_schedule(stack: TrainStack) -> None:
    """Each rank steps its own shards, at the learning rate of its own count of updates."""
    assert len(set(stack.ranks.gather_everywhere(stack.updates))) == 1


def ended_calls(stack: TrainStack, items) -> None:
    """Each leaves every rank ready for the next call, and the weights as they were."""

    def refuse(first):
        assert [item.key for item, _ in first] == [
            item.key for item in items if item.tokens.size and item.advantage.any()
        ]
        raise RuntimeError("too far")

    with pytest.raises(RuntimeError, match="too far"):
        stack.update(policy(), [items], before_first=refuse)
    assert stack.updates == 0 and not stack.ranks.in_call
    raised = set()
    for i, item in enumerate(items):
        if not (item.tokens.size and item.advantage.any()):
            continue
        broken = [*items[:i], replace(item, advantage=np.inf), *items[i + 1 :]]
        with pytest.raises((RankError, ValueError), match="PolicyBatch.advantage: inf at token") as caught:
            stack.update(policy(), [broken])
        assert stack.updates == 0 and not stack.ranks.in_call
        raised.add(type(caught.value))
    assert raised == {RankError, ValueError}  # of another rank's items, and of its own
    large = [replace(items[1], advantage=1e30), *items]
    with pytest.raises(NotFiniteError, match="gradient norm|weights"):
        stack.update(policy(surrogate=SURROGATES["reinforce"](), aggregate=AGGREGATES["token_sum"]()), [large] * 2)
    assert not stack.ranks.in_call
    before, stop = stack.updates, EarlyStop(limit=1e-9, items=len(items))
    result = stack.update(policy(), [items[:5], items[5:], items[:5]], should_continue=stop, planned=3)
    assert stack.updates == before + 3
    assert (stop.epochs, result.updates) == (1, 2)


def same_updates_of_images(rank: int, folder: Path) -> None:
    """Updates of a model that is shown images, on texts beside images, so that one rank may have none to show."""
    images, answers = ImageStore(str(folder)), np.arange(3, 12, dtype=np.int32)
    tokenizer = ImageTokenizer(load_tokenizer(images.model), images)
    chats = [images.numbered([{"role": "user", "content": "a?"}], [picture(n, 20, 16)] * (n > 2)) for n in range(5)]
    items = [
        Trajectory(group=n, prompt_tokens=prompt_tokens(chat, tokenizer), tokens=answers[: 4 + n])
        for n, chat in enumerate(chats)
    ]
    ranks, shared, alone = stacks_of(rank, folder, {}, images=images, vision_lr_ratio=0.5)
    stack = shared.new("policy")
    if rank > 0:
        follow(stack, ranks)
        weights_of(stack)
        return
    reference = alone.new("policy")
    moved = same_update("images", stack, reference, SftObjective(), [items, items[:2], items[2:]])
    assert moved & vision_parameters(reference.model.model).keys()
