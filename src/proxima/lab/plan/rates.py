"""The shares of a device's peaks that a step reaches: the table `rates` of `devices.toml`."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from proxima.lab.plan.devices import DeviceKind


@dataclass(frozen=True)
class Rates:
    """The values of `rates` in `devices.toml`, whose comments explain each."""

    products: float
    width: float
    attention: float
    moved: float
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
    host: float
    step: float
    spread: float
    fitted: tuple[str, ...] = ()

    def product(self, width: float, device: DeviceKind) -> float:
        """Return the seconds per FLOP of products with a matrix of `width` columns on a device: compute at the share of
        the peak that wide products reach, plus reading inputs and writing outputs."""
        peak = device.bf16 * 1e12 * (device.products or self.products)
        return 1 / peak + self.width / (width * device.bandwidth * 1e12)

    def wait(self, nodes: int, size: float = 0.0) -> float:
        """Return the seconds of a collective of `size` bytes over `nodes` nodes, excluding the transfer itself."""
        if nodes == 1:
            return self.latency
        return self.latency + self.hop * math.log2(nodes) + min(size / (self.short * 1e9), self.staged)


@cache
def fitted_rates() -> Rates:
    """Return the rates of the file, and the names of the rows that they were fitted on."""
    table = tomllib.loads(Path(__file__).with_name("devices.toml").read_text())["rates"]
    return Rates(**table | {"fitted": tuple(table["fitted"])})
