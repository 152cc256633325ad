"""On lesser processors, emulated here, `auto` takes the dtype in which a step takes the least CPU time."""

import json
import os
import platform
import subprocess
import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import HERE
from benchmarks.processors import run
from benchmarks.processors.emulated import PROCESSORS, WHOLE, environment, why_not
from proxima.model.demo_model import DEMO_MODEL
from proxima.system import machine
from tests.tiny import DECODER, drawn, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the processors that are emulated are x86-64"
)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
WORST = 1.15  # times the CPU seconds of a step in the best dtype
FACTS = """
import json, torch
from proxima.model.precision import dtype_choice
from proxima.system.machine import processor_flags
wider = sorted(flag for flag in processor_flags() if flag.startswith(("avx", "amx", "fma")))
print(json.dumps([torch.backends.cpu.get_cpu_capability(), wider, dtype_choice("cpu").dtype]))
"""


@pytest.mark.slow
def test_auto_takes_float32_where_torch_and_the_kernels_have_no_vectors():
    """The variables reach all three: torch, what is known of the processor, and the choice."""
    done = subprocess.run(
        [sys.executable, "-c", FACTS], env=environment("generic", os.environ), check=True, capture_output=True
    )
    assert json.loads(done.stdout) == ["DEFAULT", [], "float32"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("sse4_1 avx avx2", {WHOLE, "AVX2", "generic"}),
        ("sse4_1 avx avx2 avx512f avx512_bf16", set(PROCESSORS)),
        ("sse4_1", {WHOLE, "generic"}),
    ],
)
def test_a_processor_is_no_better_one(monkeypatch, tmp_path, flags, expected):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    for name in machine.CEILINGS:
        monkeypatch.delenv(name, raising=False)
    assert {name for name in PROCESSORS if why_not(name) is None} == expected


@pytest.mark.parametrize(
    ("auto", "of_auto", "bfloat16", "float32", "ratio"),
    [
        ("float32", 6.0, 102.0, 5.0, 1.0),
        ("bfloat16", 100.0, 102.0, 5.0, 20.0),
        ("float32", 5.0, float("inf"), 6.0, 1.0),  # bfloat16 was stopped
        ("bfloat16 and float32", 7.0, 9.0, 5.0, 1.4),
    ],
)
def test_the_ratio_is_that_of_the_dtype_which_auto_takes(monkeypatch, auto, of_auto, bfloat16, float32, ratio):
    """Runs with `auto` are repeats of those with its dtype: that one of them was disturbed does not count."""
    seconds = {"bfloat16": bfloat16, "float32": float32}

    def run_on(name, words, threads, longest):
        if longest is None:
            return auto, of_auto
        dtype = words[-1].partition("=")[2]
        return dtype, seconds[dtype]

    monkeypatch.setattr(run, "run_on", run_on)
    assert run.step_on("generic", [], steps=1, repeats=2, threads=1)["ratio"] == ratio


@pytest.mark.campaign(
    "tests/benchmarks/test_processors.py::test_auto_takes_float32_where_torch_and_the_kernels_have_no_vectors"
)
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_a_step_takes_no_more_than_in_the_best_dtype(name, model, tmp_path):
    """Two steps of a tiny quickstart, or the first of the demo's, in CPU time: other work on the machine counts
    little, and as much for either dtype."""
    if (reason := why_not(name)) is not None:
        pytest.skip(reason)
    folder, steps = HERE.parent / DEMO_MODEL, 1
    if model == "tiny":
        folder, steps = tmp_path, 2
        drawn(LlamaForCausalLM, LlamaConfig(**DECODER | SIZES), seed=0).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    elif not (folder / "config.json").exists():
        pytest.skip(f"{DEMO_MODEL} is not here: make demo downloads it")
    words = [f"model.path={folder}", "train.prompts_per_step=2"]
    measured = run.step_on(name, words, steps, repeats=1, threads=1)
    assert measured["ratio"] <= WORST, measured
