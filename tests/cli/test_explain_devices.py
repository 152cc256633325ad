"""`proxima explain --devices`: a step on devices that are not here."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from proxima.data import UserError
from proxima.reward import Math

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RAY = "placement={kind: ray, ranks: 32, engines: 16, colocate: true, expert_parallel: 8}"


def test_stages_memory_and_what_binds(proxima):
    words = (RECIPES / "qwen3_30b_cppo.yaml", "engine=vllm", RAY)
    code, out, err = proxima("explain", *words, "--devices", "32xH100-80G", "--mean-length", "3000")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("train    cppo: Qwen/Qwen3-30B-A3B-Base")
    assert "layout   32 ranks (full, expert 8), 16 engines of 2 devices on the same devices, on 32xH100-80G" in lines
    assert any(line.startswith("step     about ") and line.endswith(" binds") for line in lines)
    stages = [line.split()[0] for line in lines if line.startswith("         ") and " s " in line]
    assert stages == ["generate", "update", "publish", "else"]
    assert "completions of 3,000 tokens on average" in out and "largest micro-batch" in out
    assert "by the formula" in out and "expert " in lines[-1]


def test_a_plan_needs_no_package_of_the_run(proxima, monkeypatch):
    real = importlib.util.find_spec
    absent = {"ray", "math_verify", "peft", "torchao"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else real(name, *a))
    words = (RECIPES / "qwen3_30b_cppo.yaml", RAY, "engine=vllm")
    assert proxima("explain", *words, "--devices", "32xH100-80G")[0] == 0
    code, out, _ = proxima("explain", *words)
    assert code == 0 and "placement.kind=ray" in out and "needs the package ray" in out
    code, _, err = proxima("train", RECIPES / "quickstart.yaml", "placement=ray")
    assert code == 2 and "needs the package ray: pip install 'proxima-rl[ray]'" in err
    with pytest.raises(UserError, match="needs the package math-verify"):
        Math().check()


def test_devices_that_stand_idle(proxima):
    words = (RECIPES / "qwen3_4b_cppo.yaml", "@layouts/qwen3_4b_8xH100")
    assert "\nidle     4 of 12 devices: the layout takes 8" in proxima("explain", *words, "--devices", "12xH100-80G")[1]
    assert "idle" not in proxima("explain", *words, "--devices", "8xH100-80G")[1]


def test_what_does_not_fit_has_no_speed(proxima):
    words = ("explain", RECIPES / "dapo_32b.yaml", "--devices", "L4-24G")
    code, out, _ = proxima(*words)
    none = "step     none: it does not fit; --propose looks for layouts that do\nmemory   does not fit: "
    assert code == 1 and none in out and "tokens/s" not in out and "largest micro-batch none: " in out
    plan = json.loads(proxima(*words, "--json")[1])
    assert plan["seconds"] is plan["tokens_per_second_per_device"] is None


def test_a_micro_batch_with_which_it_fits(proxima):
    words = ("explain", RECIPES / "gsm8k_grpo_sdp.yaml", "--devices", "8xA100-40G")
    code, out, _ = proxima(*words)
    match = re.search(r"^step     none: it does not fit, but with (train.tokens_per_micro_batch=\d+)$", out, re.M)
    assert code == 1 and match is not None
    code, out, _ = proxima(*words, match[1])
    assert code == 0 and "memory   fits: " in out


def test_as_json(proxima, recipe):
    code, out, _ = proxima("explain", recipe(), "--devices", "H100-80G", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["devices"] == "1xH100-80G" and plan["layout"]["in_process"]
    assert plan["seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan["stages"]))


def test_proposals_are_words_to_paste(proxima):
    code, out, _ = proxima("explain", RECIPES / "qwen3_4b_grpo.yaml", "--devices", "8xH100-80G", "--propose")
    assert code == 0
    assert out.count("'placement={kind: ray, ranks: ") >= 2 and "tokens/s a device" in out
    assert "runtime.max_lag=1" in out.splitlines()[-1] or "runtime.max_lag" not in out


def test_a_rehearsal_counts_the_memory(proxima, recipe, warm_rehearsals):
    code, out, _ = proxima("explain", recipe(), "--devices", "H100-80G", "--rehearsed", "--json")
    memory = json.loads(out)["memory"]
    assert code == 0 and memory["source"] == "rehearsal" and memory["trainer"]["weights"] > 0
