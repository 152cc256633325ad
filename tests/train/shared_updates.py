"""What every rank does in `test_ranks`: updates on several ranks against the same on one process."""

from collections.abc import Iterable, Iterator, Sequence
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
from proxima.data import NotFiniteError, Trajectory
from proxima.model import PackedModel
from proxima.model.chat import prompt_tokens
from proxima.model.images import ImageStore, ImageTokenizer
from proxima.model.model_source import ModelSource
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.model.pretrained import beside_decoder, load_tokenizer
from proxima.model.scalar_model import make_value_head
from proxima.runtime.placement.follower import RankModels
from proxima.train import (
    EarlyStop,
    LogProbStage,
    PolicyObjective,
    PreferenceObjective,
    Schedule,
    TrainStack,
    ValueObjective,
    ValueStage,
)
from proxima.train.messages import End
from proxima.train.objectives.kto_objective import KtoObjective
from proxima.train.objectives.reward_objective import RewardObjective
from proxima.train.objectives.sft_objective import SftObjective
from proxima.train.process_ranks import ProcessRanks
from proxima.train.ranks import RankError, Refused
from tests.tiny_images import picture
from tests.train.helpers import trajectories, valued
from tests.train.test_kto_objective import labeled
from tests.train.test_preference_objective import pairs
from tests.train.test_reward_objective import pairs as reward_pairs

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


def sharding_of(ranks: ProcessRanks) -> Sharding:
    """Ranks with items of their own add up their gradients in the last micro-batch alone, those of a group in each."""
    return Sharding(context_parallel=ranks.together) if ranks.together > 1 else Sharding(sum_gradients="update")


def stack_of(folder: Path, ranks: ProcessRanks | None, *, scalar: bool = False, head: bool = False) -> TrainStack:
    sharding = None if ranks is None else sharding_of(ranks)
    source = ModelSource(path=str(folder / "llama-0"), device="cpu", compute_dtype="float32", sharding=sharding)
    if scalar:
        model = source.scalar(source.load_scalar(head_std=0.3))
    else:
        loaded = source.load()
        model = source.policy(loaded, make_value_head(loaded.model, 0.3, 1) if head else None)
    return train_stack(model, ranks)


def train_stack(model: PackedModel, ranks: ProcessRanks | None) -> TrainStack:
    settings = {} if ranks is None else {"ranks": ranks}
    return TrainStack(model, optimizer=Sgd(), schedule=Schedule(total_updates=9), tokens_per_micro_batch=20, **settings)


class Stacks:
    """Stacks that have not been trained, on one model of each kind: to load and shard it takes as long as its updates.

    Args:
        ranks: that share the models; None: one process has each.
    """

    def __init__(self, folder: Path, ranks: ProcessRanks | None) -> None:
        self.folder, self.ranks = folder, ranks
        self.kept: dict[frozenset[str], tuple[TrainStack, list[torch.Tensor]]] = {}

    def new(self, **settings: bool) -> TrainStack:
        kind = frozenset(settings)
        if kind not in self.kept:
            made = stack_of(self.folder, self.ranks, **settings)
            self.kept[kind] = made, [p.detach().clone() for p in made.parameters]
        first, weights = self.kept[kind]
        with torch.no_grad():
            for parameter, weight in zip(first.parameters, weights, strict=True):
                parameter.copy_(weight)
                parameter.grad = None
        return train_stack(first.model, self.ranks)


def weights_of(stack: TrainStack) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(parameter) for name, parameter in stack.model.model.named_parameters()}


def policy(**settings) -> PolicyObjective:
    return PolicyObjective(**({"surrogate": SURROGATES["ppo_clip"](), "aggregate": TokenMean()} | settings))


Case = tuple[str, Any, list[list[Any]], dict[str, bool]]


def cases() -> Iterator[Case]:
    """A name, its kind first; the objective, the items of each update, and how the stack is made."""
    items = trajectories()
    two = [items[:5], items[5:]]
    for name, surrogate in SURROGATES.items():
        if surrogate().needs <= GIVEN:
            yield f"surrogate {name}", policy(surrogate=surrogate()), two, {}
    for name, aggregate in AGGREGATES.items():
        yield f"aggregate {name}", policy(aggregate=aggregate()), two, {}
    for name, correction in CORRECTIONS.items():
        spec = correction()
        if spec.needs <= GIVEN:
            yield f"correction {name}", policy(corrections=[spec]), two, {}
    yield "reference KL", policy(penalties=[PENALTIES["k3"](coefficient=0.1)]), two, {}
    yield "first forward", policy(proximal="first_forward"), two, {}
    yield "one trajectory", policy(), [items[:1]], {}
    yield "a rank without any in the second", policy(), [items, items[1:2], items[4:7]], {}
    yield "nothing to train", policy(), [[replace(items[0], advantage=0.0)], items], {}
    yield "SFT", SftObjective(), two, {}
    yield "value head", policy(terms=[ValueObjective(coefficient=0.5)]), [valued(part) for part in two], {"head": True}
    yield "critic", ValueObjective(loss=ValueLoss()), [valued(part) for part in two], {"scalar": True}
    yield (
        "reward model",
        RewardObjective(loss=RewardLoss(center=0.1), pad=1),
        [reward_pairs(), reward_pairs()[:1]],
        {"scalar": True},
    )
    yield "KTO", KtoObjective(spec=Kto(beta=0.3)), [labeled(), labeled()[:3]], {}
    for name, preference in PREFERENCES.items():
        yield f"preference {name}", PreferenceObjective(terms=[preference()]), [pairs(), pairs()[2:4]], {}


def follow(stack: TrainStack, ranks: ProcessRanks, stages=()) -> None:
    models = RankModels(stacks={"policy": stack}, stages={"policy": stages})
    while not isinstance(message := ranks.receive(), End):
        try:
            models.take_part(message)
        except (Refused, NotFiniteError):
            continue


def close(ours: float, theirs: float) -> bool:
    return ours == pytest.approx(theirs, rel=1e-5, abs=4e-6, nan_ok=True)


def same_updates(rank: int, folder: Path, together: int, names: Sequence[str]) -> None:
    """`together` ranks compute each share, of which each has a part of the tokens; without names, all cases."""
    ranks = ProcessRanks(rank, dist.get_world_size(), together=together)
    shared, alone = Stacks(folder, ranks), Stacks(folder, None)
    chosen = [case for case in cases() if not names or case[0] in names]
    assert len(chosen) >= len(names)
    for name, objective, updates, settings in chosen:
        stack = shared.new(**settings)
        if rank > 0:
            follow(stack, ranks)
            weights_of(stack)
            continue
        reference = alone.new(**settings)
        expected, got = reference.update(objective, updates), stack.update(objective, updates)
        ranks.end(None)
        assert got.metrics.keys() == expected.metrics.keys(), name
        differing = {
            key: (got.metrics[key], x) for key, x in expected.metrics.items() if not close(got.metrics[key], x)
        }
        assert not differing, (name, differing)
        assert (got.updates, got.skipped) == (expected.updates, expected.skipped), (
            name
        )  # a prompt may be fed in more cuts
        assert got.tokens >= 0.8 * expected.tokens, name
        assert got.token_statistics.keys() == expected.token_statistics.keys(), name
        for key, statistics in expected.token_statistics.items():
            np.testing.assert_allclose(got.token_statistics[key].log_prob, statistics.log_prob, atol=2e-5, err_msg=name)
            np.testing.assert_array_equal(got.token_statistics[key].keep, statistics.keep, err_msg=name)
        before, after = weights_of(reference), weights_of(stack)
        for parameter, weight in before.items():
            torch.testing.assert_close(after[parameter], weight, rtol=1e-5, atol=2e-6, msg=f"{name}: {parameter}")


def same_columns(rank: int, folder: Path) -> None:
    """Forward stages, weights for an engine, and calls that rank 0 ends; four ranks are two shares."""
    ranks = ProcessRanks(rank, dist.get_world_size(), together=2 if dist.get_world_size() == 4 else 1)
    assert ranks.maximum(rank) == ranks.size - 1
    for scalar in (False, True):
        stack = stack_of(folder, ranks, scalar=scalar)
        stage = ValueStage if scalar else partial(LogProbStage, "reference_log_prob")
        if rank > 0:
            follow(stack, ranks, [stage(stack.model)])
            same_schedule(stack)
            continue
        reference, items = stack_of(folder, None, scalar=scalar), trajectories()
        for some in (items, items[2:3], []):
            expected, got = reference.columns(stage(reference.model), some), stack.columns(stage(stack.model), some)
            assert got.keys() == expected.keys()
            for column, values in expected.items():
                for ours, theirs in zip(got[column], values, strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=2e-5)
        plain = stack.gathered()
        for (name, weight), parameter in zip(
            reference.model.model.named_parameters(), plain.model.parameters(), strict=True
        ):
            assert torch.equal(weight, parameter), name
        if not scalar:
            ended_calls(stack, items)
        ranks.end(None)
        same_schedule(stack)


class FailsOnOne(PolicyObjective):
    """As where one rank of a group has no memory left for its loss."""

    def losses(self, batch, outputs, statistics=None):
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return super().losses(batch, outputs, statistics)


def one_of_a_group_fails(rank: int, folder: Path) -> None:
    """Two ranks compute each share; the loss of one fails in the first of several micro-batches, and both hear it."""
    ranks = ProcessRanks(rank, dist.get_world_size(), together=2)
    stack = stack_of(folder, ranks)
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
    broken = [replace(items[0], advantage=np.inf), *items[1:]]
    with pytest.raises(RankError, match=r"rank [12]: ValueError: PolicyBatch.advantage: inf at token 0"):
        stack.update(policy(), [broken])
    assert stack.updates == 0 and not stack.ranks.in_call
    large = [replace(items[1], advantage=1e30), *items]
    with pytest.raises(NotFiniteError, match="gradient norm|weights"):
        stack.update(policy(surrogate=SURROGATES["reinforce"](), aggregate=AGGREGATES["token_sum"]()), [large] * 2)
    assert not stack.ranks.in_call
    before, stop = stack.updates, EarlyStop(limit=1e-9, items=len(items))
    result = stack.update(policy(), [items[:5], items[5:], items[:5]], should_continue=stop, planned=3)
    assert stack.updates == before + 3
    assert (stop.epochs, result.updates) == (1, 2)


def same_updates_of_images(rank: int, folder: Path, kinds: Sequence[str]) -> None:
    """Updates of models that are shown images, on texts beside images, so that one rank may have none to show."""
    ranks, answers = ProcessRanks(rank, dist.get_world_size()), np.arange(3, 12, dtype=np.int32)
    for kind in kinds:
        images = ImageStore(str(folder / kind))
        tokenizer = ImageTokenizer(load_tokenizer(images.model), images)
        chats = [images.numbered([{"role": "user", "content": "a?"}], [picture(n, 20, 16)] * (n > 2)) for n in range(5)]
        rows = [
            Trajectory(group=n, prompt_tokens=prompt_tokens(chat, tokenizer), tokens=answers[: 4 + n])
            for n, chat in enumerate(chats)
        ]

        def stack(shared: ProcessRanks | None, images: ImageStore = images) -> TrainStack:
            source = ModelSource(
                path=images.model,
                device="cpu",
                compute_dtype="float32",
                sharding=None if shared is None else Sharding(),
                images=images,
                vision_lr_ratio=0.5,
            )
            return train_stack(source.policy(source.load()), shared)

        shared = stack(ranks)
        if rank > 0:
            follow(shared, ranks)
            weights_of(shared)
            continue
        alone = stack(None)
        begun = {name: weight.clone() for name, weight in weights_of(alone).items()}
        updates = [rows, rows[:2], rows[2:]]
        expected, got = alone.update(SftObjective(), updates), shared.update(SftObjective(), updates)
        ranks.end(None)
        assert close(got.metrics["loss"], expected.metrics["loss"]), kind
        before, after = weights_of(alone), weights_of(shared)
        for name, weight in before.items():
            torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=2e-6, msg=f"{kind}: {name}")
        assert any(not torch.equal(begun[name], before[name]) for name in beside_decoder(alone.model.model)), kind
