"""Which tensors of the files make up a weight."""

from pathlib import Path

import torch

from proxima.model.parallel.slices import FilePiece

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
