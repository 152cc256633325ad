"""The note of a resume about what changes the last bits."""

import pytest

from proxima.runtime.launch import inputs


@pytest.fixture
def note(monkeypatch):
    """note(kernels, dtype): that of the next resume of a run on a CPU."""
    monkeypatch.setattr(inputs, "flat_values", lambda config: config)
    monkeypatch.setattr(inputs.torch.cuda, "is_available", lambda: False)

    class Journal(dict):
        set = dict.__setitem__

    journal = Journal()

    def noted(kernels, dtype="bfloat16"):
        monkeypatch.setattr(inputs, "description", lambda: kernels)
        return inputs.numerics_note(journal, {"model.compute_dtype": dtype, "engine.dtype": dtype})

    noted.journal = journal
    return noted


def test_another_compiler_is_noted(note):
    assert note("compiled by g++ 12") is note("compiled by g++ 12") is None
    assert note("eager torch (CXX=none)").startswith("kernels=eager torch (CXX=none) (was compiled by g++ 12): the run")
    assert note("eager torch (CXX=none)") is None


def test_kernels_do_not_concern_a_float32_run(note):
    assert note("compiled by g++ 12", "float32") is note("eager torch (CXX=none)", "float32") is None


def test_a_journal_that_does_not_name_them(note):
    note("compiled by g++ 12")
    del note.journal["numerics"]["kernels"]
    assert note("eager torch (CXX=none)") is None
