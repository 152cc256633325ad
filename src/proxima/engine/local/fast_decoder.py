"""Llama, Qwen2 and Qwen3 without a module tree: fused projections, rotary in place, a static cache.

The arithmetic is the trainer's under autocast: products in the engine's dtype; residual stream, norms and rotary
embedding in float32. The engine's log-probs differ from the trainer's by rounding alone.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxima.engine.local.decoder import Attend, CachingDecoder, Matrix, joined_rows
from proxima.engine.local.kv_cache import KVCache
from proxima.kernels.decode_step import StepKernels, step_kernels
from proxima.model.architecture import weight_of

FAMILIES = ("llama", "qwen2", "qwen3")
ALIGNED = 32  # the compiled step requires sizes that are multiples of it
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies do not change with the length
FAR = 1e-2  # relative to the norm of a step's result: a graph whose result is further from it is wrong
Step = Callable[[Tensor, Tensor, int], Tensor]
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def supports(model: nn.Module) -> str | None:
    """None if the fast path can run this model, else the reason."""
    config: Any = model.config
    settings = config.to_dict()
    rope = settings.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    activation = settings.get("hidden_act")
    checks = {
        f"family {config.model_type}": config.model_type in FAMILIES,
        f"activation {activation}": activation == "silu",
        f"rope type {kind}": kind in STATIC_ROPE,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) == 1.0,
        "sliding window": not (settings.get("use_sliding_window") and settings.get("sliding_window")),
    }
    return next((f"{feature} has no fast path" for feature, supported in checks.items() if not supported), None)


@dataclass
class Layer:
    """Weights of one block. `qkv` rows are permuted within each query and key head so that rotary pairs are
    neighbours; `norms` are those of queries and keys."""

    input_norm: Tensor
    qkv: Matrix
    norms: tuple[Tensor | None, Tensor | None]
    out: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix


class FastDecoder(CachingDecoder):
    """The decoder of the fast path; `supports(model)` must be None.

    Args:
        model: shapes and first weights.
        dtype: of the products and the cache.
        graphs: most rows of a step that runs as a CUDA graph, if the model is on a CUDA device; 0: no graphs.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, graphs: int = 0) -> None:
        config: Any = model.config
        super().__init__(config, dtype, next(model.parameters()).device)
        self.eps = float(config.rms_norm_eps)
        half = torch.arange(self.head_dim // 2, device=self.device)
        self.pairs = torch.stack([half, half + self.head_dim // 2], dim=1).flatten()
        self.rotary = torch.zeros(0, self.head_dim // 2, dtype=torch.complex64, device=self.device)
        self.rotary_source: Any = model.get_submodule("model.rotary_emb")
        rows = torch.arange(self.heads * self.head_dim, device=self.device)
        self.order = rows.view(self.heads, -1)[:, self.pairs].flatten()  # of queries and keys
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Tensor] = {}
        self.graphs: GraphedSteps | None = None  # None: kernels are launched one by one
        if graphs and self.device.type == "cuda":
            self.graphs = GraphedSteps(graphs, self.device)
        embedding: Any = model.get_submodule("model.embed_tokens")
        self.embedding = torch.empty_like(embedding.weight, dtype=torch.float32)
        self.kernels: StepKernels | None = None  # None: eager
        self.buffers: list[Tensor] = []
        self.width = int(config.intermediate_size)
        sizes = self.head_dim, self.width, config.hidden_size
        if dtype == torch.bfloat16 and self.device.type == "cpu" and not any(size % ALIGNED for size in sizes):
            self.kernels = step_kernels(self.head_dim, self.heads // self.kv_heads)
        self.load(model)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        root: Any = model.get_submodule("model")
        self.layers = [self._layer(i, block) for i, block in enumerate(root.layers)]
        self.embedding.copy_(root.embed_tokens.weight)
        self.norm = self._vector("norm", root.norm.weight)
        self.head = self._matrix("head", model.get_submodule("lm_head"))

    def _layer(self, i: int, block: Any) -> Layer:
        attention = block.self_attn
        mlp = block.mlp

        def norm(name: str) -> Tensor | None:
            if not hasattr(attention, name):
                return None
            return self._vector(f"{i} {name}", attention.get_submodule(name).weight[self.pairs])

        return Layer(
            input_norm=self._vector(f"{i} input", block.input_layernorm.weight),
            qkv=self._matrix(f"{i} qkv", attention.q_proj, attention.k_proj, attention.v_proj, rotary=2),
            norms=(norm("q_norm"), norm("k_norm")),
            out=self._matrix(f"{i} out", attention.o_proj),
            post_norm=self._vector(f"{i} post", block.post_attention_layernorm.weight),
            gate_up=self._matrix(f"{i} gate_up", mlp.gate_proj, mlp.up_proj),
            down=self._matrix(f"{i} down", mlp.down_proj),
        )

    def _vector(self, name: str, weight: Tensor) -> Tensor:
        """Copy a vector to float32, reusing the memory of the previous vector of this name."""
        if name not in self.vectors:
            self.vectors[name] = torch.empty_like(weight, dtype=torch.float32)
        return self.vectors[name].copy_(weight)

    def _matrix(self, name: str, *modules: Any, rotary: int = 0) -> Matrix:
        """Fuse linear layers that read the same states, the first `rotary` with their rows permuted, reusing the memory
        of the previous matrix of this name."""
        weights = [weight_of(module) for module in modules]
        orders = list[Tensor | None]()
        for i, weight in enumerate(weights):
            orders.append(self.order[: len(weight)] if i < rotary else None)
        biases = [(each.bias, order) for each, order in zip(modules, orders, strict=True) if each.bias is not None]
        parts = list(zip(weights, orders, strict=True))
        bias = joined_rows(biases, self.dtype) if biases else None
        self.matrices[name] = Matrix(parts, bias, self.dtype, self.matrices.get(name))
        return self.matrices[name]

    def _run(self, tokens: Tensor, position: Tensor, longest: int, attend: Attend) -> Tensor:
        count = len(tokens)
        dim = self.head_dim
        queries = self.heads * self.head_dim
        turning = self.heads + self.kv_heads
        rotary = self._rotary(longest)[position][:, None]  # [n, 1, D/2] complex
        x = self.embedding[tokens]
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normed(x, delta, layer.input_norm)).float().view(count, -1, dim)
            q_norm, k_norm = layer.norms
            if q_norm is not None:
                qkv[:, : self.heads] = F.rms_norm(qkv[:, : self.heads], (dim,), q_norm, self.eps)
                qkv[:, self.heads : turning] = F.rms_norm(qkv[:, self.heads : turning], (dim,), k_norm, self.eps)
            torch.view_as_complex(qkv[:, :turning].view(count, turning, -1, 2)).mul_(rotary)
            qkv = qkv.to(self.dtype)
            kv = qkv[:, self.heads :].view(count, 2, self.kv_heads, dim)
            attended = attend(i, qkv[:, : self.heads], kv, dim**-0.5, None)
            delta = layer.out(attended.reshape(count, queries))
            delta = layer.down(self._gated(layer.gate_up(self._normed(x, delta, layer.post_norm))))
        return self._normed(x, delta, self.norm)

    def _normed(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add delta to x [n, D] float32 in place; return its norm in the engine's dtype."""
        if self.kernels is not None:
            return self.kernels.norm(x, delta, weight, self.eps, torch.empty_like(x, dtype=self.dtype))
        if delta is not None:
            x += delta
        return F.rms_norm(x, x.shape[-1:], weight, self.eps).to(self.dtype)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [n, F] of [n, 2 F]."""
        if self.kernels is not None:
            return self.kernels.swiglu(gate_up, gate_up.new_empty(len(gate_up), self.width))
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    @torch.no_grad()
    def step(self, tokens: Tensor, position: Tensor, cache: KVCache, longest: int) -> Tensor:
        if self.kernels is None:
            if self.graphs is None or not self.graphs.works:
                return super().step(tokens, position, cache, longest)
            reach = self.graphs.reach_of(longest, cache.capacity)
            places = (self._rotary(reach), *cache.layers)
            return self.graphs.run(partial(self._step, cache), tokens, position, reach, places)
        turns = self._rotary(longest)
        x = self.embedding[tokens]
        delta: Tensor | None = None
        hidden, qkv, attended, gate_up, gated, added = self._buffers(len(x))
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            qkv = layer.qkv(self.kernels.norm(x, delta, layer.input_norm, self.eps, hidden), qkv)
            self.kernels.attend(qkv, layer.norms, self.eps, turns, position, kv, cache.leaders, attended)
            delta = layer.out(attended, added)
            gate_up = layer.gate_up(self.kernels.norm(x, delta, layer.post_norm, self.eps, hidden), gate_up)
            delta = layer.down(self.kernels.swiglu(gate_up, gated), added)
        return self.kernels.norm(x, delta, self.norm, self.eps, hidden)

    def _buffers(self, rows: int) -> Sequence[Tensor]:
        """The buffers of a step, reused by later steps: allocating fresh memory costs more than the computation in
        it."""
        if not self.buffers or len(self.buffers[0]) < rows:
            queries = self.heads * self.head_dim
            width = self.embedding.shape[1]
            keys_and_values = 2 * self.kv_heads * self.head_dim
            widths = (width, queries + keys_and_values, queries, 2 * self.width, self.width, width)
            self.buffers = [torch.empty(rows, columns, dtype=self.dtype) for columns in widths]
        return [buffer[:rows] for buffer in self.buffers]

    def _rotary(self, length: int) -> Tensor:
        """[≥ length, D/2] complex64: cos + i sin of every position, grown on demand."""
        if length > len(self.rotary):
            positions = torch.arange(max(length, 2 * len(self.rotary), 256), device=self.device)
            dtype_and_device = torch.zeros(1, dtype=torch.float32, device=self.device)
            cos, sin = self.rotary_source(dtype_and_device, positions[None])
            half = self.head_dim // 2
            self.rotary = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
        return self.rotary


class GraphedSteps:
    """Runs decode steps as CUDA graphs: a step's hundreds of kernels are launched together, not one by one from Python.

    A graph repeats the launches of one step: the same kernels on the same addresses. So everything a step reads,
    including its tokens and positions, is at fixed addresses, and its numbers of rows and of cached positions are
    rounded up to a few sizes. Each pair of sizes is recorded at its first use, after a run without a graph, and
    compared with that run.

    If recording fails or a graph's result differs, one line is printed and no more graphs are used.

    Args:
        slots: most rows.
        device: of tokens and positions.
        record: records a function that launches work and returns the tensor that will contain its result; returns a
            function that launches the same work again, and that tensor.
    """

    def __init__(self, slots: int, device: torch.device, record: Record | None = None) -> None:
        self.slots = slots
        self.works = True
        self._tokens, self._position = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self._record = record or _CudaGraphs(device)
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], Tensor]] = {}
        self._places: Sequence[weakref.ref[Tensor]] = ()  # weak: a cache that grows frees its old tensors

    @staticmethod
    def reach_of(longest: int, capacity: int) -> int:
        """Round `longest` up to one of a few sizes, not much larger than needed."""
        return min(rounded_up(longest, 64), capacity)

    def run(self, step: Step, tokens: Tensor, position: Tensor, reach: int, places: Sequence[Tensor]) -> Tensor:
        """Run step(tokens [n], position [n], reach) → [n, D]; the next step overwrites the result.

        Args:
            step: must not synchronise with the device, nor copy anything from the host.
            reach: cached positions that it reads, from `reach_of`.
            places: tensors that it reads and that may be replaced; if one is, all graphs are recorded again.
        """
        if len(places) != len(self._places) or any(a() is not b for a, b in zip(self._places, places, strict=True)):
            self._graphs.clear()
            self._places = [weakref.ref(tensor) for tensor in places]
        count = len(tokens)
        rows = min(rounded_up(count, 8), self.slots)  # rows from `count` on repeat earlier inputs: their slots are free
        self._tokens[:count] = tokens
        self._position[:count] = position
        if (rows, reach) not in self._graphs:
            return self._first(step, rows, reach)[:count]
        replay, out = self._graphs[rows, reach]
        replay()
        return out[:count]

    def _first(self, step: Step, rows: int, reach: int) -> Tensor:
        inputs = self._tokens[:rows], self._position[:rows], reach
        expected = step(*inputs)
        try:
            replay, out = self._record(lambda: step(*inputs))
            out.fill_(torch.nan)  # an empty graph would leave the values from the recording
            replay()
        except RuntimeError as error:
            reason = str(error).strip() or type(error).__name__
            self._give_up(reason.splitlines()[0])
            return expected
        apart = (out - expected).nan_to_num().float().norm()
        size = expected.nan_to_num().float().norm()
        if apart > FAR * size or not torch.equal(out.isnan(), expected.isnan()):
            self._give_up(f"a graph of {rows} rows gave a result that is {float(apart / size):.2g} of its norm apart")
            return expected
        self._graphs[rows, reach] = replay, out
        return out

    def _give_up(self, reason: str) -> None:
        self.works = False
        self._graphs.clear()
        line = "engine: decoding continues without CUDA graphs (engine.cuda_graphs=false: from the start)"
        print(f"{line}: {reason}", file=sys.stderr, flush=True)


class _CudaGraphs:
    """Records graphs on a device; they share memory, because only one graph's result is read at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: Callable[[], Any] = lambda: None  # a weak reference: a pool is freed with the last graph in it

    def __call__(self, launch: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        last = self._last()
        pool = None if last is None else last.pool()
        with torch.cuda.device(self.device):  # recording takes its stream from the current one
            stream = torch.cuda.current_stream()
            try:
                # other threads may train meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    out = launch()
            except RuntimeError:
                torch.cuda.set_stream(stream)  # torch does not restore it if the end of a recording fails
                raise
        self._last = weakref.ref(graph)
        return graph.replay, out


def rounded_up(count: int, step: int) -> int:
    """Round up to a multiple of `step` up to 8 * `step`, then to one of twice that up to 16 * `step`, and so on: beyond
    8 * `step`, at most a quarter more than `count`."""
    while count > 8 * step:
        step *= 2
    return -(-count // step) * step
