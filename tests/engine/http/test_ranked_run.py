"""A run of two ranks that generates at servers of which one dies, one comes back, and one joins late. The servers are
fakes, with a real model each (`model_server`)."""

import pytest

from tests.engine.http.ranked_run import RankedRun, ServerProgram
from tests.ports import kept_port

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def recipe(model, engine):
    return [
        *("quickstart", f"model.path={model}", "model.device=cpu", "model.compute_dtype=float32"),
        *("runtime.threads=1", "model.max_length=200", "train.steps=1000", "train.prompts_per_step=2"),
        *("train.completions_per_prompt=4", "sampling.max_tokens=4", "eval.task=null", f"engine={engine}"),
        *("algorithm=grpo", "checkpoint.every=0", "data.system=null", "train.optimizer.lr=1e-2"),
        "reward=[{kind: tests.runtime.tiny_run:Even}]",
    ]  # fmt: skip


def test_two_ranks_and_servers_that_die_return_and_join_late(tiny_model, tmp_path):
    model = tiny_model("llama")
    first, second, late = (ServerProgram(tmp_path, model, kept_port()) for _ in range(3))
    urls = f"[{first.url},{second.url},{late.url}]"
    engine = f"{{kind: vllm, url: {urls}, health_seconds: 0.3, interrupt: finish}}"
    run = None
    try:
        for server in (first, second):
            server.start()
        for server in (first, second):
            server.wait()
        run = RankedRun(tmp_path / "run", recipe(model, engine))
        run.until(lambda steps: len(steps) >= 2)
        second.kill()
        run.until(lambda steps: steps[-1]["sync/replicas"] == 1)
        late.start()
        second.start()
        run.until(lambda steps: steps[-1]["sync/replicas"] == 3)
        steps = run.steps()
    finally:
        for server in (first, second, late):
            server.kill()
        if run is not None:
            run.kill()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))  # no death costs a step
    ready = [int(step["replicas/ready"]) for step in steps]
    proven = [int(step["sync/replicas"]) for step in steps]
    assert ready[0] == 2 and 1 in ready and ready[-1] == 3, ready
    assert proven[0] == 2 and 1 in proven and proven[-1] == 3, proven
    assert all(step["sync/probe_max"] < 1e-3 for step in steps)  # nats: both compute in float32
    assert sum(step["replicas/returned"] for step in steps) == 2
    assert any("sync/slope" in step for step in steps)  # the weights move, and so do the servers' log-probs
