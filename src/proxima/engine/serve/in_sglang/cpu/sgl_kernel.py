"""Stands in for SGLang's CUDA kernels on a machine without a GPU: every name can be imported, and raises when called.

SGLang imports many kernels that a model on a CPU never calls. On the PYTHONPATH of a server that proxima starts.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self._name} is a CUDA kernel of SGLang, which a server on a CPU does not have")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every submodule importable."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = name.startswith(f"{__name__}.")
        if found:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _names_of(module.__name__)


def _names_of(module: str) -> Any:
    def kernel(name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{module}.{name}")

    return kernel


__path__: list[str] = []  # makes this module a package, whose submodules `_Submodules` finds
__getattr__ = _names_of(__name__)
sys.meta_path.append(_Submodules())
