"""One setting of an engine, changed: what `proxima engine diagnose` tries, one at a time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

NO_GRAPHS = "CUDA graphs need a GPU"


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One setting of an engine and the value that is tried in place of the recipe's.

    Args:
        name: of the setting and the value, `prefix cache: off`.
        change: returns the spec with this value; a frozen dataclass in, another of the same class out.
        why_not: the reason for which it is not tried; None: it is.
    """

    name: str
    change: Callable[[Any], Any]
    why_not: str | None = None


def variation(name: str, why_not: str | None = None, **values: Any) -> Variation:
    """A variation in fields of the spec itself."""

    def change(spec: Any) -> Any:
        return replace(spec, **values)

    return Variation(name=name, change=change, why_not=why_not)


def variations_of(spec: Any, device: torch.device) -> Sequence[Variation]:
    """`EngineSpec.variations`; none of a spec that does not derive from `EngineSpec`."""
    if not hasattr(spec, "variations"):
        return ()
    variations: Sequence[Variation] = spec.variations(device)
    return variations


def changed_fields(before: Any, after: Any, path: str) -> list[str]:
    """The fields in which two specs of one class differ, as overrides of a recipe: `engine.serve.dtype=float32`."""
    found = list[str]()
    for field in fields(before):
        first = getattr(before, field.name)
        second = getattr(after, field.name)
        name = f"{path}.{field.name}"
        if first == second:
            continue
        if is_dataclass(first) and type(first) is type(second):
            found += changed_fields(first, second, name)
        elif isinstance(second, str):
            found.append(f"{name}={second}")
        else:
            found.append(f"{name}={json.dumps(second)}")
    return found
