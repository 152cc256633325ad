"""A fake accelerator: its tensors have shape, dtype and device, but no data; torch treats it like CUDA.

It is torch's private device with the backend below, under `FakeTensorMode`: a build of torch without CUDA can't run a
backward pass of fake CUDA tensors (the autograd engine asks for a driver), and on one with CUDA the figures would
depend on the machine. Features that torch has for CUDA only are replicated here: autocast's list of products, and the
fused attention kernels, which don't keep a matrix of scores.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "rehearsal"
FLASH_HEAD = 256  # widest head of the flash kernel

# products that autocast runs in half precision on CUDA, limited to those in decoders
LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")
_AUTOCAST = "AutocastPrivateUse1"
COPIES: dict[int, tuple[Tensor, Tensor]] = {}  # autocast's cache: by the id of a weight, it and its copy
ON_SYNCHRONIZE: list[Callable[[], None]] = []  # called where the host waits for a stream
_libraries: list[torch.library.Library] = []  # keeps the registrations alive


class _FakeStream:
    """A stream or event of a fake device, on which every operation finishes at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device(NAME, 0)

    def __enter__(self) -> "_FakeStream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None:
        for heard in ON_SYNCHRONIZE:
            heard()

    def _at_once(self, other: Any = None) -> Any:
        return other or _FakeEvent()

    wait_stream = wait_event = record_event = _at_once


class _FakeEvent(_FakeStream):
    record = wait = _FakeStream._at_once


class _Backend(backend_registration._DummyBackendModule):
    """The module that torch requires of a device backend."""

    Stream = _FakeStream
    Event = _FakeEvent

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> _FakeStream:
        return _FakeStream()

    def stream(self, stream: Any) -> _FakeStream:
        return _FakeStream()

    def device(self, index: Any) -> _FakeStream:
        return _FakeStream()

    def set_device(self, index: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        _FakeStream().synchronize()


@cache
def fake_device() -> torch.device:
    """Return the device, registered on first use for the rest of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    ours = torch.library.Library("aten", "IMPL")
    for name in LOWERED:
        ours.impl(name, _lowered(getattr(torch.ops.aten, name).default), _AUTOCAST)
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        ours.impl("scaled_dot_product_attention", _attention, key)
        ours.impl("_grouped_mm", _grouped_product, key)
    _libraries.extend((every, ours))
    return torch.device(NAME, 0)


def _lowered(operator: Any) -> Callable[..., Tensor]:
    """Wrap an operator to cast its arguments to the dtype of autocast. A weight is cast once per forward pass and its
    copy is kept until the end of the pass, as in autocast's own cache."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))

    def run(*arguments: Any, **options: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = torch.get_autocast_dtype(NAME)
            lowered = [_cast(value, dtype) for value in arguments]
            result: Tensor = operator(*lowered, **{name: _cast(value, dtype) for name, value in options.items()})
            return result

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_cast(item, dtype) for item in value]
    wide = isinstance(value, Tensor) and value.device.type == NAME and value.dtype == torch.float32
    if not wide:
        return value
    if not (torch.is_autocast_cache_enabled() and value.requires_grad and value.is_leaf and value._base is None):
        return value.to(dtype)
    if id(value) not in COPIES:
        COPIES[id(value)] = value, value.to(dtype)
    return COPIES[id(value)][1]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that `scaled_dot_product_attention` chooses on CUDA: flash without a mask in half precision,
    otherwise the memory-efficient kernel with a dense bias."""
    repeat = query.shape[1] // key.shape[1] if enable_gqa else 1
    if repeat > 1:
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    operators = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= FLASH_HEAD:
        flash = operators._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        bias = bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    learns = any(x.requires_grad for x in (query, key, value)) and torch.is_grad_enabled()
    efficient = operators._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]
    return out


def _grouped_product(
    rows: Tensor,
    matrices: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply rows [S, I] by one of the matrices [E, I, O]; shapes and operations are those of the grouped product.
    In precisions other than bfloat16, CUDA computes group by group and reads the ends of the groups on the host."""
    if offs is not None and rows.dtype != torch.bfloat16:
        offs.cpu()
    return rows @ matrices[0]
