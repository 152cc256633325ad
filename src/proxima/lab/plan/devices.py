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
    """One kind of device, as its data sheet has it.

    Args:
        memory: GiB. bf16: TFLOP/s of products. bandwidth: TB/s of its memory.
        inside, across: GB/s that one device sends to others of its node, and to other nodes.
        node: devices of a node.
        source: of these numbers.
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
        """The number of nodes that a group of every `stride`th of neighbouring devices spans."""
        return max(1, math.ceil(group * stride / self.node))

    def link(self, group: int, stride: int = 1) -> float:
        """Bytes a second that a device of a group gets of an all-gather: every `stride`th of neighbouring devices is in
        it. Across nodes, each adapter of a node carries its part, and the devices of the group share it inside."""
        if group * stride <= self.node:
            return self.inside * 1e9
        return min(self.inside, self.across * max(1, self.node // stride)) * 1e9

    def exchange(self, group: int, stride: int = 1) -> float:
        """Bytes a second that a device exchanges with all others of a group, each with other bytes for each."""
        if group * stride <= self.node:
            return self.inside * 1e9
        here = max(1, self.node // stride)
        return self.across * 1e9 * (group - 1) / (group - here)  # what stays in the node costs little beside the rest


@dataclass(frozen=True)
class Devices:
    """So many accelerators of one kind."""

    kind: DeviceKind
    count: int

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def memory(self) -> int:
        """Bytes of each."""
        return int(self.kind.memory * GIB)

    def __str__(self) -> str:
        return f"{self.count}x{self.name}"


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """Name → device, as in the file."""
    table: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["devices"]
    return {name: DeviceKind(name=name, **values) for name, values in table.items()}


def read_devices(text: str) -> Devices:
    """`8xH100-80G`, or `H100-80G` for one.

    Raises:
        UserError: it is not in the table, or not a number of one.
    """
    found = re.fullmatch(r"(?:(\d+)[x×])?(.+)", text.strip())
    count, name = (int(found[1] or 1), found[2]) if found else (0, text)
    kinds = device_kinds()
    kind = kinds.get(name.upper())
    if kind is None:
        whole = " or ".join(repr(known) for known in kinds if known.startswith(f"{name.upper()}-"))
        near = f"did you mean {whole}?" if whole else suggestion(name.upper(), kinds)
        raise UserError(f"--devices {text}: {name!r} is not a known device; {near}")
    if count < 1:
        raise UserError(f"--devices {text}: needs at least one device")
    return Devices(kind, count)
