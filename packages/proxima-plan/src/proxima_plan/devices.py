"""Accelerators, networks and rates by name (`devices.toml`), and this machine, measured."""

import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from proxima.data import UserError
from proxima.data.errors import suggestion
from proxima.system.machine import gemm_rate, memory_bytes

GIB = 2**30
MOST = 65_536  # devices
CPU = "cpu"  # the name of this machine, where it has no accelerator
MEASURED = "measured"  # the source of this machine's numbers
COPIED = 2**27  # bytes, to measure the bandwidth of memory


@dataclass(frozen=True)
class Rates:
    """The shares of a device's peaks that a step reaches: `rates` in `devices.toml`, whose comments explain each."""

    products: float
    width: float
    flash3: float
    flash2: float
    sdpa: float
    masked: float
    moved: float
    compiled: float
    head: float
    decode: float
    rows: float
    network: float
    overlap: float
    layer: float
    eager: float
    latency: float
    hop: float
    short: float
    staged: float
    publish: float
    load: float
    host: float
    step: float
    sequences: float
    host_sequence: float
    host_token: float
    spread: float

    def wait(self, nodes: int, size: float = 0.0) -> float:
        """Return the seconds of a collective of `size` bytes over `nodes` nodes, excluding the transfer itself."""
        if nodes == 1:
            return self.latency
        return self.latency + self.hop * math.log2(nodes) + min(size / (self.short * 1e9), self.staged)


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device, with the numbers of its data sheet or of a measurement.

    Args:
        memory: GiB. bf16: TFLOP/s of matrix products. bandwidth: TB/s of its memory.
        inside, across: GB/s that one device sends to others of its node, and to other nodes.
        node: devices per node.
        source: the source of these numbers.
        rates: the shares of these numbers that a step reaches.
        products: share of `bf16` that wide products reach; 0: that of the rates.
        fused: layers keep the activations that `model.fused` keeps.
    """

    name: str
    memory: float
    bf16: float
    bandwidth: float
    inside: float
    across: float
    node: int
    source: str
    rates: Rates
    products: float = 0.0
    fused: bool = False

    def nodes(self, group: int, stride: int = 1) -> int:
        """Return the number of nodes of a group that consists of every `stride`th of neighbouring devices."""
        return max(1, math.ceil(group * stride / self.node))

    def link(self, group: int, stride: int = 1) -> float:
        """Return the bytes per second that a device receives in an all-gather over a group of every `stride`th of
        neighbouring devices. Across nodes, each network adapter receives a part, which the devices of the group share
        within the node."""
        if group * stride <= self.node:
            return self.inside * 1e9
        return min(self.inside, self.across * max(1, self.node // stride)) * 1e9

    def exchange(self, group: int, stride: int = 1) -> float:
        """Return the bytes per second of a device in an all-to-all exchange within a group."""
        if group * stride <= self.node:
            return self.inside * 1e9
        here = max(1, self.node // stride)
        return self.across * 1e9 * (group - 1) / (group - here)  # traffic within the node costs little in comparison

    def product(self, width: float) -> float:
        """Return the seconds per FLOP of products with a matrix of `width` columns: compute at the share of the peak
        that wide products reach, plus reading inputs and writing outputs."""
        peak = self.bf16 * 1e12 * (self.products or self.rates.products)
        return 1 / peak + self.rates.width / (width * self.bandwidth * 1e12)


@dataclass(frozen=True)
class Devices:
    """A number of accelerators of one kind."""

    kind: DeviceKind
    count: int

    def __str__(self) -> str:
        if self.kind.source == MEASURED:
            return "this machine"
        return f"{self.count}x{self.kind.name}"


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """Return name → device, as in the file."""
    return {
        name: DeviceKind(name=name, rates=device_rates(), **values) for name, values in _tables()["devices"].items()
    }


def nearest_kind(name: str, memory: float) -> DeviceKind | None:
    """Return the kind in the file that a driver's name of a GPU names, the one with the nearest memory, in GiB; None if
    it names none."""
    words = re.split(r"[\s-]+", name.upper())
    known = [kind for kind in device_kinds().values() if kind.name.partition("-")[0] in words]
    return min(known, key=lambda kind: abs(kind.memory - memory), default=None)


def device_rates(*over: str) -> Rates:
    """Return the rates of accelerators, with those of other tables of the file over them."""
    tables = _tables()
    rates = dict(tables["rates"])
    for table in over:
        rates |= tables[table]
    return Rates(**rates)


def read_devices(text: str) -> list[Devices]:
    """Parse `8xH100-80G`, `H100-80G` for one device, `8,24xH100-80G` for several numbers, in ascending order, or
    `8-1024xH100-80G`, each twice the one before.

    Raises:
        UserError: the text is not of that form, the device is not in the table, or a number is out of range.
    """
    match = re.fullmatch(r"(?:(\d[\d,-]*)[x×])?(.+)", text.strip())
    numbers = "1"
    name = text
    if match:
        numbers = match[1] or "1"
        name = match[2]
    kinds = device_kinds()
    kind = kinds.get(name.upper())
    if kind is None:
        whole = " or ".join(repr(each) for each in kinds if each.startswith(f"{name.upper()}-"))
        if whole:
            near = f"did you mean {whole}?"
        else:
            near = suggestion(name.upper(), kinds)
        raise UserError(f"--devices {text}: {name!r} is not a known device; {near}")
    counts = set[int]()
    for part in numbers.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        low = 0
        high = 0
        if ends:
            low = int(ends[1])
            high = int(ends[2] or ends[1])
        if not 1 <= low <= high <= MOST:
            raise UserError(f"--devices {text}: {part!r} must be a number in [1, {MOST:,}], or two, the larger last")
        counts.update(low * 2**i for i in range((high // low).bit_length()))
    return [Devices(kind, count) for count in sorted(counts)]


def this_machine(dtype: str, device: str, count: int) -> Devices:
    """Measure products in `dtype` and the bandwidth of memory on `device`, for `count` ranks. They share a CPU."""
    if device.startswith("cuda"):
        kind = DeviceKind(
            name=torch.cuda.get_device_name(device).replace(" ", "-"),
            memory=torch.cuda.get_device_properties(device).total_memory / GIB,
            bf16=gemm_rate(dtype, device, 4096) / 1e12,
            bandwidth=_copy_rate(device) / 1e12,
            inside=32.0,
            across=1.0,
            node=max(torch.cuda.device_count(), count),
            source=MEASURED,
            rates=device_rates("machine"),
            products=1.0,
        )
    else:
        kind = DeviceKind(
            name=CPU,
            memory=(memory_bytes()[0] or 0) / GIB / count,
            bf16=gemm_rate(dtype, device) / 1e12 / count,
            bandwidth=_copy_rate(device) / 1e12 / count,
            inside=32.0,
            across=1.0,
            node=max(1, count),
            source=MEASURED,
            rates=device_rates("machine", "cpu"),
            fused=dtype == "bfloat16",
        )
    return Devices(kind, count)


def _copy_rate(device: str) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    from torch.utils.benchmark import Timer  # warms up, and waits for the device

    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    timer = Timer("b.copy_(a)", globals={"a": source, "b": torch.empty_like(source)})
    return 2 * COPIED / float(min(timer.blocked_autorange(min_run_time=0.2).times))
