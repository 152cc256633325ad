"""proxima: trust-region reinforcement learning for language models.

    proxima.train(recipe, overrides)    proxima.evaluate(model, task="gsm8k")    proxima.load_run("runs/mine")

These are functions of `proxima.api`; proxima's documentation of Python describes them. `proxima.core` is
the mathematics alone. Importing this package imports none of it.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect import Signature

__version__ = "0.1.0"
__all__ = ["RunEnded", "UserError", "__version__", "evaluate", "load_run", "train"]


class CallableRoom(ModuleType):
    """`proxima.train` and `proxima.evaluate` are packages and, called, the functions of `proxima.api` of that name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)

    @property
    def __signature__(self) -> "Signature":
        """The signature that `help` and notebooks show."""
        from inspect import signature  # takes as long to import as all else here

        return signature(self._function)

    @property
    def _function(self) -> Any:
        return getattr(importlib.import_module("proxima.api"), self.__name__.rpartition(".")[2])


def __getattr__(name: str) -> Any:
    if name in ("evaluate", "train"):
        return importlib.import_module(f"proxima.{name}")
    if name in __all__:
        return getattr(importlib.import_module("proxima.api"), name)
    raise AttributeError(f"module 'proxima' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
