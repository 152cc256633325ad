"""What an SGLang server on a CPU is given of CUDA: operators of torchvision, where its own library does not load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.engine.serve.launch import IN_SGLANG

TORCH = """
import types
defined = []
class Library:
    def __init__(self, name, kind): assert (name, kind) == ("torchvision", "DEF")
    def define(self, schema):
        assert schema.partition("(")[0] not in defined, "defined twice"
        defined.append(schema.partition("(")[0])
def load_library(path):
    if not open(path).read(): raise OSError("undefined symbol")
    defined.extend(["nms", "qnms"])
library, ops = types.SimpleNamespace(Library=Library), types.SimpleNamespace(load_library=load_library)
cuda = types.SimpleNamespace(is_available=lambda: False)
"""


@pytest.mark.parametrize("loads", ["", "it loads"])
def test_operators_are_defined_once(tmp_path: Path, loads: str) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("import torch; assert torch.defined == ['nms', 'qnms']")
    (tmp_path / "torchvision" / "_C.so").write_text(loads)
    program = "import torchvision, torch; print(torch.cuda.cudart().cudaHostRegister(1, 2, 0))"
    variables = {"PYTHONPATH": f"{IN_SGLANG / 'cpu'}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
