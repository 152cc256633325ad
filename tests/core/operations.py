"""Counts the operations that torch runs."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """`count`: the name of each operation (`aten::item` …) → how often it ran in the context; `of_floats`: those of
    them whose first argument is a float tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.of_floats: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name] += 1
        self.of_floats[func._schema.name] += int(
            bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        )
        return func(*args, **(kwargs or {}))
