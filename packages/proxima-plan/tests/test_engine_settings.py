"""What a plan takes from the settings of an engine: shares, groups, dtypes, and which fields it reads at all."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.data import FieldError
from proxima.engine import ENGINES
from proxima.engine.serve.launch import Serve
from proxima_plan.devices import GIB, read_devices
from proxima_plan.engine_settings import _size, engine_settings, kept_arguments
from proxima_plan.forecast import plan_recipe
from tests.cli.conftest import here, proxima, recipe

__all__ = ["here", "proxima", "recipe"]  # fixtures

LAYOUT = ("qwen3_30b_cppo", "@layouts/qwen3_30b_8xH100")
SHARE = "engine.serve.gpu_memory"
TWO = ["engine=vllm", "placement={kind: ray, ranks: 8, engines: 4, colocate: true}"]


def plan(*words, recipe="qwen3_30b_cppo", devices="8xH100-80G"):
    return plan_recipe(resolve(recipe, words, root=None), read_devices(devices)[0])


def arguments(*words):
    return f"engine.serve.arguments={json.dumps(words)}"


def test_a_share_with_which_a_server_does_not_start_is_refused(proxima):
    """Too small for its weights, or too large beside the ranks: the figures, the field, and a value that fits."""
    for share, figure in ((0.2, "15.8 GiB of 79.2; it needs 18.1 GiB: weights 14.22"), (0.97, "76.8 GiB of 79.2; ")):
        code, out, _ = proxima("plan", *LAYOUT, "--devices", "8xH100-80G", f"{SHARE}={share}")
        assert code == 1 and f"{SHARE}={share} gives a server {figure}" in out
        (words,) = re.findall(r"^step     none: a server does not start, but would with (\S+)$", out, re.M)
        assert proxima("plan", *LAYOUT, "--devices", "8xH100-80G", words)[0] == 0
        larger = f"{SHARE}={float(words.partition('=')[2]) + 0.06:g}"
        assert proxima("plan", *LAYOUT, "--devices", "8xH100-80G", larger)[0] == 1, (
            "it leaves a twentieth of the device"
        )


def test_the_default_share_is_that_of_the_server_that_is_started():
    started = plan(*TWO, arguments("--tensor-parallel-size", "2")).memory
    assert (started.share, started.server) == (0.4, int(0.4 * int(79.2 * GIB)))
    beside = "placement={kind: ray, ranks: 8}"
    served = plan("engine=vllm", beside, devices="9xH100-80G").memory
    assert (served.share, served.server) == (0.9, int(0.9 * int(79.2 * GIB))) and served.starts
    config = resolve("qwen3_30b_cppo", ["engine=sglang"], root=None).config
    assert engine_settings(config).static and engine_settings(config).share == 0.88
    argument = plan(*TWO, arguments("-tp", "2", "--gpu_memory_utilization=0.7")).memory
    assert argument.share == 0.7


def test_what_a_server_needs_to_start():
    """Weights of 30,532,122,624 parameters on 2 devices, driver, the step that it tries, one sequence of 18,432."""
    memory = plan(*TWO, f"{SHARE}=0.4", arguments("--tensor-parallel-size", "2"), devices="8xH200-141G").memory
    weights = 30_532_122_624
    assert memory.engine["weights"] == weights
    sampling = 10 * 1024 * 151_936
    row = 2 * 2 * 48 * 4 * 128 * 18_432 // 2
    assert memory.least == pytest.approx(weights + GIB + sampling + GIB + row, rel=1e-6)
    assert memory.starts and memory.fits
    held = sum(memory.trainer[kind] for kind in ("weights", "gradients", "optimizer"))
    assert memory.room == pytest.approx(memory.memory - GIB - 1.05 * held, rel=1e-6)


def test_a_server_uses_the_devices_that_its_arguments_say():
    whole = plan(*TWO, f"{SHARE}=0.9")
    assert whole.layout.engine_split == 1 and whole.memory.engine["weights"] == 2 * 30_532_122_624
    assert not whole.memory.fits
    with pytest.raises(
        FieldError, match="over 4 devices, and the 8 ranks / placement.engines=4 give it 2; set placement.engines=2"
    ):
        plan(*TWO, arguments("--tensor-parallel-size=4"))
    copies = plan(*TWO, f"{SHARE}=0.8", arguments("--data-parallel-size", "2"))
    assert (copies.layout.engines, copies.layout.engine_devices) == (8, 1)
    with pytest.raises(FieldError, match="must be options of the server"):
        plan(*TWO, arguments("--tensor-parallel-size", "two"))


def test_dtypes_quantisation_and_limits_of_a_server():
    base = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2"))
    fp8 = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2"), "engine.quantization=fp8")
    ends = 2 * 151_936 * 2048  # embeddings and head stay as they are
    assert fp8.memory.engine["weights"] == pytest.approx((30_532_122_624 + ends) / 2, rel=1e-3)
    cached = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2", "--kv-cache-dtype", "fp8"))
    per_slot = [each.memory.engine["KV cache"] / each.memory.slots for each in (base, cached)]
    assert per_slot[0] == pytest.approx(2 * per_slot[1], rel=1e-6)
    assert cached.seconds < base.seconds
    few = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2", "--max-num-seqs", "32"))
    assert few.memory.slots == 32 and few.seconds > base.seconds
    assert plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2"), "engine.max_running=16").memory.slots == 16
    wide = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2"), "engine.serve.dtype=float32")
    assert wide.memory.engine["weights"] == 2 * base.memory.engine["weights"]
    eager = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2", "--enforce-eager"))
    assert base.memory.least - eager.memory.least == GIB and eager.seconds > base.seconds
    longer = plan(*TWO, f"{SHARE}=0.8", arguments("-tp", "2", "--max-model-len", "36864"))
    assert longer.memory.least - base.memory.least == 2 * 48 * 4 * 128 * 18_432
    a100 = plan(*TWO, f"{SHARE}=0.6", arguments("-tp", "2"), devices="8xA100-80G")
    assert a100.memory.slots <= 256


def test_a_smaller_share_runs_fewer_completions_and_is_slower():
    small, large = (plan(*TWO, f"{SHARE}={share}", arguments("-tp", "2")) for share in (0.5, 0.7))
    assert 0 < small.memory.slots < large.memory.slots and small.seconds > large.seconds


def test_servers_beside_a_local_run_keep_their_memory():
    """They do not sleep, and all are on the first device."""
    words = ["engine=vllm", f"{SHARE}=0.3", "engine.serve.replicas=2", "train.tokens_per_micro_batch=2048"]
    two = plan(*words, recipe="gsm8k", devices="H200-141G")
    trainer = GIB + 1.05 * sum(two.memory.trainer.values())
    assert two.memory.needed == pytest.approx(trainer + 2 * two.memory.server, rel=1e-6) and not two.layout.devices > 1
    apart = plan(*words, "engine.serve.variables={CUDA_VISIBLE_DEVICES: '1'}", recipe="gsm8k", devices="H200-141G")
    assert apart.memory.needed < two.memory.needed


def test_the_cache_of_an_engine_in_the_process_has_all_its_slots():
    """Rows of 64 tokens' multiples for 8 slots' multiples, beside the trainer; of float32 twice the bytes."""
    half = plan("engine.slots=60", recipe="gsm8k", devices="B200-180G")
    row = 2 * 2 * 28 * 2 * 128 * 64 * -(-(half.load.prompt + half.load.longest) // 64)
    assert half.memory.engine["KV cache"] == 64 * row and half.memory.slots == 60
    full = plan("engine.slots=60", "engine.dtype=float32", recipe="gsm8k", devices="B200-180G")
    assert sum(full.memory.engine.values()) == 2 * sum(half.memory.engine.values())
    assert full.memory.needed - half.memory.needed == sum(half.memory.engine.values())


def test_slots_with_which_it_fits_are_named(proxima):
    code, out, _ = proxima("plan", "gsm8k", "--devices", "H200-141G", "engine.slots=4096")
    (words,) = re.findall(r"^step     none: it does not fit, but with (engine.slots=\d+)$", out, re.M)
    assert code == 1 and proxima("plan", "gsm8k", "--devices", "H200-141G", words)[0] == 0
    _, out, _ = proxima("plan", "gsm8k", "--devices", "H200-141G", words)
    used, device = map(float, re.findall(r"^memory   fits: ([\d.]+) GiB of ([\d.]+) on", out, re.M)[0])
    assert 0.9 * device < used <= 0.95 * device, "it leaves a twentieth of the device"


def test_arguments_that_are_not_modelled_are_named(proxima):
    words = arguments("-tp", "4", "--speculative-config", "{}", "--seed", "3")
    _, out, _ = proxima("plan", *LAYOUT, "--devices", "8xH100-80G", words)
    assert "note     engine.serve.arguments: --speculative-config not in the plan\n" in out
    assert (
        "note     the servers at engine.url are taken to run with --gpu-memory-utilization=0.9"
        in (proxima("plan", "gsm8k", "engine=vllm", "--devices", "H200-141G")[1])
    )


def test_a_proposal_keeps_other_arguments_and_says_a_share(proxima):
    mine = ("engine=vllm", arguments("--kv-cache-dtype", "fp8", "-tp", "8"))
    code, out, _ = proxima("plan", "qwen3_4b_grpo", *mine, "--devices", "8xH100-80G", "--propose")
    proposed = [shlex.split(line) for line in out.splitlines() if line.startswith("     'placement=")]
    assert code == 0 and proposed
    for words in proposed:
        (given,) = (word for word in words if word.startswith("engine.serve.arguments="))
        assert json.loads(given.partition("=")[2])[:2] == ["--kv-cache-dtype", "fp8"]
        assert 0.1 < float(next(word for word in words if word.startswith(SHARE)).partition("=")[2]) <= 0.9
        assert proxima("plan", "qwen3_4b_grpo", "engine=vllm", *words, "--devices", "8xH100-80G")[0] == 0
    assert kept_arguments(["-tp", "2", "--seed=3", "--gpu_memory_utilization", "0.3"]) == ["--seed=3"]


def test_every_field_of_an_engine_is_in_the_table_of_the_page():
    page = (Path(__file__).resolve().parents[3] / "docs/plan.md").read_text(encoding="utf-8")
    table = page.partition("| setting | in the plan |")[2].partition("\n\n")[0]
    said = set(re.findall(r"`((?:serve\.)?[a-z_]+)`", "".join(row.split(" | ")[0] for row in table.splitlines())))
    there = {f"serve.{field.name}" for field in fields(Serve)}
    for kind in ("local", "local_process", "vllm", "sglang"):
        there |= {field.name for field in fields(ENGINES[kind])}
    assert said == there


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("8192", 8192), ("16k", 16_000), ("2m", 2_000_000), ("1g", 10**9), ("16K", 16_384), ("2M", 2**21)),
        *(("1G", 2**30), ("1.5k", 1500), ("-1", 0), ("auto", 0)),
    ],
)
def test_sizes_as_vllm_reads_them(text, size):
    assert _size(text) == size
