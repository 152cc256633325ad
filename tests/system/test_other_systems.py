"""Without what only Linux has, all modules load and a run works; Windows is told what to do."""

import os
import subprocess
import sys

import pytest

from tests.cli.conftest import TINY
from tests.test_house import ROOT

RUN = """
import pkgutil, importlib, sys
import tests.system.as_macos
import proxima
from proxima.cli.main import main

for module in pkgutil.walk_packages(proxima.__path__, "proxima."):
    if not module.name.endswith("__main__") and "in_server" not in module.name:
        importlib.import_module(module.name)

import torch
from proxima.engine.http.weights.ipc import _BucketMemory
from proxima.engine.http.weights.weight_folders import WeightFolders
from proxima.model.load import load
from proxima.system import linux, machine
from tests.engine.http.test_weight_folder import written

assert linux.kernel_id() == b"" and linux.core_wait() == 0.0 and not linux.has_nvidia_gpu()
assert machine.memory_bytes() == (None, None) and machine.usable_cores() >= 1 and machine.processor_name()
assert written(WeightFolders(), load(sys.argv[1])).is_dir()
memory = _BucketMemory(torch.device("cpu"), named=True)
assert memory.handle(memory.allocate(100))["cpu"]["size"] == 100
memory.free()
assert main(["train", "tiny.yaml", "folder=run"]) == 0
assert main(["train", "tiny.yaml", "folder=run", "reward=python"]) == 2
"""


def ran(code, *words, cwd=None):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)) + os.pathsep + str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=cwd, env=environment, check=False)


@pytest.mark.slow
def test_a_run_without_what_only_linux_has(tiny_model, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY.format(model=tiny_model("llama")), encoding="utf-8")
    done = ran(RUN, tiny_model("llama"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "done: 2 steps" in done.stdout


WINDOWS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import subprocess, asyncio, platform, argparse, pathlib, ipaddress, textwrap
sys.meta_path.insert(0, Missing())
sys.platform = "win32"
from proxima.cli.main import main
sys.exit(main(["train", "quickstart"]))
"""


def test_windows_is_told_what_to_do():
    done = ran(WINDOWS)
    line = "error: proxima needs Linux or macOS; on Windows install and run it in WSL2\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
