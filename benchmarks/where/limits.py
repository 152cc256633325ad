"""The least time that work takes on this machine: products at their shapes, timed alone, and bytes over bandwidth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.side import clock
from proxima.engine.local.decoder import Matrix, packs_bfloat16

#: layers of these names and the same input are one product, as the engine has them
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
SIZES = (1 << 22, 1 << 26, 1 << 29)  # bytes of the arrays of the bandwidth: in a core's cache, in a shared one, in none


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's products: [out, in] of each linear layer in order, of these with common inputs joined,
    and of the head; and the sizes that attention needs."""

    layers: tuple[tuple[int, int], ...]
    joined: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    parameters: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: nn.Module) -> "Shapes":
        whole: Any = model
        config, head = whole.config, whole.get_output_embeddings()
        layers, joined = [], []
        for block in whole.get_decoder().layers:
            for module in block.modules():
                own = {name: m.weight for name, m in module.named_children() if isinstance(m, nn.Linear)}
                layers += [tuple(weight.shape) for weight in own.values()]
                for names in FUSED:
                    if all(name in own for name in names):
                        parts = [own.pop(name).shape for name in names]
                        joined.append((sum(part[0] for part in parts), parts[0][1]))
                joined += [tuple(weight.shape) for weight in own.values()]
        heads = int(config.num_attention_heads)
        return cls(
            layers=tuple(layers),
            joined=tuple(joined),
            head=tuple(head.weight.shape),
            parameters=sum(p.numel() for p in model.parameters()),
            depth=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )


def best(work: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` calls, after one for warm-up."""
    least = float("inf")
    for _ in range(repeats + 1):
        start = clock()
        work()
        least = min(least, clock() - start)
    return least


def bandwidth(count: int, device: torch.device) -> dict[str, float]:
    """Return the bytes per second of a copy, an update in place (x += 3 y, a triad) and a sum of arrays of `count`
    bytes each."""
    x, y = (torch.ones(count // 4, device=device) for _ in range(2))
    if count >= SIZES[0]:
        times = max(1, (1 << 26) // count)
    else:
        times = 1
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2, lambda: x.copy_(y)),
        "update": (3, lambda: x.add_(y, alpha=3.0)),
        "read": (1, lambda: x.sum()),
    }
    return {
        name: arrays * count * times / best(lambda: [call() for _ in range(times)], 4)  # noqa: B023
        for name, (arrays, call) in works.items()
    }


class Machine:
    """The limits of this machine: FLOP/s of a large product, and bytes per second by the size of the moved arrays.

    Args:
        dtype: of the products.
        device: the device to measure.
        tiny: use small products and arrays, which say nothing about the machine.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, tiny: bool = False) -> None:
        self.dtype, self.device = dtype, device
        large = 4 if device.type == "cuda" else 1
        size = 64 if tiny else 2048 * large
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self.flops = 2 * size**3 / best(lambda: torch.mm(a, b), 8)
        if tiny:
            sizes = [1 << 12]
        else:
            sizes = [count * large for count in SIZES]
        self.rates = {count: bandwidth(count, device) for count in sizes}
        self.bandwidth = {count: max(rates.values()) for count, rates in self.rates.items()}

    def text(self) -> str:
        """Return the limits in one line."""
        rates = ", ".join(
            f"{rate / 1e9:,.0f} GB/s over {count / 2**20:,.3g} MiB" for count, rate in self.bandwidth.items()
        )
        return f"{str(self.dtype).removeprefix('torch.')} products {self.flops / 1e9:,.0f} GFLOP/s, memory {rates}"

    def json(self) -> dict[str, Any]:
        rates = {count: {name: round(rate / 1e9, 2) for name, rate in own.items()} for count, own in self.rates.items()}
        return {"gflops": round(self.flops / 1e9, 1), "gb_per_s": rates}

    def moved(self, total: float, at_once: float) -> float:
        """Return the seconds for `total` bytes, of which `at_once` are touched before any of them is touched again."""
        size = min((count for count in self.bandwidth if count >= at_once), default=max(self.bandwidth))
        return total / self.bandwidth[size]


class Products:
    """The products of a model's linear layers, timed with nothing else between them.

    Each product has its own weights, so that they are read from memory or a cache as in a run.

    Args:
        shapes: of the weights, in order.
        dtype: of the products.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
        self.weights = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        self.dtype, self.device = dtype, device

    def forward(self, rows: int, *, packed: bool = False, repeats: int = 4) -> float:
        """Return the seconds of one pass over `rows`; `packed`: the fastest of plain weights, oneDNN's own format, and
        the engine's."""
        inputs = self._inputs(rows, 1)
        plain = self._best(lambda: [F.linear(inputs[w.shape[1]], w) for w in self.weights], repeats)
        if not packed:
            return plain
        matrices = [Matrix(w, None, self.dtype) for w in self.weights]
        own = self._best(
            lambda: [matrix(inputs[w.shape[1]]) for matrix, w in zip(matrices, self.weights, strict=True)], repeats
        )
        if self.device.type != "cpu" or self.dtype != torch.bfloat16 or not packs_bfloat16():
            return min(plain, own)
        reordered = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in self.weights]
        pairs = [(w, inputs[plain.shape[1]]) for w, plain in zip(reordered, self.weights, strict=True)]
        run = torch.ops.mkldnn._linear_pointwise
        return min(plain, own, best(lambda: [run(x, w, None, "none", [], "") for w, x in pairs], repeats))

    def backward(self, rows: int, *, repeats: int = 3) -> float:
        """Return the seconds of the products of one backward pass: the gradients of the input and of the weight of
        each."""
        inputs, outputs = self._inputs(rows, 1), self._inputs(rows, 0)

        def both(weight: Tensor) -> None:
            out = outputs[weight.shape[0]]
            torch.mm(out, weight)
            torch.mm(out.T, inputs[weight.shape[1]])

        return self._best(lambda: [both(weight) for weight in self.weights], repeats)

    def _best(self, work: Callable[[], Any], repeats: int) -> float:
        """Return the seconds of the fastest call; on a GPU of a graph of it, which has no time of launches."""
        if self.device.type != "cuda":
            return best(work, repeats)
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return best(graph.replay, repeats)

    def _inputs(self, rows: int, axis: int) -> dict[int, Tensor]:
        widths = sorted({weight.shape[axis] for weight in self.weights})
        return {width: torch.randn(rows, width, device=self.device).to(self.dtype) for width in widths}
