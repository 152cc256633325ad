"""Checks the fields of a dataclass: tensors, choices, and names given by a caller. The error names the field, the value
and what was expected."""

from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from proxima.data.errors import NoFieldError, require, suggestion

DTYPES = {
    "float": (torch.float32, torch.float64),
    "bool": (torch.bool,),
    "int": (torch.int64, torch.int32),
    "id": (torch.int8, torch.int16),
}
_DTYPE_REMEDIES = {
    "float": "Cast before packing: masks and prefix sums need it.",
    "bool": "Use `mask != 0` or `mask.bool()`.",
    "int": "Cast with `.long()`.",
    "id": "Cast with `.to(torch.int16)`.",
}


def check_fields(instance: object, gradient: Collection[str] = ()) -> dict[str, int]:
    """Check every `Annotated[Tensor, "dtype axes"]` field of a dataclass, detach it unless it is in `gradient`, and
    return the axis sizes.

    The first field that uses an axis sets its size; the others must match. `"float N"` is float32 or float64 of shape
    [N]; `"int S+1"` is one longer than axis S; `"int N K"` has two axes. A field that is None is skipped.

    Raises:
        ValueError: names class and field, the actual dtype or shape, and the field that set the expected size.
    """
    sizes: dict[str, tuple[int, str]] = {}
    cls: type = type(instance)
    for name, hint in tensor_hints(cls).items():
        value = getattr(instance, name)
        if value is not None:
            _check_tensor(f"{cls.__name__}.{name}", value, hint, sizes)
            if value.requires_grad and name not in gradient:  # data, even where a model computed it
                object.__setattr__(instance, name, value.detach())
    return {axis: size for axis, (size, _) in sizes.items()}


def check_choices(instance: object) -> None:
    """Raise `FieldError` if a field annotated `Literal[...]` of a dataclass holds another value."""
    cls: type = type(instance)
    for name, choices in _choices(cls).items():
        value = getattr(instance, name)
        require(value in choices, name, value, f"must be {', '.join(choices[:-1])} or {choices[-1]}")


@cache
def _choices(cls: type) -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(cls).items() if get_origin(hint) is Literal}


@cache
def tensor_hints(cls: type) -> dict[str, str]:
    """The "dtype axes" of each tensor field of a dataclass, by name."""
    specs: dict[str, str] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if get_origin(hint) is Annotated:
            inner, spec, *_ = get_args(hint)
            if Tensor in (get_args(inner) or (inner,)):
                specs[name] = str(spec)
    return specs


def _check_tensor(label: str, value: object, hint: str, sizes: dict[str, tuple[int, str]]) -> None:
    kind, *axes = hint.split()
    if not isinstance(value, Tensor):
        raise ValueError(f"{label}: got {type(value).__name__}, expected a tensor of {hint!r}.")
    if value.dtype not in DTYPES[kind]:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[kind])
        actual = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"{label}: dtype {actual}, expected {names}. {_DTYPE_REMEDIES[kind]}")
    check_shape(label, value, axes, sizes)


def check_shape(label: str, value: Tensor, axes: Sequence[str], sizes: dict[str, tuple[int, str]]) -> None:
    """Check a shape as `check_fields` does. `sizes` maps each axis to its size and the field that set it; new axes are
    added."""
    if value.dim() != len(axes):
        raise ValueError(f"{label}: shape {list(value.shape)}, expected [{', '.join(axes)}].")
    for size, axis in zip(value.shape, axes, strict=True):
        base, _, extra = axis.partition("+")
        actual = size - int(extra or 0)
        expected, setter = sizes.setdefault(base, (actual, label))
        if actual != expected:
            wanted = f"[{', '.join(axes)}] with {base} = {expected} set by {setter}."
            if base in ("N", "T"):
                wanted += " One value per response token: was the last cut off?"
            raise ValueError(f"{label}: shape {list(value.shape)}, expected {wanted}")


def check_names(cls: type[Any], given: Collection[str], label: str, *, without: Collection[str] = ()) -> None:
    """Check names that become fields of a dataclass, except those that the caller fills in (`without`).

    Raises:
        NoFieldError: a name is not a field (the message suggests the nearest), or a required field is missing.
    """
    by_name = {f.name: f for f in fields(cls) if f.init and f.name not in without}
    for name in given:
        if name not in by_name:
            raise NoFieldError(f"{label}: {cls.__name__} has no field {name!r}; {suggestion(name, by_name)}")
    for name, f in by_name.items():
        if f.default is MISSING and f.default_factory is MISSING and name not in given:
            raise NoFieldError(f"{label}: {name} is missing; {cls.__name__} documents it")
