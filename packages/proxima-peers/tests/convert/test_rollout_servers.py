"""`engine` from the peers' options for vLLM and SGLang: translated, or named as without effect with the reason."""

import pytest

from proxima.config import resolve
from proxima_peers.convert.rollout_servers import DTYPES

from .conftest import why

R = "actor_rollout_ref.rollout."
AREAL = {"actor.path": "a", "rollout.max_head_offpolicyness": 0, "gconfig.n_samples": 4}


def engine(done):
    return done.recipe.get("engine", {})


def test_verls_vllm_is_started_by_proxima(converted):
    options = {R + "name": "vllm", R + "gpu_memory_utilization": 0.6, R + "tensor_model_parallel_size": 2}
    options |= {R + "enforce_eager": True, R + "dtype": "half", R + "quantization": "fp8"}
    done = converted("verl", options)
    serve = {"replicas": 1, "gpu_memory": 0.6, "eager": True, "dtype": "float16"}
    serve["arguments"] = ["--tensor-parallel-size", "2"]
    assert engine(done) == {"kind": "vllm", "serve": serve, "quantization": "fp8"}
    config = resolve(done.recipe).config
    assert config.engine.serve.arguments == ("--tensor-parallel-size", "2") and config.engine.serve.dtype in DTYPES
    assert not set(options) & set(why(done.ignored)) and "proxima engine install" in done.text


@pytest.mark.parametrize(("kind", "says"), [("sglang", "engine={kind: sglang, url:"), ("hf", "engine local generates")])
def test_other_engines_of_verl_are_reported(kind, says, converted):
    done = converted("verl", {R + "name": kind})
    assert engine(done) == {} and says in why(done.ignored)[R + "name"]


def test_a_file_that_names_no_engine_generates_here(converted):
    for peer, option in (("verl", {R + "temperature": 1.0}), ("trl", {"beta": 0.0}), ("areal", AREAL)):
        assert "vllm" not in engine(converted(peer, option)).values()


def test_trls_server_is_a_plain_one(converted):
    done = converted("trl", {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9000/"})
    assert engine(done) == {"kind": "vllm", "url": "http://127.0.0.1:9000"}
    assert "trl vllm-serve" in done.text
    done = converted("trl", {"use_vllm": True, "vllm_server_port": 8001, "vllm_gpu_memory_utilization": 0.3})
    assert engine(done) == {"kind": "vllm", "url": "http://127.0.0.1:8001"}  # TRL binds 0.0.0.0
    assert "its own settings" in why(done.ignored)["vllm_gpu_memory_utilization"]


@pytest.mark.parametrize("url", [["http://a:1", "http://b:2"], "http://[::1", "127.0.0.1:8000"])
def test_an_address_that_is_none_is_to_fill_in(url, converted):
    done = converted("trl", {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url})
    assert engine(done) == {"kind": "vllm", "url": "http://127.0.0.1:8000"}
    assert "must be an http:// address" in done.text


def test_trls_vllm_in_the_trainers_process_is_started_beside_it(converted):
    done = converted("trl", {"use_vllm": True, "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1})
    assert engine(done) == {"kind": "vllm", "serve": {"replicas": 1, "gpu_memory": 0.3}}
    done = converted("trl", {"vllm_mode": "server", "vllm_server_port": 8001})
    assert engine(done) == {} and why(done.ignored)["vllm_server_port"] == "use_vllm is false"


@pytest.mark.parametrize("name", ["allocation_mode", "rollout.backend"])
def test_areals_layout_becomes_replicas(name, converted):
    done = converted("areal", {**AREAL, name: "vllm:d4p1t2+fsdp:d8", "vllm.gpu_memory_utilization": 0.8})
    serve = {"replicas": 4, "gpu_memory": 0.8, "arguments": ["--tensor-parallel-size", "2"]}
    assert engine(done)["kind"] == "vllm" and engine(done)["serve"] == serve
    done = converted("areal", {**AREAL, name: "sglang:d4p1t1+d4p1t1"})
    assert "kind: sglang" in why(done.ignored)[name]
