"""The kernels of compiled layers and of the compiled rows of logits, as the scheduler of torch's compiler arranges
them.

It runs as for a CPU, for which it fuses no more than for a GPU, and what it has arranged is counted in place of being
written and compiled; the operations then run one by one. Sizes are scaled down, with the ratios of the model: what
is read and written beside products is in proportion to tokens times hidden size, or to logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.kernels.counted import attention_stand_in
from proxima.data.trajectory import Trajectory
from proxima.model import compilation
from proxima.model.log_prob import token_log_prob
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel

PRODUCT, NOTHING = "ExternKernelSchedulerNode", "NopKernelSchedulerNode"


@dataclass
class Fused:
    """The bytes that each fused kernel of a part of a pass reads and writes, forward and backward."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


def scheduled_layer(config: Any) -> tuple[Fused, int]:
    """The fused kernels of the only layer of a small model, and its tokens times hidden size."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    loaded = LoadedModel(model=model, tokenizer=None, path="scaled down")  # type: ignore[arg-type]
    with scheduled() as fused, attention_stand_in(None):
        policy = Policy(loaded, attention="varlen", compute_dtype=torch.bfloat16, compile=True)
        policy.compiles = False  # of the head
        draw = np.random.default_rng(0)
        items = [
            Trajectory(
                uid=n, sample=0, group=n, prompt_tokens=draw.integers(64, size=30), tokens=draw.integers(64, size=30)
            )
            for n in range(2)
        ]
        batch = policy.pack(items)
        policy(batch).log_prob.sum().backward()
    return fused, len(batch.tokens) * config.hidden_size


def scheduled_head() -> tuple[Fused, int]:
    """The fused kernels between the products of the output head, and its logits."""
    hidden, weight = (torch.randn(size, 32).bfloat16().requires_grad_() for size in (64, 4096))
    target = torch.arange(64)
    with scheduled() as fused:
        token_log_prob(hidden, weight, target, chunk=64, fused=True).log_prob.sum().backward()
    if not fused.backward:  # the gradient is a function of its own
        fused.forward, fused.backward = fused.forward[:1], fused.forward[1:]
    return fused, 64 * 4096


class _Counted(Exception):
    """Ends the compilation of a graph that has been counted."""


def _uncompiled_graph(graph: Any, inputs: Sequence[Any], **settings: Any) -> Any:
    """In place of inductor's compilation of a graph: what was counted runs as it is."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx_inner

    try:
        compile_fx_inner(graph, inputs, **settings)
    except Exception as error:
        if "_Counted" not in f"{error!r} {error}":
            raise
    return make_boxed_func(graph)


def _backend(graph: Any, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, inner_compile=_uncompiled_graph)  # type: ignore[arg-type]


@contextmanager
def scheduled() -> Iterator[Fused]:
    """What is compiled within it."""
    import torch._functorch.config
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    fused = Fused()

    def codegen(self: Any) -> Any:
        kernels = fused.backward if V.graph.is_backward else fused.forward
        for node in self.nodes:
            if type(node).__name__ not in (PRODUCT, NOTHING):
                kernels.append(int(node.get_read_write_buffers_sizes()))
        raise _Counted

    torch.compiler.reset()
    with (
        patch.object(Scheduler, "codegen", codegen),
        patch.object(compilation, "BACKEND", _backend),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield fused
