"""Forward and backward passes on ranks against the same model in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from proxima.model import compilation
from proxima.model.adapters.lora import Lora, adapter_off
from proxima.model.attention import FLASH
from proxima.model.model_source import ModelSource
from proxima.model.packed_model import PackedModel
from proxima.model.parallel.gather import total_norm, whole_tensor
from proxima.model.parallel.sharding import Sharding, is_sharded
from proxima.model.scalar_model import make_value_head
from proxima.training.checkpoint import VALUE_HEAD
from proxima.training.forward_stage import top_tokens
from proxima_plan.rehearsal.fake_ranks import whole_gradients
from tests.model.rows import MIXED, rows
from tests.model.varlen_reference import stand_in

NEEDS = frozenset({"entropy", "entropy_gradient"})
LORA = Lora(rank=4, alpha=8, targets=("q_proj", "down_proj", "lm_head"), dora=True)


def source(folder: Path, **settings) -> ModelSource:
    return ModelSource(path=str(folder), compute_dtype="float32", device="cpu", log_prob_chunk=5, **settings)


def loss(model: PackedModel, batch, needs) -> torch.Tensor:
    outputs = model(batch, needs)
    parts = [t for t in (outputs.log_prob, outputs.entropy, outputs.value) if t is not None]
    return torch.stack([(t * torch.sin(batch.target + i)).sum() for i, t in enumerate(parts)]).sum() / 50


def gradients(model: PackedModel) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def place(model: PackedModel) -> tuple[int, int]:
    """The share of this rank, and how many there are."""
    together = model.loaded.sharding.ranks_per_share
    return dist.get_rank() // together, dist.get_world_size() // together


def own_share(model: PackedModel, busy: int | None = None):
    """This rank's sequences, those of its share; ranks of shares from `busy` on have none."""
    sequences, (share, shares) = rows(*MIXED, temperature=(0.7, 1.3)), place(model)
    return sequences[share :: busy or shares] if share < (busy or shares) else []


def backward(model: PackedModel, needs, *, parts: int = 1, busy: int | None = None) -> torch.Tensor:
    """One update's gradient, in so many micro-batches; its loss, over all shares."""
    own, total = own_share(model, busy), torch.zeros(())
    for part in range(parts):
        model.sync_gradients(part == parts - 1)
        if mine := own[part::parts]:
            value = loss(model, model.pack(mine), needs)
            value.backward()
            total += value.detach()
        else:
            model.idle_pass(needs, backward=True)
    if dist.get_rank() % model.loaded.sharding.ranks_per_share:
        total.zero_()
    dist.all_reduce(total)
    return total


def compare(
    plain: PackedModel,
    sharded: PackedModel,
    needs=NEEDS,
    *,
    parts: int = 1,
    busy: int | None = None,
    tolerance: float = 2e-6,
) -> None:
    """Loss, gradients and norms; shares from `busy` on have no sequence.

    Args:
        tolerance: of gradients, as a part of the largest.
    """
    for model in (plain, sharded):
        for _, parameter in model.named_parameters():
            parameter.grad = None
    expected = loss(plain, plain.pack(rows(*MIXED, temperature=(0.7, 1.3))), needs)
    expected.backward()
    total = backward(sharded, needs, parts=parts, busy=busy)
    close = 1e-6 if tolerance > 2e-6 else 1e-5  # where matrices are split, gradients are rounded more, the loss is not
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=close)
    ours, theirs = gradients(sharded), gradients(plain)
    most = tolerance * max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=most, msg=lambda m, n=name: f"{n}: {m}")
    assert ours.keys() - theirs.keys() <= {"lm_head.weight"}  # zeros, where the loss leaves it out
    norm = total_norm(p.grad for _, p in sharded.named_parameters() if p.grad is not None)
    torch.testing.assert_close(norm.float(), nn.utils.get_total_norm(list(theirs.values())), rtol=1e-6, atol=0)
    resharded(sharded)
    whole = nn.utils.get_total_norm(p for _, p in plain.named_parameters())
    torch.testing.assert_close(total_norm(p for _, p in sharded.named_parameters()).float(), whole)


def resharded(model: PackedModel) -> None:
    meshes = [getattr(p, "device_mesh", None) for _, p in model.named_parameters()]
    assert all(mesh is not None and "shard" in mesh.mesh_dim_names for mesh in meshes), "a weight stayed whole"


def forward_only(plain: PackedModel, sharded: PackedModel, tolerance: float = 1e-5) -> None:
    """A forward without gradient leaves no whole weight behind an optimizer step, and may have nothing to do."""
    sequences = rows(*MIXED)
    parameter, twin = (next(p for _, p in model.named_parameters() if p.requires_grad) for model in (sharded, plain))
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for _ in range(2):
        with torch.no_grad():
            ours, theirs = sharded(sharded.pack(sequences)), plain(plain.pack(sequences))
            close(ours.log_prob, theirs.log_prob)
            resharded(sharded)
            parameter.mul_(1.5)
            twin.mul_(1.5)
            close(*(top_tokens(model, model.pack(sequences), 3, 200) for model in (sharded, plain)))
    empty = rows((3, (0,)))
    share, _ = place(sharded)
    sequences = sequences[:4] if share else empty
    outputs = sharded(sharded.pack(sequences), NEEDS)
    assert (outputs.log_prob.numel() == 0) == (share == 0)
    (outputs.log_prob.sum() + outputs.entropy.sum()).backward()  # joins the others' reductions
    with torch.no_grad():
        parameter.div_(1.5 * 1.5)
        twin.div_(1.5 * 1.5)


def model_of(source: ModelSource, trains: str, path: str | None = None) -> PackedModel:
    """A policy, one with a value head (`head`), one that replays routes and has a head (`routes`), or a `scalar` model.

    Args:
        path: of its weights in a checkpoint, if not the source's own.
    """
    if trains == "scalar":
        return source.scalar(source.load_scalar(path, head_std=0.3))
    loaded = source.load(path)
    head = None if trains == "policy" else make_value_head(loaded.model, 0.3, 5)
    if head is not None and path is not None:
        head.load_state_dict(load_file(Path(path).parent / VALUE_HEAD))
    return source.policy(loaded, head, replays_routes=trains == "routes")


def both_of(folder: Path, layout: dict[str, Any], trains: str = "policy", **settings) -> tuple[PackedModel, Any]:
    """The model of one process, and that of many. Flash attention, by its stand-in, is compared with `packed`, and
    compiled layers, in torch's own operations, with others."""
    compilation.BACKEND = "eager"
    if settings.get("attention") in FLASH:
        stand_in(pytest.MonkeyPatch())  # until this process ends
    own = settings | {"attention": "auto", "compile": False}
    plain = model_of(source(folder, **own), trains)
    many = model_of(source(folder, sharding=Sharding(**layout), **settings), trains)
    assert is_sharded(many.model) and many.loaded.parameters == plain.loaded.parameters
    return plain, many


def without_adapter(plain: PackedModel, sharded: PackedModel) -> None:
    with torch.no_grad(), adapter_off(plain.model), adapter_off(sharded.model):
        expected, other = (policy(policy.pack(rows(*MIXED))).log_prob for policy in (plain, sharded))
    torch.testing.assert_close(expected, other, rtol=1e-5, atol=1e-5)


def holds_gradients(plain: PackedModel, sharded: PackedModel) -> None:
    """Between micro-batches a rank holds all of them, or its part."""
    sharding = sharded.loaded.sharding
    for _, p in sharded.named_parameters():
        p.grad = None
    sharded.sync_gradients(False)
    loss(sharded, sharded.pack(rows(*MIXED)), NEEDS).backward()
    assert (next(whole_gradients(sharded.model), None) is None) == sharding.splits_gradients
    sharded.sync_gradients(True)
    sharded.idle_pass(NEEDS, backward=True)
    resharded(sharded)


def rounded(rank: int, folder: Path, name: str, layout: dict[str, Any], lora: Lora | None = None) -> None:
    """Weights gathered in bfloat16 compute what a bfloat16 model computes, but for rounding; matrices that are split,
    what autocast computes. Gradients are summed in float32."""
    settings = {"path": str(folder / name), "compute_dtype": "bfloat16", "device": "cpu", "lora": lora}
    dtype, least = ("float32", 0.97) if "tensor_parallel" in layout else ("bfloat16", 0.99)
    sources = ModelSource(**settings, dtype=dtype), ModelSource(**settings, sharding=Sharding(**layout))
    plain, sharded = (source.policy(source.load()) for source in sources)
    expected = loss(plain, plain.pack(rows(*MIXED, temperature=(0.7, 1.3))), NEEDS)
    expected.backward()
    torch.testing.assert_close(backward(sharded, NEEDS), expected.detach(), rtol=0.02, atol=0.02)
    theirs = gradients(plain)
    for name, gradient in gradients(sharded).items():
        assert gradient.dtype == torch.float32
        likeness = torch.cosine_similarity(gradient.flatten(), theirs[name].float().flatten(), dim=0)
        assert likeness > least or (lora and not gradient.any()), (name, likeness)  # A's, while B is 0
    if "context_parallel" in layout and "param_dtype" not in layout:
        source = ModelSource(**settings)
        same = source.policy(source.load())
        with torch.no_grad():
            ours, exact = (model(model.pack(rows(*MIXED))).log_prob for model in (sharded, same))
        torch.testing.assert_close(ours, exact, rtol=0, atol=0.02)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it lies on its ranks, and what is done there and in one process.

    Args:
        trains: a policy, one with a value head, or a scalar model.
        passes: settings of `compare`; `busy` -1: one share has no sequence.
        first, then: further functions of the two models, before and after the passes.
    """

    model: str
    layout: dict[str, Any] = field(default_factory=dict)
    ranks: int = 4
    trains: str = "policy"
    settings: dict[str, Any] = field(default_factory=dict)
    passes: tuple[dict[str, Any], ...] = ({},)
    first: tuple[Callable[[Any, Any], None], ...] = ()
    then: tuple[Callable[[Any, Any], None], ...] = ()

    def __str__(self) -> str:
        layout = " ".join(f"{name}={value}" for name, value in self.layout.items())
        return f"{self.model} {self.trains} of {self.ranks} {layout}".strip()


def passes_of(rank: int, folder: Path, case: Case) -> None:
    needs = {"policy": NEEDS, "head": NEEDS | {"value"}, "scalar": frozenset({"value"})}[case.trains]
    if "tensor_parallel" in case.layout and case.trains != "scalar":
        needs |= {"log_sum_square"}  # its collectives, also in the pass of a rank without a share
    both = both_of(folder / case.model, case.layout, case.trains, **case.settings)
    for function in case.first:
        function(*both)
    _, shares = place(both[1])
    for how in case.passes:
        compare(*both, needs, **how | ({"busy": max(1, shares - 1)} if how.get("busy") == -1 else {}))
    for function in case.then:
        function(*both)
