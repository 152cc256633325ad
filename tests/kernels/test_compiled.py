"""Kernels are compiled once, found again, and left out where a machine can't have them."""

import os
from functools import cache
from inspect import unwrap

import pytest

from proxima.data import UserError
from proxima.kernels import compiled
from proxima.system import machine

SOURCE = 'extern "C" int answer() { return ANSWER; }'
needs_kernels = pytest.mark.skipif(compiled.unavailable() is not None, reason=f"{compiled.unavailable()}")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is known or compiled yet; what other tests have compiled stays known to them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in machine.CEILINGS:
        monkeypatch.delenv(name, raising=False)
    for name in ("unavailable", "library", "_announce"):
        monkeypatch.setattr(compiled, name, cache(unwrap(getattr(compiled, name))))


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "one.cpp"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def held(source):
    """The library of `source`, which is not loaded."""
    compiled.library(source, "-DANSWER=1")
    compiled.library.cache_clear()
    (file,) = compiled.folder().glob("*.so")
    return file


@pytest.mark.slow
@needs_kernels
def test_a_library_is_compiled_once_for_its_text_and_macros(source, capfd):
    assert compiled.library(source, "-DANSWER=42").answer() == 42
    assert compiled.library(source, "-DANSWER=43").answer() == 43
    held = sorted(compiled.folder().glob("*.so"))
    assert capfd.readouterr().err == "compiling C++ for this processor (once, about a second per file)\n"
    times = [file.stat().st_mtime_ns for file in held]
    compiled.library.cache_clear()
    assert compiled.library(source, "-DANSWER=42").answer() == 42
    assert [file.stat().st_mtime_ns for file in sorted(compiled.folder().iterdir())] == times
    source.write_text(SOURCE + "\n")
    compiled.library.cache_clear()
    compiled.library(source, "-DANSWER=42")
    assert len(list(compiled.folder().iterdir())) == 3


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif("avx2" not in machine.processor_flags(), reason="the processor has no vectors to leave out")
def test_a_library_is_compiled_for_what_torch_may_use_of_the_processor(source, monkeypatch):
    """One compiled for the whole processor is neither loaded nor replaced."""
    source.write_text("#ifndef __AVX2__\n#define __AVX2__ 0\n#endif\n" + SOURCE.replace("ANSWER", "__AVX2__"))
    answers = {}
    for capability in ("", "default", ""):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        compiled.library.cache_clear()
        answers[capability] = compiled.library(source).answer()
    assert answers == {"": 1, "default": 0}
    assert len(list(compiled.folder().iterdir())) == 2


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


def rewritten(content):
    """Another file in its place: what this process has loaded is mapped."""

    def damage(held):
        whole = held.read_bytes()
        held.unlink()
        held.write_bytes(content(whole))

    return damage


def linked(held):
    held.rename(held.with_name("elsewhere"))
    held.symlink_to("elsewhere")


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (rewritten(lambda whole: whole[:5000]), "is damaged"),  # to load it would be a SIGBUS
        (rewritten(lambda whole: whole[:4096] + bytes(4096) + whole[8192:]), "is damaged"),
        (rewritten(lambda whole: b""), "is damaged"),
        (lambda held: (held.unlink(), os.mkfifo(held)), "is not a file"),
        (linked, "is not a file"),
        (lambda held: held.chmod(0o664), "can be changed by other users"),
        (lambda held: held.chmod(0o646), "can be changed by other users"),
    ],
)
def test_what_may_not_be_loaded_is_compiled_again_and_one_line_says_so(source, held, capfd, damage, says):
    damage(held)
    capfd.readouterr()
    for _ in range(2):  # what was compiled again is used
        compiled.library.cache_clear()
        assert compiled.library(source, "-DANSWER=1").answer() == 1
    assert capfd.readouterr().err == f"{held} {says}: compiling it again\n"
    assert held.stat().st_mode & 0o777 == 0o644 and not held.is_symlink()


@pytest.mark.slow
@needs_kernels
def test_what_another_user_wrote_is_compiled_again(source, held, monkeypatch, capfd):
    monkeypatch.setattr(compiled.os, "geteuid", lambda: os.getuid() + 1)
    assert compiled.library(source, "-DANSWER=1").answer() == 1
    assert "can be changed by other users: compiling it again\n" in capfd.readouterr().err


@pytest.mark.slow
@needs_kernels
def test_a_library_appears_when_it_is_on_the_disk(source, monkeypatch):
    done = []
    replace, fsync = compiled.Path.replace, os.fsync
    monkeypatch.setattr(compiled.os, "fsync", lambda handle: done.append("fsync") or fsync(handle))
    monkeypatch.setattr(compiled.Path, "replace", lambda path, to: done.append("replace") or replace(path, to))
    compiled.library(source, "-DANSWER=1")
    assert done == ["fsync", "replace", "fsync"]


@pytest.mark.slow
@needs_kernels
def test_a_folder_in_its_place_is_an_error_of_one_line(source, held):
    held.unlink()
    held.mkdir()
    with pytest.raises(UserError, match=r"one-.*\.so can't be stored or loaded; set CXX=none .*Is a directory"):
        compiled.library(source, "-DANSWER=1")


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["always", "when it compiles"])
def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(source, tmp_path, monkeypatch, hangs):
    wrapper = tmp_path / "slow-g++"
    wrapper.write_text(f"#!/bin/sh\n[ $1 = --version ] && [ '{hangs}' != always ] && exit\nsleep 100000 & wait\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setattr(compiled, "SECONDS", 0.5)
    with pytest.raises(UserError, match=r"slow-g\+\+ .* did not end within 0\.5 s; .*set CXX=none"):
        compiled.library(source)
    assert not list(compiled.folder().glob("*/*"))


@needs_kernels
def test_what_can_not_be_loaded_says_why(source, tmp_path, monkeypatch):
    wrapper = tmp_path / "wrapped-g++"
    wrapper.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho >"$2"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(UserError, match=r"one-.*\.so can't be stored or loaded; set CXX=none"):
        compiled.library(source)


@needs_kernels
def test_a_user_without_a_home_has_none(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(compiled.Path, "home", no_home)
    assert compiled.unavailable() == "the user has no home folder; set XDG_CACHE_HOME"


def no_home():
    raise RuntimeError("Could not determine home directory.")
