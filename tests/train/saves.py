"""What every rank does in `test_sharded_checkpoint`."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from proxima.data import NotFiniteError
from proxima.model import PackedModel
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.model.scalar_model import make_value_head
from proxima.train import AdamW, TrainStack, sharded_checkpoint
from proxima.train.checkpoint import VALUE_HEAD, Checkpoint, checkpoints, read_checkpoint
from proxima.train.checkpoint_restore import damage, restore
from proxima.train.sharded_checkpoint import ShardedWriter
from tests.model.parallel.passes import LORA, loss, source
from tests.model.rows import MIXED, rows

NEEDS = {"policy": frozenset({"value"}), "critic": frozenset({"value"}), "adapter": frozenset[str]()}


def stacks(folder: Path, sharding: Sharding | None, saved: Path | None = None) -> dict[str, TrainStack]:
    """A policy with a value head, a critic, and a policy with adapters: new ones, or those of the checkpoints in
    `saved`."""
    plain, lora = (source(folder / "qwen2", sharding=sharding, lora=extra) for extra in (None, LORA))
    both = None if saved is None else str(saved / "000001/model")
    loaded = plain.load(both)
    head = make_value_head(loaded.model, 0.3, 5)
    if saved is not None:
        head.load_state_dict(load_file(saved / "000001" / VALUE_HEAD))
    models: dict[str, PackedModel] = {
        "policy": plain.policy(loaded, head),
        "critic": plain.scalar(plain.load_scalar(str(saved / "000001/critic") if saved else None, head_std=0.3)),
        "adapter": lora.policy(lora.load(str(saved / "000002/model") if saved else None)),
    }
    return {name: TrainStack(model, optimizer=AdamW(lr=1e-3)) for name, model in models.items()}


def train(stack: TrainStack, needs: frozenset[str]) -> None:
    sequences = rows(*MIXED)
    own = sequences[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else sequences
    loss(stack.model, stack.model.pack(own), needs).backward()
    stack.optimizer.step()
    stack.optimizer.zero_grad()
    stack.updates += 1


def whole_state(all_stacks: dict[str, TrainStack]) -> dict[str, torch.Tensor]:
    state = {}
    for name, stack in all_stacks.items():
        names = {id(p): key for key, p in stack.model.named_parameters()}
        for parameter in stack.parameters:
            key = names[id(parameter)]
            state[f"{name} {key}"] = whole_tensor(parameter).clone()
            for slot, value in stack.optimizer.state[parameter].items():
                state[f"{name} {slot}/{key}"] = whole_tensor(value).clone()
    return state


def save_all(writer: ShardedWriter, folder: Path, all_stacks: dict[str, TrainStack], **how) -> None:
    policy, critic, adapter = (all_stacks[name] for name in ("policy", "critic", "adapter"))
    files = {"note.txt": lambda path: path.write_text("of rank 0")}
    writer.write(folder, 1, policy.model.loaded, policy, {"version": 7}, files, {"critic": critic}, **how)
    writer.write(folder, 2, adapter.model.loaded, adapter, {}, **how)


def restore_all(folder: Path, saved: Path, sharding: Sharding | None) -> dict[str, TrainStack]:
    again = stacks(folder, sharding, saved)
    first, second = checkpoints(saved)
    restore(first, again["policy"], {"critic": again["critic"]})
    restore(second, again["adapter"])
    assert [stack.updates for stack in again.values()] == [2, 2, 2]
    return again


def same_state(all_stacks: dict[str, TrainStack], expected: dict[str, torch.Tensor]) -> None:
    state = whole_state(all_stacks)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def first_saves(rank: int, folder: Path) -> None:
    """Two updates and their checkpoint, waited for and in a thread."""
    all_stacks, writer = stacks(folder, Sharding()), ShardedWriter()
    (folder / "by two").mkdir(exist_ok=True)
    (folder / "by thread").mkdir(exist_ok=True)
    for _ in range(2):
        for name, stack in all_stacks.items():
            train(stack, NEEDS[name])
    state = whole_state(all_stacks)
    if rank == 0:
        save_file(state, folder / "expected.safetensors")
    save_all(writer, folder / "by two", all_stacks)
    dist.barrier()
    save_all(writer, folder / "by thread", all_stacks, wait=False)
    for name, stack in all_stacks.items():
        train(stack, NEEDS[name])  # what is written is of the moment of the call
    complete = writer.finish()
    assert isinstance(complete, Checkpoint) and complete.step == 2 and not writer.unfinished and writer.finish() is None
    failures(rank, folder, all_stacks, writer)
    experts = source(folder / "experts", sharding=Sharding())
    stack = TrainStack(experts.policy(experts.load()))
    train(stack, frozenset())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sharded_checkpoint, "FILE", 20_000)
        writer.write(folder, 5, stack.model.loaded, stack, {})


def failures(rank: int, folder: Path, all_stacks: dict[str, TrainStack], writer: ShardedWriter) -> None:
    """A failure of one rank is every rank's, and leaves the checkpoints before it alone."""
    adapter, place = all_stacks["adapter"], folder / "by thread"

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("sync_path", "save"):
        for wait in (True, False):
            with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(OSError, match="No space left"):
                if rank == 1 or name == "save":
                    monkeypatch.setattr(sharded_checkpoint, name, full)
                assert writer.write(place, 3, adapter.model.loaded, adapter, {}, wait=wait) is None
                writer.finish()
            dist.barrier()
            assert sorted(path.name for path in place.iterdir()) == ["000001", "000002"]
            dist.barrier()
    parameter = adapter.parameters[-1]
    slot = adapter.optimizer.state[parameter]["exp_avg"].to_local()
    if rank == 1:
        slot.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="exp_avg"):
        writer.write(place, 3, adapter.model.loaded, adapter, {})


def killed_while_it_writes(rank: int, folder: Path) -> None:
    """Rank 1 is killed in the middle of the second checkpoint; rank 0 learns of it when it asks."""
    source_of = source(folder / "qwen2", sharding=Sharding())
    stack, writer, place = TrainStack(source_of.policy(source_of.load())), ShardedWriter(), folder / "killed"
    place.mkdir(exist_ok=True)
    dist.barrier()
    writer.write(place, 1, stack.model.loaded, stack, {})
    if rank == 1:
        sharded_checkpoint.sync_path = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    writer.write(place, 2, stack.model.loaded, stack, {}, wait=False)
    with pytest.raises(RuntimeError, match="closed by peer|reset by peer"):
        writer.finish()
    assert sorted(path.name for path in place.iterdir()) == ["000001"] and damage(place / "000001") is None
    os._exit(0)


def later_loads(rank: int, folder: Path) -> None:
    """On another number of ranks: from checkpoints of two, and of one process; and another one is written."""
    expected = load_file(folder / "expected.safetensors")
    for saved in ("by two", "by thread", "by one"):
        hybrid = Sharding(kind="hybrid", ranks_per_node=2)
        for sharding in (Sharding(context_parallel=2), hybrid, Sharding(offload=True)):
            again = restore_all(folder, folder / saved, sharding)
            same_state(again, expected)
    writer = ShardedWriter()
    (folder / "by four").mkdir(exist_ok=True)
    save_all(writer, folder / "by four", again)
    for name, stack in again.items():
        train(stack, NEEDS[name])
    split = Sharding(kind="hybrid", ranks_per_node=2, context_parallel=2)
    parts = restore_all(folder, folder / "by four", split)
    (folder / "by hybrid").mkdir(exist_ok=True)
    dist.barrier()
    save_all(writer, folder / "by hybrid", parts, wait=False)
    writer.finish()
    assert damage(folder / "by hybrid" / "000001") is None and read_checkpoint(folder / "by four" / "000001")


def expert_stack(folder: Path, sharding: Sharding | None, saved: Path | None = None) -> dict[str, TrainStack]:
    model = source(folder / "qwen3_moe", sharding=sharding)
    loaded = model.load(None if saved is None else str(saved / "000001/model"))
    stack = TrainStack(model.policy(loaded), optimizer=AdamW(lr=1e-3))
    if saved is not None:
        restore(checkpoints(saved)[0], stack)
    return {"policy": stack}


def saves_of_experts(rank: int, folder: Path) -> None:
    """Written by ranks that split the experts, in every way, and by ranks that do not."""
    first = expert_stack(folder, Sharding(expert_parallel=2))
    for _ in range(2):
        train(first["policy"], frozenset())
    state, writer = whole_state(first), ShardedWriter()
    if rank == 0:
        save_file(state, folder / "expected.safetensors")
    ways = {
        "two": Sharding(expert_parallel=2),
        "none": Sharding(),
        "four": Sharding(expert_parallel=4, offload=True),
        "hybrid": Sharding(kind="hybrid", ranks_per_node=2, expert_parallel=2),
    }
    stacks, before = first, None
    for name, sharding in ways.items():
        place = folder / f"by {name}"
        place.mkdir(exist_ok=True)
        if before is not None:
            stacks = expert_stack(folder, sharding, before)
            same_state(stacks, state)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(sharded_checkpoint, "FILE", 20_000)
            writer.write(place, 1, stacks["policy"].model.loaded, stacks["policy"], {}, wait=name != "two")
        writer.finish()
        before = place


def loads_of_experts(rank: int, folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    for saved in ("by one", "by hybrid"):
        same_state(expert_stack(folder, Sharding(expert_parallel=2), folder / saved), expected)
