"""Kernels are compiled once, found again, and left out where a machine can't have them."""

from functools import cache
from inspect import unwrap

import pytest

from proxima.data import UserError
from proxima.kernels import compiled

SOURCE = 'extern "C" int answer() { return ANSWER; }'
needs_kernels = pytest.mark.skipif(compiled.unavailable() is not None, reason=f"{compiled.unavailable()}")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is known or compiled yet; what other tests have compiled stays known to them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("unavailable", "library", "_announce"):
        monkeypatch.setattr(compiled, name, cache(unwrap(getattr(compiled, name))))


@needs_kernels
def test_a_library_is_compiled_once_for_its_text_and_macros(tmp_path, capfd):
    source = tmp_path / "one.cpp"
    source.write_text(SOURCE)
    assert compiled.library(source, "-DANSWER=42").answer() == 42
    assert compiled.library(source, "-DANSWER=43").answer() == 43
    held = sorted(compiled.folder().glob("*.so"))
    assert capfd.readouterr().err == "compiling C++ for this processor, once: about a second a file\n"
    times = [file.stat().st_mtime_ns for file in held]
    compiled.library.cache_clear()
    assert compiled.library(source, "-DANSWER=42").answer() == 42
    assert [file.stat().st_mtime_ns for file in sorted(compiled.folder().iterdir())] == times
    source.write_text(SOURCE + "\n")
    compiled.library.cache_clear()
    compiled.library(source, "-DANSWER=42")
    assert len(list(compiled.folder().iterdir())) == 3


@needs_kernels
def test_what_does_not_compile_says_why(tmp_path):
    source = tmp_path / "bad.cpp"
    source.write_text("not C++")
    with pytest.raises(UserError, match=r"(?s)can.t compile bad.cpp; set CXX=none .*error"):
        compiled.library(source)


def test_why_a_machine_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "none")
    assert compiled.unavailable() == "CXX=none" and compiled.kernels_in_words() == "eager torch (CXX=none)"
    monkeypatch.setenv("CXX", "nowhere-g++")
    compiled.unavailable.cache_clear()
    assert compiled.unavailable() == "no C++ compiler nowhere-g++"
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\necho '#define __GNUC__ 11'\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(compiled, "processor_flags", lambda: frozenset({compiled.PRODUCTS}))
    compiled.unavailable.cache_clear()
    assert compiled.unavailable() == f"{old} is not GCC 12 or later"
    old.write_text("#!/bin/sh\necho 18.1.3\n[ $1 = -dumpversion ] || echo clang\n")
    compiled.unavailable.cache_clear()
    assert compiled.unavailable() == f"{old} is not GCC 12 or later"
    monkeypatch.setattr(compiled, "processor_flags", frozenset)
    compiled.unavailable.cache_clear()
    monkeypatch.delenv("CXX")
    if compiled.compiler():
        assert compiled.unavailable(compiled.PRODUCTS) == "a processor without avx512_bf16"


@needs_kernels
def test_a_damaged_library_is_compiled_again(tmp_path):
    source = tmp_path / "one.cpp"
    source.write_text(SOURCE)
    compiled.library(source, "-DANSWER=1")
    (held,) = compiled.folder().glob("*.so")
    held.unlink()
    held.write_bytes(b"cut off")
    compiled.library.cache_clear()
    assert compiled.library(source, "-DANSWER=1").answer() == 1


@needs_kernels
def test_what_can_not_be_loaded_says_why(tmp_path, monkeypatch):
    source, wrapper = tmp_path / "one.cpp", tmp_path / "wrapped-g++"
    source.write_text(SOURCE)
    wrapper.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho >"$2"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(UserError, match=r"one-.*\.so can't be loaded; set CXX=none"):
        compiled.library(source)


@needs_kernels
def test_a_user_without_a_home_has_none(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(compiled.Path, "home", no_home)
    assert compiled.unavailable() == "the user has no home folder; set XDG_CACHE_HOME"


def no_home():
    raise RuntimeError("Could not determine home directory.")
