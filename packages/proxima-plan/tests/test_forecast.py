import json
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3NextConfig

from proxima.config.resolution import resolve
from proxima.config.sections.model import ModelConfig
from proxima.data import FieldError, UserError
from proxima_plan.devices import device_kinds, nearest_kind, read_devices
from proxima_plan.forecast import attention_path, memory_of_run, plan_recipe

from .plans import changed, planned

LONG = changed(sequences=8192, mean=1900, longest=28_672, updates=16)


def test_the_longest_completion_ends_what_more_devices_bring():
    """As in verl's rows of 32, 64 and 128 devices: from 64 on the longest completion takes most of the step."""
    split = {"each": 4, "context_parallel": 4, "kind": "hybrid"}
    plans = [planned("qwen2.5-math-7b", f"{n}xH20-96G", LONG, engines=n // 4, **split) for n in (32, 64, 128, 256)]
    seconds = [plan.seconds for plan in plans]
    assert seconds[0] > 1.4 * seconds[1] and seconds[2] < 1.35 * seconds[3]
    assert [plan.binds for plan in plans][2:] == ["generate: longest completion"] * 2
    assert plans[0].speed > plans[2].speed


def test_overlap_takes_the_slower_side():
    turns = planned(devices="64xH100-80G", beside=32)
    both = planned(devices="64xH100-80G", beside=32, load=changed(lag=1))
    assert turns.seconds == pytest.approx(sum(turns.sides))
    assert both.seconds == max(both.sides) < turns.seconds
    assert both.overlaps and not turns.overlaps
    assert planned(load=changed(lag=1)).overlaps is False, "on the same devices they take turns"


def test_a_step_waits_for_completions_begun_at_most_its_lag_before():
    """Of 2,048 completions one has 3,946 tokens: within one step with a lag of 1, within eight with one of 8."""
    plans = {lag: planned(devices="64xH100-80G", beside=32, load=changed(lag=lag)) for lag in (1, 2, 8)}
    engines = {lag: plan.sides[0] for lag, plan in plans.items()}
    times = plans[1].times.engine_alone()
    assert engines[1] > 3946 * times.decode_step(1, 150)[0]
    assert engines[1] > engines[2] > engines[8] > 3050 / 3946 * engines[2] / 2


def test_each_choice_of_attention_has_one_rate():
    kinds = device_kinds()

    def path(attention: str, device: str = "H100-80G", **load) -> str:
        spec = ModelConfig(path="here", compute_dtype="bfloat16", attention=attention)
        return attention_path(spec, kinds[device], changed(**load))

    assert [path(name) for name in ("flash3", "varlen", "auto", "padded")] == ["flash3", "flash2", "flash2", "sdpa"]
    assert [path("packed", shared=shared) for shared in (True, False)] == ["masked", "sdpa"]
    assert path("flash3", "H200-141G") == "flash3" and path("auto", "MI300X-192G") == "sdpa"
    with pytest.raises(FieldError, match="flash3.*is for Hopper GPUs.*B200-180G; set model.attention=auto"):
        path("flash3", "B200-180G")


def test_the_memory_of_a_run_on_its_gpu(monkeypatch, tmp_path):
    """That of the plan, whatever the driver calls the GPU; another one is planned by its memory."""
    recipe = resolve("qwen3_4b_grpo", ["placement={kind: torchrun}"], root=None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    expected = sum(plan_recipe(recipe, read_devices("4xH200-141G")[0]).memory.trainer.values())
    for name, memory in (("NVIDIA H200", 139.8), ("NVIDIA H100 80GB HBM3", 79.2), ("Unheard Of 9", 200.0)):
        facts = SimpleNamespace(total_memory=int(memory * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, facts=facts: facts)
        planned = memory_of_run(recipe, torch.device("cuda"))
        assert planned == pytest.approx(expected, rel=0.3), name
    assert nearest_kind("NVIDIA H100 80GB HBM3", 79.2).name == "H100-80G" and nearest_kind("Unheard Of 9", 9) is None


def test_a_plan_as_json():
    plan = planned(expert_parallel=8)
    facts = json.loads(json.dumps(plan.as_json()))
    assert facts["seconds"] == pytest.approx(sum(stage["seconds"] for stage in facts["stages"]))
    assert facts["devices"]["count"] == 32 and facts["fits"] is True
    assert facts["largest_micro_batch"] == plan.micro_batch > 8192


def test_layers_without_attention_have_no_plan(tmp_path):
    config = Qwen3NextConfig(num_hidden_layers=4, hidden_size=64, num_experts=4, vocab_size=64)
    config.architectures = ["Qwen3NextForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no plan for qwen3_next, with layers of linear_attention; plan a decoder"):
        plan_recipe(resolve("qwen3_30b_cppo", [f"model.path={tmp_path}"], root=None), read_devices("8xH100-80G")[0])


def test_an_adapter_is_cheaper_to_train_and_a_reference_takes_memory(tiny_model):
    words = [f"model.path={tiny_model('qwen3')}", "placement=torchrun"]
    (devices,) = read_devices("8xH100-80G")
    whole = plan_recipe(resolve("qwen3_4b_grpo", words, root=None), devices)
    adapter = plan_recipe(
        resolve("qwen3_4b_grpo", [*words, "model.lora={rank: 2}", "algorithm.reference_kl=k3"], root=None), devices
    )
    update, cheaper = (next(s for s in p.stages if s.name == "update") for p in (whole, adapter))
    assert update.parts["compute"] * 3 / 4 < cheaper.parts["compute"] < update.parts["compute"], "attention's stays"
    assert cheaper.sent["gather dense"] < update.sent["gather dense"]
    added = adapter.memory.trainer["weights"] - whole.memory.trainer["weights"]
    assert added == 4 * 2 * 2 * 608 // 8  # 608: in + out of the matrices of each of two layers
    assert adapter.memory.trainer["optimizer"] == 2 * added and "frozen models" not in adapter.memory.trainer
    against = plan_recipe(resolve("qwen3_4b_grpo", [*words, "algorithm.reference_kl=k3"], root=None), devices)
    assert against.memory.trainer["frozen models"] == against.memory.trainer["weights"]
    assert against.load.forwards == whole.load.forwards + 1
