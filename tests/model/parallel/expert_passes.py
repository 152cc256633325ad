"""What every rank does in `test_experts`: experts on several ranks against one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from proxima.model.lora import Lora
from proxima.model.parallel.gather import whole_tensor
from proxima.model.parallel.norm import clip_gradients, total_norm
from proxima.model.parallel.sharding import Sharding
from proxima.train import AdamW
from tests.model.parallel.loads import never_whole, same_copy, same_weights
from tests.model.parallel.passes import NEEDS, compare, forward_only, loss, policies, rounded, scalars, source
from tests.model.rows import MIXED, rows

KIND = "qwen3_moe"


def layouts(size: int) -> dict[str, Sharding]:
    """One rank has an expert alone, or several share it."""
    shardings = {"all": Sharding(expert_parallel=size), "offload": Sharding(expert_parallel=size, offload=True)}
    if size > 2:
        shardings |= {
            "half": Sharding(expert_parallel=2),
            "hybrid": Sharding(kind="hybrid", ranks_per_node=2, expert_parallel=2),
            "once": Sharding(expert_parallel=2, sum_gradients="update"),
        }
    return shardings


def all_passes(rank: int, folder: Path) -> None:
    size = dist.get_world_size()
    for name, sharding in layouts(size).items():
        both = policies(folder / KIND, sharding)
        assert both[1].model.get_parameter("model.layers.0.mlp.experts.down_proj").shape[0] == 8
        compare(*both)
        compare(*both, parts=3, busy=max(1, size - 1))
        if name == "all":
            forward_only(*both)
            compare(*both)
    checkpointed = policies(folder / KIND, Sharding(expert_parallel=size), gradient_checkpointing=True)
    compare(*checkpointed, parts=2, busy=1)
    for keep in (lambda index: index % 2, lambda index: index % 2 + 6):  # the rest of the experts gets no token
        both = policies(folder / KIND, Sharding(expert_parallel=size))
        for policy in both:
            for module in policy.model.modules():
                if type(module).__name__.endswith("TopKRouter"):
                    module.register_forward_hook(lambda module, given, out, keep=keep: (*out[:2], keep(out[2])))
        compare(*both)
        compare(*both, busy=1)
    same_loop(folder)
    several_updates(folder)
    rounded(folder / KIND, expert_parallel=2)
    lora = Lora(rank=4, alpha=8, targets=("q_proj", "o_proj"))
    both = policies(folder / KIND, Sharding(expert_parallel=2), lora=lora, gradient_checkpointing=True)
    compare(*both, parts=2)
    both = scalars(folder / KIND, Sharding(expert_parallel=2))
    compare(*both, frozenset({"value"}), busy=1)
    compare(*policies(folder / "six", Sharding(expert_parallel=2)), parts=2)
    both = policies(folder / "mixtral", Sharding(expert_parallel=2), head=True)
    compare(*both, NEEDS | {"value"}, busy=max(1, size - 1))


def same_loop(folder: Path) -> None:
    """A loop over experts computes what grouped products do."""
    both = policies(folder / KIND, Sharding(expert_parallel=dist.get_world_size()))
    both[1].model.set_experts_implementation("eager")
    compare(*both)
    compare(*both, busy=1)


def several_updates(folder: Path) -> None:
    """AdamW with clipping, over weights on two meshes."""
    size = dist.get_world_size()
    both = policies(folder / KIND, Sharding(expert_parallel=2))
    optimizers = [
        AdamW(lr=1e-2, eps=1e-3, weight_decay=0.1).build(p for _, p in policy.named_parameters()) for policy in both
    ]
    for _ in range(4):
        norms = []
        for policy, optimizer in zip(both, optimizers, strict=True):
            sequences = rows(*MIXED)
            own = sequences[dist.get_rank() :: size] if policy is both[1] else sequences
            loss(policy, policy.pack(own), NEEDS).backward()
            gradients = [p for _, p in policy.named_parameters()]
            norms.append(total_norm(p.grad for p in gradients))
            clip_gradients(gradients, 1.0, norms[-1])
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    for (name, plain), (_, split) in zip(*(policy.named_parameters() for policy in both), strict=True):
        torch.testing.assert_close(whole_tensor(split), plain.detach(), rtol=1e-4, atol=1e-5, msg=name)


def all_loads(rank: int, folder: Path) -> None:
    """A rank reads its own experts alone, of files with a tensor for each; what is gathered is what the files hold."""
    plain = {kind: source(folder / kind).load() for kind in (KIND, "mixtral", "shared", "six")}
    half = source(folder / KIND, dtype="bfloat16").load()
    with pytest.MonkeyPatch.context() as monkeypatch:
        never_whole(monkeypatch)
        for sharding in (Sharding(), *layouts(dist.get_world_size()).values()):
            for kind, reference in plain.items():
                if kind == "six" and sharding.expert_parallel == 4:
                    continue
                many = source(folder / kind, sharding=sharding).load()
                same_weights(many, reference)
                same_copy(many, reference)
            same_weights(source(folder / KIND, sharding=sharding, dtype="bfloat16").load(), half)
