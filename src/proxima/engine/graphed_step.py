"""Decode steps as CUDA graphs: a step's hundreds of kernels are launched together, not one by one from Python.

A graph repeats the launches of one step: the same kernels on the same addresses. So everything a step reads, including
its tokens and positions, is at fixed addresses, and its numbers of rows and of cached positions are rounded up to a few
sizes.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FAR = 1e-2  # relative to the norm of a step's result: a graph whose result is further from it is wrong

Step = Callable[[Tensor, Tensor, int], Tensor]
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class GraphedSteps:
    """Runs steps. Each pair of sizes is recorded at its first use, after a run without a graph, and compared with that
    run.

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
            self._places = [weakref.ref(place) for place in places]
        count = len(tokens)
        rows = min(rounded_up(count, 8), self.slots)  # rows from `count` on repeat earlier inputs: their slots are free
        self._tokens[:count], self._position[:count] = tokens, position
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
            self._give_up(next(iter(str(error).strip().splitlines()), type(error).__name__))
            return expected
        apart, size = (x.nan_to_num().float().norm() for x in (out - expected, expected))
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
        graph, last = torch.cuda.CUDAGraph(), self._last()
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
