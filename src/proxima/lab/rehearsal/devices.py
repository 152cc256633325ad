"""Accelerators by name, and how much memory each has."""

import re
from dataclasses import dataclass

from proxima.data import UserError
from proxima.data.errors import suggestion

GIB = 2**30
# name → GiB that the driver reports, a little less than the name says. To add one: a line.
DEVICES: dict[str, float] = {
    "L4-24G": 22.0,
    "RTX3090-24G": 23.6,
    "RTX4090-24G": 23.5,
    "RTX5090-32G": 31.3,
    "A10-24G": 22.1,
    "L40S-48G": 44.4,
    "A100-40G": 39.4,
    "A100-80G": 79.2,
    "H100-80G": 79.2,
    "H200-141G": 139.8,
    "B200-180G": 178.3,
    "MI300X-192G": 191.7,
}


@dataclass(frozen=True)
class Devices:
    """So many accelerators of one kind, and the bytes of each."""

    name: str
    count: int
    memory: int

    def __str__(self) -> str:
        return f"{self.count}x{self.name}"


def read_devices(text: str) -> Devices:
    """`8xH100-80G`, or `H100-80G` for one.

    Raises:
        UserError: it is not in the table, or not a number of one.
    """
    found = re.fullmatch(r"(?:(\d+)[x×])?(.+)", text.strip())
    count, name = (int(found[1] or 1), found[2]) if found else (0, text)
    known = next((own for own in DEVICES if own.lower() == name.lower()), None)
    if known is None:
        raise UserError(f"--devices {text}: {name!r} is no device here; {suggestion(name, DEVICES)}")
    if count < 1:
        raise UserError(f"--devices {text}: needs at least one device")
    return Devices(known, count, int(DEVICES[known] * GIB))
