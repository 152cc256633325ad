"""Which tensors of the files make up a weight."""

from pathlib import Path

import pytest
import torch

from proxima.model.parallel.pieces import FilePiece, pieces_of_weights
from tests.model.families import make

FILE = Path("model.safetensors")


def test_a_weight_of_experts_is_filled_row_by_row():
    expected = torch.arange(48.0).view(3, 4, 4)
    weight = torch.zeros(3, 4, 4)
    for expert in range(3):
        for part in range(2):
            piece = FilePiece("of an expert", FILE, (expert, part, 2))
            assert piece.among(weight) == 6 and piece.fits(weight, [2, 4]) and not piece.fits(weight, [4, 4])
            piece.fill(weight, expected[expert, 2 * part : 2 * part + 2])
    assert torch.equal(weight, expected)
    assert not FilePiece("too many", FILE, (3, 0, 2)).fits(weight, [2, 4])


@pytest.mark.parametrize(
    ("family", "gate", "up"),
    [
        ("Qwen3-MoE", "mlp.experts.2.gate_proj", "mlp.experts.2.up_proj"),
        ("Mixtral", "block_sparse_moe.experts.2.w1", "block_sparse_moe.experts.2.w3"),
    ],
)
def test_the_names_of_files(family, gate, up):
    made = make(family).model
    own = made.state_dict()
    from transformers.core_model_loading import revert_weight_conversion

    files = dict.fromkeys(revert_weight_conversion(made, own), FILE)
    pieces = pieces_of_weights(made, files)
    assert set(own) <= pieces.keys()
    places = {piece.name: piece.place for piece in pieces["model.layers.1.mlp.experts.gate_up_proj"]}
    assert len(places) == 8
    assert places[f"model.layers.1.{gate}.weight"] == (2, 0, 2) and places[f"model.layers.1.{up}.weight"] == (2, 1, 2)
    assert [piece.place for piece in pieces["model.norm.weight"]] == [None]
    assert made._weight_conversions


def test_a_dense_model_has_the_names_of_its_files():
    made = make("Llama").model
    files = dict.fromkeys(made.state_dict(), FILE)
    assert pieces_of_weights(made, files) == {name: [FilePiece(name, FILE)] for name in files}
    assert not getattr(made, "_weight_conversions", None)
