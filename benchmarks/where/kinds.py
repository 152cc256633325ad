"""The kind of work of every operation in a trace, and the seconds of each kind."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.where.phases import KERNEL, PHASE, REGION, Clock

#: in the order of the table; `overhead` is what no operation accounts for: Python, dispatch, waiting
KINDS = ("products", "attention", "copies", "elementwise", "vocabulary", "fused", "overhead")
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_linear_pointwise", "mkldnn_linear", "_grouped_mm"})
ATTENTION = ("scaled_dot_product", "flash_attention", "_efficient_attention", "_varlen_attn")
COPIES = frozenset(
    """
    copy_ index_select index index_put_ _index_put_impl_ cat stack gather scatter scatter_ scatter_add_ index_add_
    index_copy_ embedding embedding_dense_backward fill_ zero_ repeat_interleave clone contiguous slice_backward
    select_backward _reorder_linear_weight
    """.split()  # noqa: SIM905
)
# no work: views, allocations and calls of other operations
NO_WORK = frozenset(
    """
    view reshape _unsafe_view _reshape_alias as_strided transpose t permute expand expand_as select slice narrow
    unsqueeze squeeze unbind split split_with_sizes chunk detach detach_ alias view_as flatten unflatten
    view_as_real view_as_complex empty empty_like empty_strided new_empty resize_ set_ result_type lift_fresh
    is_pinned item _local_scalar_dense to _to_copy linear matmul resolve_conj resolve_neg lift zeros zeros_like ones
    ones_like full full_like new_zeros pad constant_pad_nd type_as numpy_T unsafe_split record_stream
    """.split()  # noqa: SIM905
)
#: words in the names of compiled kernels, and what they do; the first that fits counts
KERNEL_KINDS = {
    "pack": "copies",
    "transpose": "copies",
    "linear": "products",
    "attend": "attention",
    "attention": "attention",
    "norm": "elementwise",
    "swiglu": "elementwise",
    "rotary": "elementwise",
    "adam": "elementwise",
    "prob": "vocabulary",
    "sample": "vocabulary",
    "draw": "vocabulary",
    "logits": "vocabulary",
    "cast": "copies",
    "copy": "copies",
}
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")


def kind_of(name: str, region: str | None) -> str:
    """Return the kind of an operation's own time.

    Args:
        name: as in the profiler, `aten::mm`.
        region: the kind of its region, see `phases.REGIONS`.
    """
    library, _, operation = name.rpartition("::")
    if name.startswith(KERNEL):
        return next((kind for word, kind in KERNEL_KINDS.items() if word in name.lower()), region or "fused")
    if name.startswith(COMPILED):
        return region or "fused"
    if not library or library.startswith(("autograd", "torch::autograd", "torch::jit")):
        return "overhead"
    if operation in NO_WORK:
        return "overhead"
    if region == "vocabulary":
        return "products" if operation in PRODUCTS else region
    if operation in COPIES:
        return "copies"
    if region == "attention" or any(word in operation for word in ATTENTION):
        return "attention"
    if operation in PRODUCTS:
        return "products"
    return "elementwise" if library == "aten" else "fused"


def trace(work: Callable[[], Any]) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]], Clock]:
    """Run `work` once under the profiler and return, by phase, the seconds of each kind (without `overhead`) and of
    each operation (`kind name`), and the seconds of the phases under the profiler. On a GPU, operations count with its
    own seconds, and what graphs launched is `fused`."""
    on_gpu = torch.cuda.is_available()
    clock = Clock()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with clock.watch(profiled=True), profile(activities=activities) as profiler:
        work()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    places = _places(events)
    kinds: dict[str, Counter[str]] = {}
    operations: dict[str, Counter[str]] = {}
    for event, (phase, region) in zip(events, places, strict=True):
        kind = kind_of(event.name, region)
        if phase is None or kind == "overhead":
            continue
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        kinds.setdefault(phase, Counter())[kind] += seconds
        operations.setdefault(phase, Counter())[f"{kind} {event.name}"] += seconds
    for phase, seconds in _busy(profiler.events()).items():
        own = kinds.setdefault(phase, Counter())
        own["fused"] += max(0.0, seconds - own.total())
    return kinds, operations, clock


def _busy(events: list[Any]) -> Counter[str]:
    """Return the seconds that kernels of a GPU took within each phase, those of graphs among them."""
    spans, busy = _spans(events), Counter[str]()
    for event in events:
        kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if kernel and not event.name.startswith((PHASE, REGION, KERNEL)):
            phase = _phase_at(spans, event.time_range.start)
            busy[phase or "host"] += event.time_range.elapsed_us() / 1e6
    return busy


def _spans(events: list[Any]) -> list[tuple[float, float, str]]:
    """Return start, end and name of each phase; they don't overlap, and end when the device has done their work."""
    return [
        (event.time_range.start, event.time_range.end, event.name.removeprefix(PHASE))
        for event in events
        if event.name.startswith(PHASE) and event.device_type == torch.autograd.DeviceType.CPU
    ]


def _phase_at(spans: list[tuple[float, float, str]], time: float) -> str | None:
    return next((name for start, end, name in spans if start <= time <= end), None)


def _places(events: list[Any]) -> list[tuple[str | None, str | None]]:
    """Return the phase and the region of each event. A backward operation has the region of its forward one: autograd
    gives both the same sequence number. On a GPU it runs in another thread: its phase is the one at its time."""
    places: dict[int, tuple[str | None, str | None]] = {}
    spans = _spans(events)
    of_number: dict[int, str | None] = {}

    def place(event: Any) -> tuple[str | None, str | None]:
        chain = []
        while event is not None and id(event) not in places:
            chain.append(event)
            event = event.cpu_parent
        start = chain[-1].time_range.start if chain else 0.0
        phase, region = (_phase_at(spans, start), None) if event is None else places[id(event)]
        for link in reversed(chain):
            if link.name.startswith(PHASE):
                phase = link.name.removeprefix(PHASE)
            elif link.name.startswith(REGION):
                region = link.name.removeprefix(REGION)
            elif link.name.startswith("autograd::engine::evaluate_function"):
                region = of_number.get(link.sequence_nr)
            elif phase == "forward" and link.sequence_nr >= 0:
                of_number[link.sequence_nr] = region  # the last one with a number is the one that autograd recorded
            places[id(link)] = phase, region
        return places[id(chain[0])] if chain else (phase, region)

    ordered = sorted(range(len(events)), key=lambda i: events[i].time_range.start)
    for i in ordered:
        place(events[i])
    return [places[id(event)] for event in events]
