"""Checks whose message names the field, what was found, and what was expected."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.float64),
    "bool": (torch.bool,),
    "int": (torch.int64, torch.int32),
}


def check_fields(instance: object) -> dict[str, int]:
    """Check every `Annotated[Tensor, "dtype axes"]` field of a dataclass and return the axis sizes.

    An axis gets its size from the first field that uses it; the others are held to it. `"float N"` is float32 or
    float64 of shape [N]; `"int S+1"` is one longer than axis S; `"int N K"` has two axes. A field that is None is
    skipped.

    Raises:
        ValueError: names the class and field, the dtype or shape found, and the field that set the expected size.
    """
    sizes: dict[str, tuple[int, str]] = {}
    owner = type(instance).__name__
    for name, hint in _tensor_hints(type(instance)).items():
        value = getattr(instance, name)
        if value is not None:
            _check_tensor(f"{owner}.{name}", value, hint, sizes)
    return {axis: size for axis, (size, _) in sizes.items()}


_HINTS: dict[type, dict[str, str]] = {}


def _tensor_hints(cls: type) -> dict[str, str]:
    if cls not in _HINTS:
        hints: Mapping[str, Any] = get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {name: spec for name, hint in hints.items() if (spec := _tensor_spec(hint)) is not None}
    return _HINTS[cls]


def _tensor_spec(hint: Any) -> str | None:
    return str(hint.__metadata__[0]) if get_origin(hint) is Annotated and Tensor in _flat(get_args(hint)[0]) else None


def _flat(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) or (hint,)


def _check_tensor(label: str, value: object, hint: str, sizes: dict[str, tuple[int, str]]) -> None:
    kind, *axes = hint.split()
    if not isinstance(value, Tensor):
        raise ValueError(f"{label}: got {type(value).__name__}, expected a tensor of {hint!r}.")
    if value.dtype not in DTYPES[kind]:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[kind])
        remedy = {
            "float": "Cast before packing: masks and prefix sums need it.",
            "bool": "Use `mask != 0` or `mask.bool()`.",
            "int": "Cast with `.long()`.",
        }[kind]
        raise ValueError(f"{label}: dtype {str(value.dtype).removeprefix('torch.')}, expected {names}. {remedy}")
    if value.dim() != len(axes):
        raise ValueError(f"{label}: shape {list(value.shape)}, expected [{', '.join(axes)}].")
    for size, axis in zip(value.shape, axes, strict=True):
        base, _, extra = axis.partition("+")
        found = size - int(extra or 0)
        expected, setter = sizes.setdefault(base, (found, label))
        if found != expected:
            hint_text = " One value per response token: was the last cut off?" if base == "N" else ""
            raise ValueError(
                f"{label}: shape {list(value.shape)}, expected [{', '.join(axes)}] with {base} = {expected} set by "
                f"{setter}.{hint_text}"
            )
