"""What decoders share: the limits of products are tried once on a machine, and kept."""

import pytest
import torch

from proxima.engine.local import decoder

SHAPE = (16, 24, torch.float32, False, 1)


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """The shapes that are tried from now on; each call of `row_limits` is that of another process."""
    shapes = []

    def limits(height, width, *rest, transposed):
        shapes.append((height, width, transposed))
        return 8, 512

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decoder, "find_row_limits", limits)
    monkeypatch.setattr(decoder, "row_limits", decoder.row_limits.__wrapped__)
    monkeypatch.setattr(decoder, "_limits_folder", decoder._limits_folder.__wrapped__)
    return shapes


def test_limits_are_kept_between_processes(tried):
    assert [decoder.row_limits(*SHAPE) for _ in range(2)] == [(8, 512)] * 2
    assert decoder.row_limits(*SHAPE, transposed=True) == (8, 512)
    assert tried == [(16, 24, False), (16, 24, True)]


def test_products_on_a_cpu_have_the_limits_of_their_shape(tried):
    """A GPU's have none."""
    limits = [decoder.Matrix(torch.empty(16, 24, device=place), None, torch.float32).rows for place in ("cpu", "meta")]
    assert limits == [(8, 512), (1, 1 << 62)]


def test_other_libraries_and_other_trials_have_a_folder_of_their_own(tried, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    names = [decoder._limits_folder()]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    names.append(decoder._limits_folder())
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.append(decoder._limits_folder())
    assert len({*names}) == 3


@pytest.mark.parametrize("text", ["", "64", "64 six"])
def test_a_damaged_file_is_written_anew(tried, text):
    assert decoder.row_limits(*SHAPE) == (8, 512)
    [file] = decoder._limits_folder().iterdir()
    file.write_text(text)
    assert [decoder.row_limits(*SHAPE) for _ in range(2)] == [(8, 512)] * 2
    assert len(tried) == 2 and file.read_text() == "8 512"


def test_a_folder_that_takes_nothing_costs_the_trials_alone(tried, tmp_path):
    (tmp_path / "cache").write_text("")
    assert [decoder.row_limits(*SHAPE) for _ in range(2)] == [(8, 512)] * 2
    assert len(tried) == 2


def test_a_user_without_a_home_pays_the_trials_alone(tried, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(decoder.Path, "home", home)
    assert decoder.row_limits(*SHAPE) == (8, 512)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert decoder.row_limits(*SHAPE) == (8, 512)
    assert len(tried) == 2
