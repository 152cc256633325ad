"""Accelerators and networks by name: `devices.toml`."""

import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.errors import suggestion

GIB = 2**30


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device, with the numbers of its data sheet.

    Args:
        memory: GiB. bf16: TFLOP/s of matrix products. bandwidth: TB/s of its memory.
        inside, across: GB/s that one device sends to others of its node, and to other nodes.
        node: devices per node.
        source: the source of these numbers.
        products: share of `bf16` that wide products reach; 0: that of `Rates`.
    """

    name: str
    memory: float
    bf16: float
    bandwidth: float
    inside: float
    across: float
    node: int
    source: str
    products: float = 0.0

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


@dataclass(frozen=True)
class Devices:
    """A number of accelerators of one kind."""

    kind: DeviceKind
    count: int

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def memory(self) -> int:
        """Bytes of memory per device."""
        return int(self.kind.memory * GIB)

    def __str__(self) -> str:
        return f"{self.count}x{self.name}"


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """Return name → device, as in the file."""
    table: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["devices"]
    return {name: DeviceKind(name=name, **values) for name, values in table.items()}


def read_devices(text: str) -> Devices:
    """Parse `8xH100-80G`, or `H100-80G` for one device.

    Raises:
        UserError: the device is not in the table, or the number is < 1.
    """
    match = re.fullmatch(r"(?:(\d+)[x×])?(.+)", text.strip())
    count, name = (int(match[1] or 1), match[2]) if match else (0, text)
    kinds = device_kinds()
    kind = kinds.get(name.upper())
    if kind is None:
        whole = " or ".join(repr(each) for each in kinds if each.startswith(f"{name.upper()}-"))
        near = f"did you mean {whole}?" if whole else suggestion(name.upper(), kinds)
        raise UserError(f"--devices {text}: {name!r} is not a known device; {near}")
    if count < 1:
        raise UserError(f"--devices {text}: needs at least one device")
    return Devices(kind, count)
