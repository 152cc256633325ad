"""What every rank does in `test_checkpoints`."""

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from proxima.data import NotFiniteError
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.training import sharded_checkpoint
from proxima.training.checkpoint import (
    VALUE_HEAD,
    Checkpoint,
    CheckpointContents,
    checkpoints,
    damage,
    restore,
    write_checkpoint,
    write_tensors,
)
from proxima.training.sharded_checkpoint import ShardedWriter
from proxima.training.stack import TrainStack
from tests.model.parallel.passes import LORA, backward, model_of, source
from tests.model.rows import same
from tests.training.optimizer_ranks import specs

#: what each trains, and its place in checkpoints
KINDS = {
    "policy": ("head", "000001/model"),
    "critic": ("scalar", "000001/critic"),
    "adapter": ("policy", "000002/model"),
}
NEEDS = {"policy": frozenset({"value"}), "critic": frozenset({"value"}), "adapter": frozenset[str]()}
EXPECTED = "expected.safetensors"
Stacks = dict[str, TrainStack]


def stacks(
    model: Path, kinds: Sequence[str], sharding: Sharding | None, saved: Path | None = None, optimizer: str = "adamw"
) -> Stacks:
    """A policy with a value head, a critic, and a policy with adapters: new ones, or those of the checkpoints in
    `saved`."""
    made: Stacks = {}
    for name in kinds:
        trains, place = KINDS[name]
        own = source(model, sharding=sharding, lora=LORA if name == "adapter" else None)
        made[name] = TrainStack(model_of(own, trains, saved and str(saved / place)), optimizer=specs()[optimizer])
    if saved is not None:
        first, *others = checkpoints(saved)
        restore(first, made["policy"], {"critic": made["critic"]} if "critic" in made else {})
        for checkpoint in others:
            restore(checkpoint, made["adapter"])
        assert {stack.updates for stack in made.values()} == {2}
    return made


def train(all_stacks: Stacks) -> None:
    for name, stack in all_stacks.items():
        backward(stack.model, NEEDS[name])
        stack.optimizer.step()
        stack.optimizer.zero_grad()
        stack.updates += 1


def whole_state(all_stacks: Stacks) -> dict[str, torch.Tensor]:
    state = {}
    for name, stack in all_stacks.items():
        names = {id(p): key for key, p in stack.model.named_parameters()}
        for parameter in stack.parameters:
            key = names[id(parameter)]
            state[f"{name} {key}"] = whole_tensor(parameter).clone()
            for slot, value in stack.optimizer.state[parameter].items():
                state[f"{name} {slot}/{key}"] = whole_tensor(value).clone()
    return state


def save_all(writer: ShardedWriter, folder: Path, all_stacks: Stacks) -> None:
    policy, critics = all_stacks["policy"], {name: stack for name, stack in all_stacks.items() if name == "critic"}
    facts = {"version": 7 + dist.get_rank()}  # those of rank 0 count
    files = {"note.txt": lambda path: path.write_text("of rank 0")}
    steps = {1: CheckpointContents(stack=policy, facts=facts, files=files, others=critics)}
    if "adapter" in all_stacks:
        steps[2] = CheckpointContents(stack=all_stacks["adapter"])
    for step, contents in steps.items():
        if policy.model.loaded.sharding is not None:
            writer.write(folder, step, contents)
        elif dist.get_rank() == 0:
            head = contents.stack.model.value_head
            heads = {} if head is None else {VALUE_HEAD: lambda path, head=head: write_tensors(path, head.state_dict())}
            write_checkpoint(folder, step, replace(contents, files={**contents.files, **heads}))


def moves(
    rank: int,
    folder: Path,
    place: Path,
    model: str,
    kinds: Sequence[str],
    layouts: Sequence[dict[str, Any] | None],
    optimizer: str = "adamw",
) -> None:
    """Written with one layout and read with the next, after what other ranks have left in `place`: weights and
    optimizer state are the same bits; on the first layout again, those of the next update too. None: one process.
    """
    writer, already = ShardedWriter(), len([*place.glob("[0-9]")])
    for number, layout in enumerate(layouts, already):
        sharding, before = None if layout is None else Sharding(**layout), place / str(number - 1)
        if number:
            made = stacks(folder / model, kinds, sharding, before, optimizer)
            assert same(whole_state(made), load_file(place / EXPECTED))
        else:
            made = stacks(folder / model, kinds, sharding, optimizer=optimizer)
            train(made)
            train(made)
            state = whole_state(made)
            if rank == 0:
                save_file(state, place / EXPECTED)
        dist.barrier()
        (place / str(number)).mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if number:
                monkeypatch.setattr(sharded_checkpoint, "FILE", 20_000)
            save_all(writer, place / str(number), made)
            if sharding is not None:
                train(made)  # what is written is of the moment of the call
            writer.finish()
        if sharding is not None:
            state = whole_state(made)
            if number == 0 == rank:
                save_file(state, place / "next.safetensors")
            if number and not already and layout == layouts[0]:
                assert same(state, load_file(place / "next.safetensors"))
        dist.barrier()
        assert all(damage(each.path) is None for each in checkpoints(place / str(number)))


def failures(rank: int, folder: Path, place: Path) -> None:
    """A failure of one rank is every rank's, and leaves the checkpoints before it alone."""
    made, writer = stacks(folder / "qwen2", ["policy"], Sharding()), ShardedWriter()
    stack = made["policy"]
    train(made)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(step: int) -> None:
        writer.write(place, step, CheckpointContents(stack=stack))

    write(2)
    complete = writer.finish()
    assert isinstance(complete, Checkpoint) and complete.step == 2 and not writer.unfinished and writer.finish() is None
    for name in ("flush_to_disk", "save"):
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(OSError, match="No space left"):
            if rank == 1 or name == "save":
                monkeypatch.setattr(sharded_checkpoint, name, full)
            write(3)
            writer.finish()
        dist.barrier()
        assert sorted(path.name for path in place.iterdir()) == ["000002"]
        dist.barrier()
    slot = stack.optimizer.state[stack.parameters[0]]["exp_avg"].to_local()
    if rank == 1:
        slot.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="exp_avg"):
        write(3)


def killed_while_it_writes(rank: int, folder: Path, place: Path) -> None:
    """Rank 1 is killed in the middle of the second checkpoint; rank 0 learns of it when it asks."""
    source_of = source(folder / "qwen2", sharding=Sharding())
    stack, writer = TrainStack(source_of.policy(source_of.load())), ShardedWriter()
    writer.write(place, 1, CheckpointContents(stack=stack))
    writer.finish()
    if rank == 1:
        sharded_checkpoint.flush_to_disk = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    writer.write(place, 2, CheckpointContents(stack=stack))
    with pytest.raises(RuntimeError, match="closed by peer|reset by peer"):
        writer.finish()
    assert sorted(path.name for path in place.iterdir()) == ["000001"] and damage(place / "000001") is None
    os._exit(0)
