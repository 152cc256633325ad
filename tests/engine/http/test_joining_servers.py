"""A run that generates at servers of which one dies, one comes back, and one joins late. The servers are fakes, with a
real model each (`model_server`)."""

from contextlib import ExitStack

import pytest

from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer
from tests.ports import kept_port
from tests.runtime import tiny_run


def recipe(model, engine):
    return [
        *("quickstart", f"model.path={model}", "model.device=cpu", "model.compute_dtype=float32"),
        *("runtime.threads=1", "model.max_length=200", "train.steps=1000", "train.prompts_per_step=2"),
        *("train.completions_per_prompt=4", "sampling.max_tokens=4", "eval.task=null", f"engine={engine}"),
        *("algorithm=grpo", "checkpoint.every=0", "data.system=null", "train.optimizer.lr=1e-2"),
        "reward=[{kind: tests.runtime.tiny_run:Even}]",
    ]  # fmt: skip


def check(steps):
    """No death costs a step, and every server is proven before it serves."""
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    ready = [int(step["replicas/ready"]) for step in steps]
    proven = [int(step["sync/replicas"]) for step in steps]
    assert ready[0] == 2 and 1 in ready and ready[-1] == 3, ready
    assert proven[0] == 2 and 1 in proven and proven[-1] == 3, proven
    assert all(step["sync/probe_max"] < 1e-3 for step in steps)  # nats: both compute in float32
    assert sum(step["replicas/returned"] for step in steps) == 2


class Done(Exception):
    pass


@pytest.mark.slow
def test_servers_that_die_return_and_join_late(tiny_model, tmp_path):
    """In one process, each server in a thread of its own."""
    model, steps = tiny_model("llama"), []
    ports = [kept_port() for _ in range(3)]

    def start(at):
        life = ExitStack()
        life.enter_context(RawServer(ModelVllm(str(model)), ports[at]))
        return life

    def on(event, *facts):
        if event != "step":
            return
        steps.append(facts[0])
        proven = steps[-1]["sync/replicas"]
        if len(steps) == 2:
            servers[1].close()
        elif proven == 1 and len(servers) == 2:
            servers.extend([start(1), start(2)])
        elif proven == 3:
            raise Done

    servers = [start(0), start(1)]
    engine = {"kind": "vllm", "url": [f"http://127.0.0.1:{port}" for port in ports], "health_seconds": 0.05}
    changes = {"train__steps": 200, "train__prompts_per_step": 2, "sampling__max_tokens": 3, "eval__task": None}
    tree = tiny_run.recipe(model, engine=engine, model__max_length=200, checkpoint__every=0, **changes)
    try:
        with pytest.raises(Done):
            tiny_run.go(tmp_path / "run", tree, observer=tiny_run.Watcher(on))
    finally:
        for server in servers:
            server.close()
    check(steps)
