"""Runs at the start of an SGLang server on a CPU, and gives it what its packages expect of a build for CUDA.

torchvision of PyPI is built for CUDA. Beside a CPU build of torch its library does not load, and its import fails
because the operators of the library have no schema: they are defined before torchvision is imported. SGLang pins the
memory in which it keeps the experts of each token, which only a GPU needs.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# the calls of CUDA's runtime that pin memory, with their status of success
RUNTIME = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                torch.cuda.cudart = lambda: RUNTIME
            if not _loads(torch, importlib.machinery.PathFinder.find_spec(name, path)):
                self.library = torch.library.Library("torchvision", "DEF")  # it lasts as long as the object
                for schema in SCHEMAS:
                    self.library.define(schema)
                sys.torchvision_schemas = self  # type: ignore[attr-defined]  # keeps it


def _loads(torch: Any, package: Any) -> bool:
    """Load the library of torchvision, which defines the operators; False if it does not fit to torch."""
    for folder in (package and package.submodule_search_locations) or ():
        for library in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
            return True
    return False


sys.meta_path.insert(0, _BeforeTorchvision())
