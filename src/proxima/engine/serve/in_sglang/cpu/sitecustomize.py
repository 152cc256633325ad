"""Runs at the start of an SGLang server on a CPU: defines operators that torchvision expects before it is imported.

torchvision of PyPI is built for CUDA. Beside a CPU build of torch its library does not load, and its import fails
because the operators of the library have no schema.
"""

import importlib.abc
import sys
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # it lasts as long as the object
            for schema in SCHEMAS:
                self.library.define(schema)
            sys.torchvision_schemas = self  # type: ignore[attr-defined]


sys.meta_path.insert(0, _BeforeTorchvision())
