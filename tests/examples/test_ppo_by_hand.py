"""examples/ppo_by_hand.ipynb: its functions by hand and ours give the same numbers."""

import json
import re
from pathlib import Path

import torch

from proxima.config.resolution import resolve
from proxima.core import Importance
from proxima.data.policy_batch import PolicyBatch

OF_THE_SOURCE = (
    *("compute_reward", "compute_td_delta", "compute_advantage", "normalize_advantage", "return_targets"),
    *("action_mask", "PolicyLoss", "ValueLoss", "PairWiseRMLoss", "DPOLoss", "compute_grpo_advantages", "GRPOLoss"),
)
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
    assert capsys.readouterr().out.count("equal:") == 21


def test_every_function_by_hand_is_found_by_its_name():
    """In the table of the classic kit, where its users look names up."""
    source = "".join("".join(cell["source"]) + "\n" for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"])
    names = [name for name in re.findall(r"^def (\w+)\(", source, flags=re.M) if name not in ("packed", "same")]
    page = (
        (NOTEBOOK.parents[1] / "packages/proxima-peers/docs/migration.md")
        .read_text("utf-8")
        .partition("The classic kit")[2]
    )
    table = page.partition("## Masks")[0]
    assert len(names) == 15
    assert [name for name in (*names, *OF_THE_SOURCE) if f"`{name}`" not in table] == []


def test_the_recipes_of_the_walkthrough_average_as_the_notebook_does():
    """A mean over each answer, then over answers: [1, 3] and [6] have the mean (2 + 6) / 2."""
    loss, edges = torch.tensor([1.0, 3.0, 6.0]), torch.tensor([0, 2, 3])
    for recipe in ("cpu/ppo_notebook", "classic/ppo", "classic/grpo"):
        config = resolve(recipe).config
        critics = [config.critic.aggregate] if config.critic is not None else []
        b = PolicyBatch(log_prob=loss, loss_mask=torch.ones(3, dtype=torch.bool), cu_seqlens=edges)
        for aggregate in (config.algorithm.aggregate, *critics):
            assert float(aggregate(loss, b) / aggregate.denominator(b.loss_mask, edges)) == 4.0, recipe


def test_the_recipe_of_verls_sequence_example_has_its_threshold():
    (spec,) = resolve("cpu/is_sequence").config.algorithm.correction
    assert spec == Importance(level="sequence", bound="clip", upper=2.0, veto=1e-4) and spec.floor == 0.5
