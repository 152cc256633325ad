"""Counts the bytes that are alive on a fake device.

A dispatch mode over `FakeTensorMode`. Host tensors hold data and are computed as usual. Whatever the host requests from
the device (a number, a copy, a data-dependent shape) is answered with a plausible value, so that a step runs to its
end.
"""

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proxima_plan.memory import ACTIVATIONS
from proxima_plan.rehearsal.fake_device import COPIES, NAME, ON_SYNCHRONIZE

aten = torch.ops.aten
BLOCK = 512  # bytes: the rounding of CUDA's allocator
TRANSFERS = (aten._to_copy.default, aten.copy_.default)
STEP = "optimizer's step"
LARGEST = 2**20  # elements of an optimizer state with data in host memory; larger ones are one 0, expanded


@dataclass
class LiveBytes:
    """The bytes on the device by kind, now and at the peak."""

    now: Counter[str] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)
    total: int = 0
    most: int = 0

    def add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.total += size
        if self.total > self.most:
            self.most = self.total
            self.peak = dict(self.now)


class DeviceWatch(TorchDispatchMode):
    """See the module. `bytes` is the live memory, and new memory is counted as `kind`. `waits` counts where the host
    waits for the device, by operation: `item`, `copy to the host`, `copy to the device` …"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no type
        self.bytes = LiveBytes()
        self.waits = Counter[str]()
        self.kind = ACTIVATIONS
        self._storages: dict[int, tuple[str, int, Any]] = {}
        self._pinned = set[int]()  # where pinned memory begins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it is dispatched again, as operations on this rank's shard
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return self._pin(func, args[0])
        if func in TRANSFERS:
            return self._copy(func, args, kwargs)
        if not there and _target(kwargs) != NAME:
            with unset_fake_temporarily():
                if self.kind == STEP and func is aten.zeros.default and math.prod(args[0]) > LARGEST:
                    return torch.zeros((), dtype=kwargs.get("dtype")).expand(args[0])
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.wait("item")
            if args[0].is_floating_point():
                return 1.0
            return args[0].dtype == torch.bool or 1
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            args = self._indices(func, args)
        elif torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return self._kept(self._of_unknown_shape(func, args, kwargs))
        return self._kept(func(*args, **kwargs))

    def __enter__(self) -> "DeviceWatch":
        self._undo = ExitStack()
        self._resize = torch.UntypedStorage.resize_
        for owner, name, stand_in in (
            (FakeTensor, "tolist", _tolist),
            (torch.UntypedStorage, "resize_", lambda own, size: self._resized(own, size)),  # FSDP frees layers with it
            (torch, "clear_autocast_cache", COPIES.clear),  # called where the outermost autocast ends
        ):
            self._undo.enter_context(patch.object(owner, name, stand_in))
        self._undo.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(1, device=…)` is a copy to the device
        self._undo.callback(ON_SYNCHRONIZE.clear)
        ON_SYNCHRONIZE.append(partial(self.wait, "synchronize"))
        super().__enter__()  # type: ignore[no-untyped-call]  # likewise
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        self._undo.close()

    def wait(self, what: str) -> None:
        """Record that the host waits here."""
        self.waits[what] += 1

    def relabel(self, tensors: Any, kind: str) -> None:
        """Count the memory of these tensors as `kind`."""
        for whole in tensors:
            tensor = getattr(whole, "_local_tensor", whole)
            key = tensor.untyped_storage()._cdata if isinstance(tensor, FakeTensor) else None
            if key in self._storages:
                before, size, reference = self._storages[key]
                self._storages[key] = kind, size, reference
                self.bytes.now[before] -= size
                self.bytes.now[kind] += size

    def restart(self) -> None:
        """Measure the peak, and count waits, from now on."""
        self.waits.clear()
        self.bytes.most = self.bytes.total
        self.bytes.peak = dict(self.bytes.now)

    def _pin(self, func: Any, tensor: Tensor) -> Any:
        if func is aten.is_pinned.default:
            return self._is_pinned(tensor)
        with unset_fake_temporarily():
            if _holds_no_data(tensor):
                pinned = tensor[...]
            else:
                pinned = tensor.clone()
        place = pinned.untyped_storage().data_ptr()
        self._pinned.add(place)
        weakref.finalize(pinned, self._pinned.discard, place)
        return pinned

    def _is_pinned(self, tensor: Tensor) -> bool:
        """True for pinned memory and for views of it."""
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy within the device, or between it and the host; a copy to the host gets plausible data."""
        writes = func is aten.copy_.default  # else it makes a copy
        source = args[1] if writes else args[0]
        before = _is_there(source)
        target = _target(kwargs)
        dtype = kwargs.get("dtype") or source.dtype
        if writes:
            after = _is_there(args[0])
        elif target is None:
            after = before
        else:
            after = target == NAME
        if before and after:
            return self._kept(func(*args, **kwargs))
        if not before and not after:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        silent = kwargs.get("non_blocking") or (writes and len(args) > 2 and args[2])
        host = source if after else args[0]
        if not (silent and self._is_pinned(host)):
            where = "device" if after else "host"
            self.wait(f"copy to the {where}")
        if after:
            if writes:
                return args[0]
            return self._kept(torch.empty(source.shape, dtype=dtype, device=NAME))
        with unset_fake_temporarily():
            if not writes:
                return _plausible(source.shape, dtype)
            if _holds_no_data(args[0]):
                return args[0]
            return args[0].copy_(_plausible(source.shape, dtype))

    def _indices(self, func: Any, args: Any) -> Any:
        """Return the arguments with masks and host tensors replaced by indices of positions on the device."""
        indices = []
        one_value = func is not aten.index.Tensor and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        for index in args[1]:
            if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
                if index is not None and not _is_there(index) and _is_there(args[0]) and index.dim():
                    self.wait("index on the host")
                    index = torch.empty(index.shape, dtype=torch.long, device=args[0].device)
                indices.append(index)
                continue
            if not one_value:
                self.wait("index by a mask")
            size = index.numel()
            device = args[0].device
            indices += [torch.empty(size, dtype=torch.long, device=device) for _ in range(index.dim())]
        return (args[0], indices, *args[2:])

    def _of_unknown_shape(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the largest possible result of an operation whose shape or value depends on data."""
        first = args[0]
        size = kwargs.get("output_size")
        if func is aten.repeat_interleave.Tensor and size is not None:  # the size is passed, so it doesn't wait
            return torch.empty(size, dtype=torch.long, device=first.device)
        self.wait(str(func).removeprefix("aten.").removesuffix(".default"))
        if func is aten.nonzero.default:
            return torch.empty(first.numel(), first.dim(), dtype=torch.long, device=first.device)
        if func is aten.masked_select.default:
            return first.new_empty(first.numel())
        if func is aten.equal.default:
            return True
        raise RuntimeError(f"{func} waits for the device to know its shape: a rehearsal can't answer it")

    def _kept(self, outputs: Any) -> Any:
        """Return the outputs, and count their memory until it is freed."""
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, FakeTensor) and tensor.device.type == NAME:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    size = _rounded(storage.nbytes())
                    reference = weakref.ref(storage, partial(self._freed, key))
                    self._storages[key] = self.kind, size, reference
                    self.bytes.add(self.kind, size)
        return outputs

    def _resized(self, storage: Any, size: int) -> Any:
        result = self._resize(storage, size)
        key = storage._cdata
        if key in self._storages:
            kind, before, reference = self._storages[key]
            after = _rounded(storage.nbytes())
            self._storages[key] = kind, after, reference
            self.bytes.add(kind, after - before)
        return result

    def _freed(self, key: int, _: Any) -> None:
        kind, size, _ = self._storages.pop(key)
        self.bytes.add(kind, -size)


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _tolist(tensor: Tensor) -> Any:
    """Convert with one copy, as for a real tensor; a fake tensor would be read element by element."""
    return tensor.cpu().tolist()


def _is_there(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device.type == NAME


def _holds_no_data(tensor: Tensor) -> bool:
    """True for a large state in host memory, and for its parts."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


def _target(kwargs: Mapping[str, Any]) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _plausible(shape: Any, dtype: torch.dtype) -> Tensor:
    """Return the data of a copy to the host: 0 for log-probs and other numbers, True for masks."""
    return torch.full(shape, dtype == torch.bool, dtype=dtype)
