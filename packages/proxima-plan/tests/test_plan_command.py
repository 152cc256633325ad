"""`proxima plan` as a user types it: a step here, on devices that are not here, and simulated."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from proxima.data import UserError
from proxima.reward.math.symbolic import Math
from tests.cli.conftest import here, proxima, recipe, warm_rehearsals

__all__ = ["here", "proxima", "recipe", "warm_rehearsals"]  # fixtures

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
RAY = "placement={kind: ray, ranks: 32, engines: 16, colocate: true, expert_parallel: 8}"
SERVE = 'engine.serve={gpu_memory: 0.6, arguments: [--tensor-parallel-size, "2"]}'


def test_stages_memory_and_what_binds(proxima):
    words = (RECIPES / "qwen3_30b_cppo.yaml", "engine=vllm", SERVE, RAY)
    code, out, err = proxima("plan", *words, "--devices", "32xH100-80G", "--mean-length", "3000")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("train    cppo: Qwen/Qwen3-30B-A3B-Base")
    assert "layout   32 ranks (full, expert 8), 16 engines of 2 devices on the same devices, on 32xH100-80G" in lines
    assert any(line.startswith("step     about ") and line.endswith(" binds") for line in lines)
    stages = re.findall(r"^         (\w+) +[\d.,]+ s   \w", out, re.M)
    assert stages == ["generate", "update", "publish", "rest"]
    assert "completions of 3,000 tokens on average" in out and "largest micro-batch" in out
    assert "by the formula" in out and "\nnetwork  sent by a rank in each step: expert " in out


@pytest.mark.slow
def test_this_machine_is_measured(proxima, recipe, monkeypatch):
    monkeypatch.setattr("proxima_plan.devices.gemm_rate", lambda *_: 1e11)
    code, out, err = proxima("plan", recipe())
    assert (code, err) == (0, "") and "layout   1 rank, which generates too, on this machine\n" in out
    assert "measured here, for each rank: 100 GFLOP/s in matrix products, " in out
    assert " for each rank, by the formula\n" in out and "and 1 GiB of Python and torch, " in out and "CUDA" not in out
    assert re.search(r"^run      about .* for 2 steps, without evaluations$", out, re.M)
    code, out, _ = proxima("plan", recipe(), "placement=torchrun", "--json")
    plan = json.loads(out)
    assert plan["devices"]["count"] == 2 and plan["devices"]["kind"]["bf16"] == pytest.approx(0.05)


def test_a_plan_needs_no_package_of_the_run(proxima, monkeypatch):
    real = importlib.util.find_spec
    absent = {"ray", "math_verify", "peft", "torchao"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else real(name, *a))
    words = (RECIPES / "qwen3_30b_cppo.yaml", RAY, "engine=vllm", SERVE)
    assert proxima("plan", *words, "--devices", "32xH100-80G")[0] == 0
    code, out, _ = proxima("explain", *words)
    assert code == 0 and "placement.kind=ray" in out and "needs the package ray" in out
    code, _, err = proxima("train", RECIPES / "quickstart.yaml", "placement=ray")
    assert code == 2 and "needs the package ray: pip install 'proxima-rl[ray]'" in err
    with pytest.raises(UserError, match="needs the package math-verify"):
        Math().check()


def test_devices_that_stand_idle(proxima):
    words = (RECIPES / "qwen3_4b_cppo.yaml", "@layouts/qwen3_4b_8xH100")
    assert "\nidle     4 of 12 devices: the layout takes 8" in proxima("plan", *words, "--devices", "12xH100-80G")[1]
    assert "idle" not in proxima("plan", *words, "--devices", "8xH100-80G")[1]


@pytest.mark.slow
def test_what_does_not_fit_has_no_speed(proxima):
    words = ("plan", RECIPES / "dapo_32b.yaml", "--devices", "L4-24G")
    code, out, _ = proxima(*words)
    none = "step     none: it does not fit; --propose searches for layouts that do\nmemory   does not fit: "
    assert code == 1 and none in out and "tok/s" not in out and "largest micro-batch none: " in out
    plan = json.loads(proxima(*words, "--json")[1])
    assert plan["seconds"] is plan["tokens_per_second_per_device"] is None


def test_a_micro_batch_with_which_it_fits(proxima):
    words = ("plan", RECIPES / "gsm8k_grpo_sdp.yaml", "--devices", "8xA100-40G")
    code, out, _ = proxima(*words)
    match = re.search(r"^step     none: it does not fit, but with (train.tokens_per_micro_batch=\d+)$", out, re.M)
    assert code == 1 and match is not None
    code, out, _ = proxima(*words, match[1])
    assert code == 0 and "memory   fits: " in out


def test_proposals_are_words_to_paste(proxima):
    code, out, _ = proxima("plan", RECIPES / "qwen3_4b_grpo.yaml", "--devices", "8xH100-80G", "--propose")
    assert code == 0
    assert out.count("'placement={kind: ray, ranks: ") >= 2 and "tok/s a device" in out
    assert "runtime.max_lag=1" in out.splitlines()[-1] or "runtime.max_lag" not in out


@pytest.mark.slow
def test_exact_memory_is_counted(proxima, recipe, warm_rehearsals):
    code, out, _ = proxima("plan", recipe(), "--devices", "H100-80G", "--exact")
    assert (
        code == 0 and "on a device, by the rehearsal\n" in out and "\nexact    0.00 GiB of a rank, counted in " in out
    )
    assert "by the formula " in out and "the host waits for the device: copy to the host 1, item " in out


@pytest.mark.slow
def test_a_plan_downloads_no_model(proxima, here, warm_rehearsals):
    words, model = ("quickstart", "--devices", "H100-80G", "--exact"), "models/smollm2-135m-instruct"
    reason = f"model.path='{model}' does not exist: a path is relative to the current folder"
    remedy = "give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B"
    assert proxima("plan", *words) == (2, "", f"error: {reason}; {remedy}\n")


@pytest.mark.slow
def test_a_model_too_large_for_the_device(proxima, here, warm_rehearsals):
    """A layer of Qwen3-4B with a wide MLP, in the recipe of the whole: 1.1e9 weights, four times in float32."""
    shape = {"hidden_size": 2560, "intermediate_size": 80_000, "num_hidden_layers": 1, "num_attention_heads": 32}
    config = Qwen3Config(vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=True, **shape)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(here / "model")
    words = ("model.path=model", "sampling.max_tokens=1024", "train.tokens_per_micro_batch=2048", "--json")
    few = ("train.prompts_per_step=1", "train.completions_per_prompt=2", "train.updates_per_step=1")
    code, out, _ = proxima("plan", RECIPES / "qwen3_4b_grpo.yaml", *words, *few, "--devices", "L4-24G", "--exact")
    memory = json.loads(out)["memory"]
    weights = (151936 * 2560 + 2560 * 128 * (32 + 2 * 8) + 32 * 128 * 2560 + 3 * 2560 * 80_000) * 4
    assert memory["source"] == "rehearsal" and memory["trainer"]["weights"] == pytest.approx(weights, rel=1e-3)
    assert memory["trainer"]["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert code == 1 and memory["needed"] > memory["memory"]


SMALL = ("model.path=Qwen/Qwen2.5-7B", "model.max_length=1000", "sampling.max_tokens=100", "train.steps=2")


@pytest.mark.slow
def test_lags_as_a_table_and_as_json(proxima, recipe):
    words = (recipe(), *SMALL, "engine=local_process", "--devices", "H200-141G", "--lag", "0,1,2")
    code, out, err = proxima("plan", *words)
    head, *rows = out.splitlines()[:6]
    assert (code, err) == (0, "") and head.split()[:3] == ["lag", "concurrent", "tok/s"]
    assert [tuple(row.split()[:2]) for row in rows] == [("0", "sync"), ("1", "2"), ("1", "4"), ("2", "2"), ("2", "4")]
    assert out.endswith("2 simulated steps each, on 1xH200-141G\n")
    output = json.loads(proxima("plan", *words, "--json")[1])
    first = output["cells"][0]
    assert (first["lag"], first["concurrent"], first["speed_up"]) == (0, None, 1.0)
    figures = {"tokens_per_second", "steps_per_hour", "idle_trainer", "idle_engine", "mean_lag", "max_lag", "evicted"}
    assert figures < {*first}


@pytest.mark.slow
def test_numbers_of_devices_as_a_table_and_as_json(proxima, recipe):
    words = (recipe(), *SMALL, "--devices", "1,8-16xH20-96G")
    code, out, err = proxima("plan", *words)
    head, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["devices", "run", "engines", "tok/s", "per", "device", "step", "s", "binds"]
    rows = [line.split() for line in lines[:6]]
    assert [(row[0], row[1]) for row in rows] == [(n, run) for n in ("1", "8", "16") for run in ("sync", "async")]
    assert "needs" in lines[0] and "GiB a device, which has 95" in lines[0]
    assert lines[7].startswith("synchronous: ") and lines[8].startswith("asynchronous: ")
    output = json.loads(proxima("plan", *words, "--lag", "2", "--json")[1])
    sync, beside = output["runs"][1]["synchronous"], output["runs"][1]["asynchronous"]
    assert (sync["lag"], beside["lag"]) == (0, 2) and len(output["summary"]) == 2
    assert sync["layout"]["colocated"] and not beside["layout"]["colocated"]
    assert sync["tokens_per_second_per_device"] == pytest.approx(sync["tokens_per_second"] / 8)
