"""What every rank does in `test_shard`: forward and backward passes against the same model in one process."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from proxima.lab.rehearsal.fake_ranks import whole_gradients
from proxima.model import PackedModel, ScalarModel
from proxima.model.lora import Lora, adapter_off
from proxima.model.model_source import ModelSource
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.norm import clip_gradients, total_norm
from proxima.model.parallel.sharded import is_sharded
from proxima.model.parallel.sharding import Sharding
from proxima.model.scalar_model import make_value_head
from tests.model.rows import MIXED, rows

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
    together = model.loaded.sharding.together
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
    if dist.get_rank() % model.loaded.sharding.together:
        total.zero_()
    dist.all_reduce(total)
    return total


def compare(plain: PackedModel, sharded: PackedModel, needs=NEEDS, *, parts: int = 1, busy: int | None = None) -> None:
    """Loss, gradients, norm and one clipped step; shares from `busy` on have no sequence."""
    sequences = rows(*MIXED, temperature=(0.7, 1.3))
    for p in (*dict(plain.named_parameters()).values(), *dict(sharded.named_parameters()).values()):
        p.grad = None
    expected = loss(plain, plain.pack(sequences), needs)
    expected.backward()
    total = backward(sharded, needs, parts=parts, busy=busy)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-5)
    own_gradients, theirs = gradients(sharded), gradients(plain)
    size_of = max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(own_gradients[name], gradient, rtol=1e-5, atol=2e-6 * size_of, msg=name)
    assert own_gradients.keys() - theirs.keys() <= {"lm_head.weight"}  # zeros, where the loss leaves it out
    everything = [p.grad for _, p in sharded.named_parameters() if p.grad is not None]
    norm = total_norm(everything)
    plain_norm = nn.utils.get_total_norm(list(theirs.values()))
    torch.testing.assert_close(norm.float(), plain_norm, rtol=1e-6, atol=0)
    weights = total_norm(p for _, p in sharded.named_parameters())
    torch.testing.assert_close(
        weights.float(), nn.utils.get_total_norm(p.detach() for _, p in plain.named_parameters())
    )
    trained = [p for _, p in sharded.named_parameters() if p.requires_grad]
    clip_gradients(trained, float(norm) / 2, norm)
    torch.testing.assert_close(total_norm(everything), norm / 2, rtol=1e-5, atol=0)
    resharded(sharded)


def resharded(model: PackedModel) -> None:
    meshes = [getattr(p, "device_mesh", None) for _, p in model.named_parameters()]
    assert all(mesh is not None and "shard" in mesh.mesh_dim_names for mesh in meshes), "a weight stayed whole"


def forward_only(plain: PackedModel, sharded: PackedModel) -> None:
    """A forward without gradient leaves no whole weight behind an optimizer step, and may have nothing to do."""
    sequences = rows(*MIXED)
    parameter = next(p for _, p in sharded.named_parameters() if p.requires_grad)
    twin = next(p for _, p in plain.named_parameters() if p.requires_grad)
    for _ in range(2):
        with torch.no_grad():
            ours, theirs = sharded(sharded.pack(sequences)), plain(plain.pack(sequences))
            torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=1e-5, atol=1e-5)
            resharded(sharded)
            parameter.mul_(1.5)
            twin.mul_(1.5)
            top = sharded.top_tokens(sharded.pack(sequences), 3, 200)
            torch.testing.assert_close(top, plain.top_tokens(plain.pack(sequences), 3, 200), rtol=1e-5, atol=1e-5)
    empty = rows((3, (0,)))
    share, _ = place(sharded)
    sequences = sequences[:4] if share else empty
    outputs = sharded(sharded.pack(sequences), NEEDS)
    assert (outputs.log_prob.numel() == 0) == (share == 0)
    (outputs.log_prob.sum() + outputs.entropy.sum()).backward()  # joins the others' reductions
    with torch.no_grad():
        parameter.div_(1.5 * 1.5)
        twin.div_(1.5 * 1.5)


def policies(folder: Path, sharding: Sharding, *, head: bool = False, **settings):
    plain, many = source(folder, **settings), source(folder, sharding=sharding, **settings)
    loaded, other = plain.load(), many.load()
    heads = [make_value_head(loaded.model, 0.3, 5) if head else None for _ in range(2)]
    assert is_sharded(other.model) and other.parameters == loaded.parameters
    return plain.policy(loaded, heads[0]), many.policy(other, heads[1])


def scalars(folder: Path, sharding: Sharding) -> tuple[ScalarModel, ScalarModel]:
    plain, many = source(folder), source(folder, sharding=sharding)
    return plain.scalar(plain.load_scalar(head_std=0.3)), many.scalar(many.load_scalar(head_std=0.3))


def all_passes(rank: int, folder: Path) -> None:
    size = dist.get_world_size()
    full = Sharding()
    for kind in ("llama", "qwen2", "gpt2", "experts"):  # tied, untied, learned positions, loaded whole
        both = policies(folder / kind, full)
        compare(*both)
        compare(*both, busy=max(1, size - 1))
        compare(*both, parts=3)
        forward_only(*both)
        compare(*both)
    value = NEEDS | {"value"}
    for kind in ("llama", "qwen2"):
        both = policies(folder / kind, Sharding(reshard_after_forward=False), head=True, gradient_checkpointing=True)
        compare(*both, value, parts=2, busy=max(1, size - 1))
        compare(*both, value)
        compare(*scalars(folder / kind, full), frozenset({"value"}), busy=max(1, size - 1))
    layouts = [Sharding(offload=True), Sharding(kind="replicate")]
    layouts += [Sharding(kind="hybrid", ranks_per_node=size // 2)] if size > 1 else []
    for sharding in layouts:
        both = policies(folder / "qwen2", sharding, head=True)
        compare(*both, value, parts=2, busy=max(1, size - 1))
        forward_only(*both)
    when_summed(folder / "qwen2")
    for sharding, dora in ((full, True), (full, False), (Sharding(kind="replicate"), False)):
        both = policies(folder / "qwen2", sharding, lora=replace(LORA, dora=dora), gradient_checkpointing=True)
        compare(*both, parts=2)
        with torch.no_grad(), adapter_off(both[0].model), adapter_off(both[1].model):
            expected, other = (policy(policy.pack(rows(*MIXED))).log_prob for policy in both)
        torch.testing.assert_close(expected, other, rtol=1e-5, atol=1e-5)
    rounded(folder / "qwen2")


def when_summed(folder: Path) -> None:
    """Gradients are the same whenever they are added up; between micro-batches a rank holds all of them or its part."""
    size = dist.get_world_size()
    layouts = [("full", None), ("hybrid", max(1, size // 2)), ("replicate", None)]
    for kind, inner in layouts:
        for when in ("micro_batch", "update"):
            sharding = Sharding(kind=kind, ranks_per_node=inner, sum_gradients=when)
            plain, sharded = policies(folder, sharding)
            compare(plain, sharded, parts=3)
            for _, p in sharded.named_parameters():
                p.grad = None
            sharded.sync_gradients(False)
            loss(sharded, sharded.pack(rows(*MIXED)), NEEDS).backward()
            assert (next(whole_gradients(sharded.model), None) is None) == sharding.splits_gradients, (kind, when)
            sharded.sync_gradients(True)
            sharded.idle_pass(NEEDS, backward=True)
            resharded(sharded)


def rounded(folder: Path, **layout: int) -> None:
    """Weights gathered in bfloat16 compute what a bfloat16 model computes; their gradients are summed in float32."""
    settings = {"compute_dtype": "bfloat16", "device": "cpu"}
    half = ModelSource(path=str(folder), dtype="bfloat16", **settings)
    many = ModelSource(path=str(folder), sharding=Sharding(param_dtype="bfloat16", **layout), **settings)
    plain, sharded = half.policy(half.load()), many.policy(many.load())
    sequences = rows(*MIXED)
    expected = loss(plain, plain.pack(sequences), NEEDS)
    expected.backward()
    own = sequences[dist.get_rank() :: dist.get_world_size()]
    value = loss(sharded, sharded.pack(own), NEEDS)
    value.backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=0.02, atol=0.02)
    theirs = gradients(plain)
    for name, gradient in gradients(sharded).items():
        assert gradient.dtype == torch.float32
        likeness = torch.cosine_similarity(gradient.flatten(), theirs[name].float().flatten(), dim=0)
        assert likeness > 0.99, (name, likeness)
