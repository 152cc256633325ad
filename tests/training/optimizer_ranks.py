"""What every rank does in `test_optimizer_step`: each kind of optimizer on slices, against one process."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from proxima.model.parallel.gather import whole_tensor
from proxima.training import OPTIMIZERS
from proxima.training.optimizer import AdamW
from proxima.training.optimizer_muon import Muon

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


Shapes = dict[str, tuple[int, ...]]
Named = dict[str, nn.Parameter]


def drawn(seed: int, shapes: Shapes = SHAPES) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def built(spec: Any, named: Named) -> Any:
    if hasattr(spec, "build_named"):
        return spec.build_named(list(named.items()))
    return spec.build(list(named.values())) if hasattr(spec, "build") else spec(named)


def stepped(spec, mesh=None, placements=(), *, steps: int = 2, shapes: Shapes = SHAPES) -> tuple[Named, Any]:
    """Weights after steps with the same gradients everywhere, and the optimizer.

    Args:
        spec: of an optimizer, or what makes one of weights by name.
    """

    def laid_out(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if mesh is None:
            return tensor
        fitting = [Replicate() if p.is_shard(1) and len(shapes[name]) < 2 else p for p in placements]
        return distribute_tensor(tensor, mesh, fitting)

    named = {name: nn.Parameter(laid_out(name, value)) for name, value in drawn(0, shapes).items()}
    optimizer = built(spec, named)
    for step in range(steps):
        for name, gradient in drawn(1 + step, shapes).items():
            named[name].grad = laid_out(name, gradient)
        optimizer.step()
    return named, optimizer


def slices(rank: int, folder: Path) -> None:
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


def alike(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """But for float32's last bit, which the end of a vector register has otherwise than its middle."""
    exact = not expected.is_floating_point()
    message = f"{where}: {{}}".format
    torch.testing.assert_close(actual, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-9, msg=message)
