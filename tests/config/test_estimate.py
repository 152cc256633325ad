"""What `explain` says of engines that are servers, and what is refused."""

from proxima.config import resolve
from proxima.config.estimate import batch_of, engine_notes
from proxima.config.memory_size import BYTES, memory_of
from proxima.config.model_size import ModelFacts

VLLM = "engine={kind: vllm, url: 'http://127.0.0.1:8000'}"
KL = "algorithm.reference_kl={kind: k3, coefficient: 0.1}"
REFERENCE = "algorithm.reference_engine={kind: vllm, url: 'http://127.0.0.1:8001'}"


def memory(recipe, *overrides):
    config = resolve(recipe(), list(overrides)).config
    model = ModelFacts(parameters=1000, layers=2, hidden=8, intermediate=16, vocabulary=64, kv_width=8)
    return memory_of(config, model, batch_of(config, 10))


def test_who_gets_what_is_reported(recipe):
    assert list(engine_notes(resolve(recipe()).config)) == []
    (purpose,) = engine_notes(resolve(recipe(), ["engine.weights=int4", "engine.noise=0.05"]).config)
    settings = "engine.weights=int4 and engine.noise=0.05"
    assert purpose == f"engine: differs from the trainer on purpose, by {settings}: see docs/mismatch.md"
    goods, reference, weights = engine_notes(resolve(recipe(), [VLLM, REFERENCE, KL]).config)
    assert goods.startswith("engine: vllm at http://127.0.0.1:8000 gets prompts, completions and")
    assert "vllm at http://127.0.0.1:8001 gets tokens, for the reference" in reference
    assert "/dev/shm" in weights and "256 tokens" in weights
    own, *_ = engine_notes(resolve(recipe(), ["engine={kind: vllm, serve: {replicas: 2}}"]).config)
    assert "vllm in 2 processes of its own, started and stopped with the run, gets" in own


def test_a_server_holds_its_memory_itself(recipe):
    here, there = memory(recipe, "engine=local"), memory(recipe, VLLM)
    assert {"KV cache", "engine's copy of the weights"} <= here.keys()
    assert not {"KV cache", "engine's copy of the weights"} & there.keys()
    handed = {"new weights, for the servers to read", "perturbed copy of them, for servers that return"}
    assert {name: there[name] for name in handed} == dict.fromkeys(handed, 1000 * BYTES["float32"])
    assert not handed & memory(recipe, VLLM, "engine.weight_folder=/somewhere").keys()
    forward, engine = memory(recipe, KL), memory(recipe, KL, REFERENCE)
    assert forward["reference model"] == 1000 * BYTES["float32"] and "reference model" not in engine
