"""The command line of a server has what the engine's fields ask of it."""

from itertools import pairwise

import pytest

from proxima.engine.serve.launch import Serve, sglang_launch, vllm_launch

FLAGS = {"sampling_mask": "--return-sampling-mask", "routed_experts": "--enable-return-routed-experts"}


@pytest.mark.parametrize("field", FLAGS)
def test_a_field_has_its_flag(field):
    def flags(**fields):
        command = vllm_launch(Serve(executable="/bin/true"), "model", 8000, **fields).command
        return [flag for flag in FLAGS.values() if flag in command]

    assert flags(**{field: True}) == [FLAGS[field]] and flags() == []


def options(model="model", **settings):
    """Those of SGLang on a CPU."""
    command = sglang_launch(Serve(executable="/bin/true", **settings), str(model), 8000).command
    return dict(pairwise(command))


@pytest.fixture
def _no_gpu(monkeypatch):
    monkeypatch.setattr("proxima.engine.serve.launch.has_gpu", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_the_cache_of_sglang_on_a_cpu_has_the_size_that_is_asked_for(tiny_model):
    llama = tiny_model("llama")  # 2 layers, 2 heads of keys and values, 8 wide, in float32
    assert options(llama, dtype="float32")["--max-total-tokens"] == str(2**30 // (2 * 2 * 2 * 8 * 4))
    assert options(llama, dtype="bfloat16", cache_gib=3)["--max-total-tokens"] == str(3 * 2**30 // (2 * 2 * 2 * 8 * 2))
    assert options("a-hub/name", cache_gib=2)["--max-total-tokens"] == "32768"


def test_sglang_serves_a_float32_model_in_bfloat16(tiny_model):
    """By itself it would take float16."""
    assert options(tiny_model("llama"))["--dtype"] == "bfloat16"
    assert options(tiny_model("llama"), dtype="float32")["--dtype"] == "float32"
    assert options("a-hub/name")["--dtype"] == "auto"


def test_the_health_of_sglang_is_no_request():
    """One would wait in a pause, and keep the cache from being flushed."""
    variables = sglang_launch(Serve(executable="/bin/true"), "model", 8000).variables
    assert variables["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


@pytest.mark.usefixtures("_no_gpu")
def test_sglang_serves_the_whole_length_of_the_model(tiny_model):
    assert options(tiny_model("llama"))["--context-length"] == "262"  # prompts may have six tokens less
    assert options(tiny_model("llama"), max_length=100)["--context-length"] == "106"
    assert "--context-length" not in options("a-hub/name")


@pytest.mark.parametrize(("rank", "room"), [(1, "8"), (16, "16"), (20, "32"), (512, "512")])
def test_a_server_has_room_for_the_adapter(rank, room):
    launch = vllm_launch(Serve(executable="/bin/true"), "model", 8000, adapter_rank=rank)
    words = launch.command
    assert "--enable-lora" in words and words[words.index("--max-lora-rank") + 1] == room
    assert launch.variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    plain = vllm_launch(Serve(executable="/bin/true"), "model", 8000)
    assert "--enable-lora" not in plain.command and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain.variables
