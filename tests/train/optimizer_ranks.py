"""What every rank does in `test_optimizer_step`: each kind of optimizer on slices, against one process; and runs that
are saved on one number of ranks and go on on another."""

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.sharding import Sharding
from proxima.train import OPTIMIZERS, AdamW, Schedule, TrainStack, optimizer_muon
from proxima.train.checkpoint import checkpoints, write_checkpoint
from proxima.train.checkpoint_restore import restore
from proxima.train.optimizer_muon import Muon
from proxima.train.process_ranks import ProcessRanks
from proxima.train.sharded_checkpoint import ShardedWriter
from tests.model.parallel.passes import loss, source
from tests.model.rows import MIXED, rows

SHAPES = {
    "layers.0.a": (5, 1024),
    "embed": (37, 512),
    "layers.0.b": (48, 7),
    "layers.0.experts": (3, 8, 512),
    "n": (7,),
}


def specs() -> dict[str, AdamW]:
    """Every kind that can be built here, with moments in host memory."""
    made = {
        "adamw": AdamW(lr=1e-3, weight_decay=0.1),
        "offload": AdamW(lr=1e-3, weight_decay=0.1, offload=True),
        "muon": Muon(lr=1e-3, weight_decay=0.1, adamw_lr=3e-4),
    }
    if find_spec("torchao"):
        made["adamw_8bit"] = OPTIMIZERS["adamw_8bit"](lr=1e-3, weight_decay=0.1)
    return made


def drawn(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def stepped(spec, mesh=None, placements=(), steps: int = 3) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Weights of `SHAPES` after steps with the same gradients everywhere."""

    def laid_out(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if mesh is None:
            return tensor
        fitting = [Replicate() if p.is_shard(1) and len(SHAPES[name]) < 2 else p for p in placements]
        return distribute_tensor(tensor, mesh, fitting)

    named = {name: nn.Parameter(laid_out(name, value)) for name, value in drawn(0).items()}
    build = getattr(spec, "build_named", None)
    optimizer = spec.build(list(named.values())) if build is None else build(list(named.items()))
    for step in range(steps):
        for name, gradient in drawn(1 + step).items():
            named[name].grad = laid_out(name, gradient)
        optimizer.step()
    return named, optimizer


def slices() -> None:
    """On every layout of four ranks what one process has: weights and state."""
    layouts = {
        "full": ((4,), (Shard(0),)),
        "hybrid": ((2, 2), (Replicate(), Shard(0))),
        "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    }
    for kind, spec in specs().items():
        expected, plain = stepped(spec)
        for layout, (shape, placements) in layouts.items():
            mesh = init_device_mesh("cpu", shape)
            parameters, optimizer = stepped(spec, mesh, placements)
            for name, parameter in parameters.items():
                where = f"{kind}, {layout}, {name}"
                assert isinstance(parameter, DTensor)
                alike(whole_tensor(parameter), expected[name], where)
                slots, theirs = optimizer.state[parameter], plain.state[expected[name]]
                assert slots.keys() == theirs.keys(), where
                for key, value in theirs.items():
                    alike(whole_tensor(slots[key]), value, f"{where}, {key}")


def one_matrix_a_rank() -> None:
    """Of Muon's two matrices the first two of four ranks orthogonalize one each, at every step."""
    plain, calls = optimizer_muon._newton_schulz, []
    optimizer_muon._newton_schulz = lambda update: calls.append(update.shape) or plain(update)
    try:
        stepped(Muon(), init_device_mesh("cpu", (2, 2)), (Replicate(), Shard(0)))
    finally:
        optimizer_muon._newton_schulz = plain
    own = [(48, 7), (5, 1024)][dist.get_rank() :][:1]
    assert calls == own * 3


def alike(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """But for float32's last bit, which the end of a vector register has otherwise than its middle."""
    exact = not expected.is_floating_point()
    message = f"{where}: {{}}".format
    torch.testing.assert_close(actual, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-9, msg=message)


def stack_of(folder: Path, kind: str, saved: Path | None = None) -> TrainStack:
    """A stack on the ranks that there are; the saved one, if there is one."""
    alone = not dist.is_initialized()
    sharding = (
        None if alone else Sharding(kind="hybrid", ranks_per_node=2) if dist.get_world_size() == 4 else Sharding()
    )
    made = source(folder / "qwen2", sharding=sharding)
    policy = made.policy(made.load(None if saved is None else str(saved / "000001" / "model")))
    ranks = {} if alone else {"ranks": ProcessRanks(dist.get_rank(), dist.get_world_size())}
    schedule = Schedule("linear", total_updates=8, warmup=2)
    stack = TrainStack(policy, optimizer=specs()[kind], schedule=schedule, max_grad_norm=0.5, **ranks)
    if saved is not None:
        (checkpoint,) = checkpoints(saved)
        restore(checkpoint, stack)
    return stack


def train(stack: TrainStack, updates: int) -> list[float]:
    """The loss and the norm of the gradient of each update."""
    sequences, values = rows(*MIXED), []
    for _ in range(updates):
        value = loss(stack.model, stack.model.pack(sequences[stack.ranks.rank :: stack.ranks.size]), frozenset())
        value.backward()
        values += [float(stack.ranks.sum(value.detach())), float(stack._step())]
    return values


def whole_state(stack: TrainStack) -> dict[str, torch.Tensor]:
    tensors = stack.state()[0] | {name: p.detach() for name, p in stack.model.named_parameters()}
    return {name: whole_tensor(tensor).clone() for name, tensor in tensors.items()}


def saves(stack: TrainStack, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    if stack.ranks.size == 1:
        write_checkpoint(folder, 1, stack.model.loaded, stack, {})
    else:
        dist.barrier()
        ShardedWriter().write(folder, 1, stack.model.loaded, stack, {})


def goes_on(folder: Path, by: str) -> None:
    """Two updates, a checkpoint, two more; a resumed stack makes these bit by bit."""
    for kind in specs():
        stack = stack_of(folder, kind)
        values = train(stack, 2)
        saves(stack, folder / f"{kind} by {by}")
        saved = whole_state(stack)
        values += train(stack, 2)
        expected = whole_state(stack)
        again = stack_of(folder, kind, folder / f"{kind} by {by}")
        same(whole_state(again), saved)
        assert train(again, 2) == values[4:]
        same(whole_state(again), expected)
        if stack.ranks.rank == 0:
            save_file(saved, folder / f"{kind} by {by}.safetensors")
            save_file({"values": torch.tensor(values)}, folder / f"{kind} values {by}.safetensors")


def on_two(rank: int, folder: Path) -> None:
    in_float32()
    goes_on(folder, "two")


def on_four(rank: int, folder: Path) -> None:
    slices()
    one_matrix_a_rank()
    in_float32()
    elsewhere(folder)


def in_float32() -> None:
    """Muon's step without bfloat16, which amplifies the last bits in which the gradients of two layouts differ."""
    optimizer_muon.GATHERED, optimizer_muon._newton_schulz = torch.float32, newton_schulz


def newton_schulz(update: torch.Tensor) -> torch.Tensor:
    a, b, c = optimizer_muon.COEFFICIENTS
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / x.norm()
    for _ in range(optimizer_muon.DEFAULT_NS_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def elsewhere(folder: Path) -> None:
    """What one and two processes have saved, loaded on any number; it goes on as it did there."""
    for kind in specs():
        for by in ("one", "two"):
            stack = stack_of(folder, kind, folder / f"{kind} by {by}")
            same(whole_state(stack), load_file(folder / f"{kind} by {by}.safetensors"))
            there = load_file(folder / f"{kind} values {by}.safetensors")["values"].tolist()
            torch.testing.assert_close(torch.tensor(train(stack, 2)), torch.tensor(there[4:]), rtol=1e-5, atol=0)
