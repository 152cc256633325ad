"""What a machine says of itself, and what is known of one that says nothing."""

from pathlib import Path

import pytest
import torch

import proxima
from proxima.system import machine
from proxima.system.device_memory import take_peak_memory


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "CPUINFO", file)
    return file


def test_the_first_core_speaks_for_all(cpuinfo):
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nflags\t\t: fpu avx512_bf16\n\nflags\t: other\n")
    assert machine.processor_name() == "Some CPU: 2 GHz"
    assert machine.processor_flags() == {"fpu", "avx512_bf16"}


SIMPLE = {"sse4_1", "bmi2"}
AVX2 = {"avx", "avx2", "avx_vnni", "fma", "f16c", "vaes"}
AVX512 = {"avx512f", "avx512bw", "avx512_vnni"}
FLAGS = SIMPLE | AVX2 | AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("aten", "onednn", "left"),
    [
        (None, None, FLAGS),
        ("avx512", "AVX512_CORE_AMX", FLAGS),
        ("unheard", "of", FLAGS),
        (None, "AVX512_CORE_BF16", FLAGS - {"amx_tile", "amx_bf16"}),
        (None, "avx512_core", SIMPLE | AVX2 | AVX512),
        ("avx512", "AVX2", SIMPLE | AVX2),
        ("avx2", "ALL", SIMPLE | AVX2),
        ("default", None, SIMPLE),
        ("avx2", "SSE41", SIMPLE),
    ],
)
def test_what_torch_may_not_use_is_not_there(cpuinfo, monkeypatch, aten, onednn, left):
    """Of the two variables the narrower one counts."""
    cpuinfo.write_text(f"flags\t\t: {' '.join(sorted(FLAGS))}\n")
    for name, value in (("ATEN_CPU_CAPABILITY", aten), ("ONEDNN_MAX_CPU_ISA", onednn)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert machine.processor_flags() == left
    assert machine.withheld_flags() == FLAGS - left


def test_a_compiler_may_be_a_command(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", {"ccache": "/bin/ccache", "g++": "/bin/g++"}.get)
    commands = {"ccache g++ -m64": ("/bin/ccache", "g++", "-m64"), "": ("/bin/g++",), " ": (), "none": ()}
    for given, expected in commands.items():
        monkeypatch.setenv("CXX", given)
        assert machine.compiler() == expected


def test_a_system_without_the_file(cpuinfo, monkeypatch):
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    assert machine.processor_name() == "arm64" and machine.processor_flags() == frozenset()


def test_the_unit_of_the_peak_is_that_of_the_system(monkeypatch):
    """A process with Python in it has more than 2 MiB and less than a TiB; `ru_maxrss` counts KiB, on macOS bytes."""
    peak = machine.peak_memory_bytes()
    assert 1 << 21 < peak < 1 << 40
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.peak_memory_bytes() < peak / 500


def test_the_peak_of_a_gpu_begins_anew_when_it_is_taken(monkeypatch):
    peak = {"allocated": 3, "reserved": 5}
    for name in peak:
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda device, name=name: peak[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(allocated=1, reserved=4))
    gpu = torch.device("cuda")
    assert [take_peak_memory(gpu), take_peak_memory(gpu)] == [(3, 5), (1, 4)]
    assert take_peak_memory(torch.device("cpu")) is None


def test_only_the_affinity_says_how_many_cores_there_are():
    """A container or a batch system gives fewer than `os.cpu_count` has."""
    sources = Path(proxima.__file__).parent.rglob("*.py")
    assert [file.name for file in sources if "cpu_count" in file.read_text(encoding="utf-8")] == ["machine.py"]


@pytest.mark.parametrize(
    ("asked", "ranks", "of_openmp", "threads"),
    [
        (0, None, "1", 1),  # a single process: what torch has taken
        (0, "4", "1", 3),  # torchrun's and Ray's 1 is nobody's choice
        (0, "4", None, 3),
        (0, "16", "1", 1),
        (0, "4", "2", 1),  # somebody's: torch has read it
        (5, "4", "1", 5),
    ],
)
def test_the_ranks_of_a_machine_divide_its_cores(asked, ranks, of_openmp, threads, monkeypatch):
    taken = []
    monkeypatch.setattr(machine, "usable_cores", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for name, value in (("LOCAL_WORLD_SIZE", ranks), ("OMP_NUM_THREADS", of_openmp)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    machine.set_compute_threads(asked)
    assert taken == [threads]
