"""examples/ppo_by_hand.ipynb: its functions by hand and ours give the same numbers."""

import json
from pathlib import Path

import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "ppo_by_hand.ipynb"


def test_every_function_equals_the_one_by_hand(capsys):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all("same(" in "".join(cell["source"]) for cell in cells)  # defined in the first, called in the others
    dtype, space = torch.get_default_dtype(), {}
    try:
        for cell in cells:
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), space)
    finally:
        torch.set_default_dtype(dtype)
    assert capsys.readouterr().out.count("equal:") == 13
