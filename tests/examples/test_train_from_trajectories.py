"""The example that trains from trajectories: it learns, in twenty lines, and loads nothing that a run needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_from_trajectories.py"
RUN = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("proxima.")}
assert not rooms & {"runtime", "config", "api", "cli", "view", "experiments", "reward"}, rooms
"""


@pytest.mark.slow
def test_it_learns_and_loads_no_run(tiny_model, tmp_path):
    command = [sys.executable, "-c", RUN, str(EXAMPLE), str(tiny_model("llama"))]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert out.returncode == 0, out.stderr
    updates = [text.splitlines() for text in out.stdout.split("update ")[1:]]
    losses = [float(head.split()[-1]) for head, *_ in updates]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    paris, lyon = ([float(lines[row].split()[-1]) for lines in updates] for row in (1, 2))
    assert paris == sorted(paris) and lyon == sorted(lyon, reverse=True)
    assert list(tmp_path.iterdir()) == []  # no folder


def test_it_is_about_twenty_lines():
    (train,) = (node for node in ast.parse(EXAMPLE.read_text()).body if isinstance(node, ast.FunctionDef))
    assert train.end_lineno - train.lineno + 1 <= 20
