"""The note of a resume about what changes the last bits."""

import pytest

from proxima.data import machine
from proxima.runtime.launch import inputs


@pytest.fixture
def note(monkeypatch):
    """note(compiler, dtype): that of the next resume of a run on a CPU."""
    monkeypatch.setattr(inputs, "flat_values", lambda config: config)
    monkeypatch.setattr(inputs.torch.cuda, "is_available", lambda: False)

    class Journal(dict):
        set = dict.__setitem__

    def noted(compiler, dtype="bfloat16"):
        monkeypatch.setattr(machine.shutil, "which", {"g++": "/usr/bin/g++"}.get)
        monkeypatch.setenv("CXX", compiler)
        return inputs.numerics_note(noted.journal, {"model.compute_dtype": dtype, "engine.dtype": dtype})

    noted.journal = Journal()
    return noted


def test_another_compiler_is_noted(note):
    assert note("g++") is note("") is None
    assert note("none").startswith("compiler=None (was /usr/bin/g++): the run continues, but differs in the last bits")
    assert note("none") is None
    assert note("g++").startswith("compiler=/usr/bin/g++ (was None): ")


def test_a_compiler_does_not_concern_a_float32_run(note):
    assert note("g++", "float32") is note("none", "float32") is None


def test_a_journal_that_does_not_name_it(note):
    note("g++")
    del note.journal["numerics"]["compiler"]
    assert note("none") is None
