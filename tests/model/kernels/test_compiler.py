"""Libraries are compiled once, and by whatever changes them."""

import pytest

from proxima.model.kernels.compiler import compiled, find_compiler

SOURCE = 'extern "C" long answer() { return ANSWER; }'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "some.cpp").write_text(SOURCE)
    find_compiler.cache_clear()
    yield tmp_path
    find_compiler.cache_clear()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_compiled_once(folder):
    source = folder / "some.cpp"
    assert compiled(source, ["-DANSWER=4"]).answer() == 4
    assert compiled(source, ["-DANSWER=5"]).answer() == 5
    made = sorted((folder / "cache/proxima/kernels").iterdir())
    assert len(made) == 2
    assert compiled(source, ["-DANSWER=4"]).answer() == 4
    assert sorted((folder / "cache/proxima/kernels").iterdir()) == made
    with pytest.raises(RuntimeError, match=r"(?s)does not compile some\.cpp: .*ANSWER"):
        compiled(source)


def test_switched_off(folder, monkeypatch):
    monkeypatch.setenv("CXX", "none")
    assert find_compiler() is None
    with pytest.raises(RuntimeError, match="no compiler"):
        compiled(folder / "some.cpp")
