"""Counts the kernels of a pass on the fake device of a rehearsal: operations of torch that compute, the bytes that they
read and write, and the FLOPs of products.

On a GPU each operation that is not a view is at least one kernel; flash attention is one forward and two backward, and
a stand-in of its shapes here.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.sizes import module_of
from proxima.data.trajectory import Trajectory
from proxima.model import attention
from proxima.model.log_prob import token_log_prob
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima_plan.rehearsal.device_watch import DeviceWatch
from proxima_plan.rehearsal.fake_device import NAME, fake_device

PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}
NO_KERNEL = {"aten.detach.default", "aten.empty_like.default", "aten.new_empty.default", "aten.alias.default"}
NO_KERNEL |= {"aten.empty.memory_format", "aten.empty_strided.default", "aten._unsafe_view.default"}


@dataclass
class Kernels:
    """The kernels of a part of a pass.

    Args:
        operations: by name, without products. bytes: that these read and write, each tensor once an operation.
        products, product_bytes, flops: of the products. attended: calls of attention.
    """

    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    products: int = 0
    product_bytes: int = 0
    flops: int = 0
    attended: int = 0

    @property
    def count(self) -> int:
        return sum(self.operations.values()) + self.products + self.attended

    def minus(self, other: "Kernels") -> "Kernels":
        return Kernels(
            self.operations - other.operations,
            self.bytes - other.bytes,
            self.products - other.products,
            self.product_bytes - other.product_bytes,
            self.flops - other.flops,
            self.attended - other.attended,
        )


class KernelCounter(DeviceWatch):
    """Counts what runs within it, on a fake device, into `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Kernels()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = str(func)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        computes = any(tensor.device.type == NAME for tensor in made)
        if func.is_view or name in NO_KERNEL or not computes:
            return out
        there = {id(x): x for x in [*given, *made] if x.device.type == NAME}
        size = sum(each.numel() * each.element_size() for each in there.values())
        if name in PRODUCTS:
            left, right = given[-2:]
            self.now.products += 1
            self.now.product_bytes += size
            self.now.flops += 2 * left.numel() * right.shape[-1]
        else:
            self.now.operations[name] += 1
            self.now.bytes += size
        return out

    def take(self) -> Kernels:
        """What was counted since the last call."""
        taken, self.now = self.now, Kernels()
        return taken


class _Attended(torch.autograd.Function):
    """The shapes of flash attention, counted by `counter` if there is one."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, counter: KernelCounter | None) -> Tensor:
        ctx.shapes, ctx.counter = (query, key, value), counter
        if counter is not None:
            counter.now.attended += 1
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.counter is not None:
            ctx.counter.now.attended += 2  # the sums of rows, and the gradients
        return (*(torch.empty_like(x) for x in ctx.shapes), None)


@contextmanager
def attention_stand_in(counter: KernelCounter | None) -> Iterator[None]:
    """Within it, `model.attention=varlen` runs on any device; its output has no meaning."""

    def varlen_attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, enable_gqa: bool = False, **__: Any) -> Tensor:
        out: Tensor = _Attended.apply(query, key, value, counter)  # type: ignore[no-untyped-call]
        return out

    module = SimpleNamespace(varlen_attn=varlen_attn)
    with (
        patch.dict(sys.modules, {"torch.nn.attention.varlen": module}),
        patch.object(attention, "_require_flash", lambda *_: None),
    ):
        yield


def counted_pass(config: Any, items: list[Trajectory], rows: int) -> tuple[Kernels, Kernels]:
    """The kernels of a forward and of a backward pass over a batch, with `rows` of logits at once; weights are in
    bfloat16, as FSDP gathers them."""
    device, counter = fake_device(), KernelCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), counter, attention_stand_in(counter):
        model = module_of(config, "meta", torch.bfloat16)
        model._apply(lambda tensor: torch.empty_like(tensor, device=device))
        model.tie_weights()
        loaded = LoadedModel(model=model, tokenizer=None, path="shape", device=device)  # type: ignore[arg-type]
        policy = Policy(loaded, attention="varlen", compute_dtype=torch.bfloat16, log_prob_chunk=rows)
        batch = policy.pack(items)
        counter.take()
        loss = policy(batch).log_prob.sum()
        forward = counter.take()
        loss.backward()
        return forward, counter.take()


def counted_head(hidden: int, vocabulary: int, tokens: int, rows: int) -> Kernels:
    """The kernels of the output head alone, both passes."""
    device, counter = fake_device(), KernelCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        states, weight = (
            torch.empty(size, hidden, dtype=torch.bfloat16, device=device).requires_grad_()
            for size in (tokens, vocabulary)
        )
        target = torch.empty(tokens, dtype=torch.long, device=device)
        counter.take()
        token_log_prob(states, weight, target, chunk=rows).log_prob.sum().backward()
        return counter.take()
