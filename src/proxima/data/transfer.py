"""Asynchronous copies between the host and a device."""

from typing import Any

import torch
from torch import Tensor

ALONE = ("cpu", "meta", "mps")  # devices without pinned memory


def to_device(value: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`; copied from the host through pinned memory, so that the host does not wait for the
    device."""
    device = torch.device(device)
    if value.device.type != "cpu" or device.type in ALONE:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies to the host that are started one by one and waited for once.

    copies = HostCopies(); on_host = copies.begin(tensor); …; copies.wait()     on_host may be read from here on
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None

    def begin(self, value: Tensor) -> Tensor:
        """Start copying the tensor to the host and return the detached copy; its data are valid after `wait`."""
        value = value.detach()
        if value.device.type in ALONE:
            return value.cpu()
        self._device = value.device
        host = torch.empty(value.shape, dtype=value.dtype).pin_memory()
        return host.copy_(value, non_blocking=True)

    def wait(self) -> None:
        """Wait for all started copies."""
        if self._device is not None:
            module: Any = torch.get_device_module(self._device)
            module.current_stream(self._device).synchronize()
