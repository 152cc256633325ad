"""Products on the tiles of AMX against float64."""

import pytest
import torch

from proxima.engine.local.decoder import Matrix, packs_bfloat16
from proxima.kernels.compiled import PRODUCTS, has_tiles, unavailable
from proxima.kernels.decode_step import tile_linear

pytestmark = pytest.mark.skipif(
    bool(unavailable(PRODUCTS)) or not has_tiles() or not packs_bfloat16(), reason="no AMX, or no compiler"
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (96, 160), (320, 64)])
def test_a_product_is_rounded_once(height, width, bias):
    """Row counts around every block, against float64: the nearest bf16, or its neighbour where float32 sums differ."""
    linear = tile_linear()
    assert linear is not None
    torch.manual_seed(height)
    weight, added = torch.randn(height, width).bfloat16(), torch.randn(height) if bias else None
    for rows in (1, 8, 15, 16, 17, 31, 32, 33, 64, 70, 513):
        x = torch.randn(rows, width).bfloat16()
        exact = x.double() @ weight.double().T + (0 if added is None else added)
        out = linear(x, linear.pack([(weight, None)]), added)
        assert out.shape == (rows, height)
        assert (out != exact.bfloat16()).float().mean() < 0.01
        torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("height", [64, 40])  # the second ends within a tile
def test_parts_are_packed_below_one_another_in_their_order(height):
    torch.manual_seed(1)
    first, second = torch.randn(height, 96), torch.randn(160 - height, 96).bfloat16()
    order = torch.randperm(height)
    whole = torch.cat([first[order].bfloat16(), second])
    tiles = whole.view(torch.int32).view(5, 2, 16, 3, 16).permute(0, 3, 1, 4, 2).contiguous()
    expected = tiles.view(torch.bfloat16).unflatten(-1, (16, 2))
    out = torch.empty_like(expected)
    linear = tile_linear()
    assert torch.equal(linear.pack([(first, order), (second, None)]), expected)
    assert torch.equal(linear.pack([(whole, None)], out), expected) and torch.equal(out, expected)


def test_a_new_matrix_takes_the_memory_of_the_one_before():
    torch.manual_seed(2)
    old, new, x = torch.randn(256, 256), torch.randn(256, 256), torch.randn(8, 256).bfloat16()
    before = Matrix(old, None, torch.bfloat16)
    place = before.weight.data_ptr()
    after = Matrix([(new[:128], None), (new[128:], None)], None, torch.bfloat16, before)
    assert after.weight.data_ptr() == place
    assert torch.equal(after(x), Matrix(new, None, torch.bfloat16)(x))


def test_a_rows_bits_depend_on_that_row_alone():
    """On sums whose terms cancel, so that the result is their rounding errors."""
    torch.manual_seed(0)
    half, weight = torch.randn(600, 256), torch.randn(256, 256).bfloat16()
    x = torch.cat([half, -half], 1).bfloat16()
    matrix = Matrix(torch.cat([weight, weight], 1), None, torch.bfloat16)
    assert matrix.tiles is not None
    whole = matrix(x)
    assert (whole != 0).float().mean() > 0.1
    for rows in (1, 8, 24, 40, 513):
        assert torch.equal(matrix(x[-rows:]), whole[-rows:])


def test_unaligned_weights_are_left_to_onednn():
    for shape in ((32, 72), (300, 512)):
        assert Matrix(torch.randn(shape), None, torch.bfloat16).tiles is None
    assert Matrix(torch.randn(32, 64), None, torch.bfloat16).tiles is not None
    assert Matrix(torch.randn(512, 512), None, torch.float32).tiles is None
