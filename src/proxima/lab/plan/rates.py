"""The shares of a device's peaks that a step reaches: the table `rates` of `devices.toml`."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from proxima.lab.plan.devices import DeviceKind


@dataclass(frozen=True)
class Rates:
    """The values in the file, whose comments explain each."""

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
        """Seconds of one FLOP of products whose matrix has so many columns on a device: at the share of the peak that
        wide ones reach, and of reading and writing their inputs and outputs."""
        peak = device.bf16 * 1e12 * (device.products or self.products)
        return 1 / peak + self.width / (width * device.bandwidth * 1e12)

    def wait(self, nodes: int, size: float = 0.0) -> float:
        """Seconds of a collective of `size` bytes over so many nodes, but those at which the network sends them."""
        if nodes == 1:
            return self.latency
        return self.latency + self.hop * math.log2(nodes) + min(size / (self.short * 1e9), self.staged)


@cache
def fitted_rates() -> Rates:
    """Those of the file, and the names of the rows that they were fitted on."""
    table = tomllib.loads(Path(__file__).with_name("devices.toml").read_text())["rates"]
    return Rates(**table | {"fitted": tuple(table["fitted"])})
