"""What `explain` says of engines that are servers."""

from proxima.config import resolve
from proxima.config.estimate import engine_notes

VLLM = "engine={kind: vllm, url: 'http://127.0.0.1:8000'}"
KL = "algorithm.reference_kl={kind: k3, coefficient: 0.1}"
REFERENCE = "algorithm.reference_engine={kind: vllm, url: 'http://127.0.0.1:8001'}"


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
