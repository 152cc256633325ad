"""The product on a GPU against itself on a CPU. `python -m benchmarks.gpu --rehearse` runs them on a CPU alone."""

import asyncio
import os

import numpy as np
import pytest
import torch

from proxima.core import AGGREGATES, SURROGATES
from proxima.data.flow import Prompt
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling, ScoreRequest, WeightUpdate
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.stack import TrainStack

HERE = torch.cuda.is_available() or "PROXIMA_REHEARSE" in os.environ
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no GPU")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = ((5, 9), (5, 3), (17, 1), (17, 40))  # of prompt and response; neighbours share a prompt


def trajectories():
    prompts = {length: np.arange(3, 3 + length, dtype=np.int32) for length, _ in LENGTHS}
    return [
        Trajectory(
            group=prompt,
            prompt_tokens=prompts[prompt],
            tokens=np.arange(7, 7 + response, dtype=np.int32),
            advantage=(-1.0) ** i,
            behavior_log_prob=np.full(response, -3.0, np.float32),
        )
        for i, (prompt, response) in enumerate(LENGTHS)
    ]


def policy(folder, device, dtype=torch.float32, attention="auto"):
    return Policy(load(str(folder), device=device), compute_dtype=dtype, attention=attention)


def passed(folder, *settings):
    """Log-probs, and the gradient of their mean by all weights."""
    model = policy(folder, *settings)
    log_prob = model(model.pack(trajectories())).log_prob
    log_prob.mean().backward()
    return log_prob.detach().cpu(), torch.cat([p.grad.flatten().cpu() for p in model.model.parameters()])


def requests(prompts, lengths):
    """For each prompt a completion of each length."""
    asked = [Prompt(uid=i, messages=(), tokens=np.arange(3, 9 + 4 * i, dtype=np.int32)) for i in range(prompts)]
    sampling = [Sampling(max_tokens=length) for length in lengths]
    return [Request(prompt=p, sample=i, sampling=s, seed=1) for p in asked for i, s in enumerate(sampling)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_log_probs_and_gradients(kind, dtype, tolerance, tiny_model):
    (ours, own), (theirs, other) = passed(tiny_model(kind), DEVICE, dtype), passed(tiny_model(kind), "cpu")
    assert (ours - theirs).abs().max() < tolerance
    assert (own - other).norm() < tolerance * other.norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel needs a GPU; tests/model/test_varlen.py stands in for it")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_flash_attention_of_unlike_lengths(kind, tiny_model):
    both = (passed(tiny_model(kind), DEVICE, torch.bfloat16, attention) for attention in ("varlen", "packed"))
    (ours, own), (theirs, other) = both
    assert (ours - theirs).abs().max() < 0.25 and (own - other).norm() < 0.1 * other.norm()


def test_an_update_moves_the_weights_as_on_a_cpu(tiny_model):
    objective = PolicyObjective(surrogate=SURROGATES["ppo_clip"](), aggregate=AGGREGATES["token_mean"]())
    weights = []
    for device in (DEVICE, "cpu"):
        model = policy(tiny_model("llama"), device)
        result = TrainStack(model).update(objective, [trajectories()])
        weights.append([p.detach().cpu() for p in model.model.parameters()])
        assert result.updates == 1 and result.metrics["grad_norm"] > 0
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=0)  # Adam's first step is the sign of the gradient


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU; tests/engine/test_graphed_step.py stands in for them")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_cuda_graphs_give_what_single_kernels_give(kind, tiny_model):
    """Rows end and enter, and weights come twice; in float32, so that rounding draws no other token."""
    loaded, given = load(str(tiny_model(kind)), device=DEVICE), []
    asked = requests(prompts=5, lengths=range(80, 125, 9))
    for graphs in (True, False):
        engine = LocalEngine(loaded, Local(slots=16, dtype="float32", cuda_graphs=graphs))
        for version in (1, 2):
            asyncio.run(engine.publish(WeightUpdate(version=version, module=loaded.model)))
            given.append(asyncio.run(collect(engine, asked)))
        recorded = engine.scheduler.decoder.graphs
        assert (recorded is not None) == graphs
        assert recorded is None or (recorded.works and len(recorded._graphs) > 2)
    tokens = [[entry.tokens.tolist() for entry in run] for run in given]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_reports_what_the_trainer_computes(dtype, tiny_model):
    loaded = load(str(tiny_model("qwen3")), device=DEVICE)
    engine = LocalEngine(loaded, Local(slots=8, dtype=dtype))
    asyncio.run(engine.publish(WeightUpdate(version=1, module=loaded.model)))
    asked = requests(prompts=3, lengths=[12] * 4)
    completions = asyncio.run(collect(engine, asked))
    by_uid = {request.prompt.uid: request.prompt.tokens for request in asked}
    wanted = [
        ScoreRequest(prompt_tokens=by_uid[entry.prompt_uid], tokens=entry.tokens, temperature=entry.temperature)
        for entry in completions
    ]
    scored = asyncio.run(engine.score(wanted))
    model = Policy(loaded)
    batch = model.pack(
        [
            Trajectory(group=entry.prompt_uid, prompt_tokens=by_uid[entry.prompt_uid], tokens=entry.tokens)
            for entry in completions
        ]
    )
    with torch.no_grad():
        trained = model(batch).log_prob.cpu().numpy()
    assert len(completions) == 12 and sum(len(entry.tokens) for entry in completions) == len(trained) > 12
    tolerance = 1e-3 if dtype == "float32" else 0.3
    for reported in ([entry.untruncated_log_prob for entry in completions], scored):
        assert np.abs(np.concatenate(reported) - trained).max() < tolerance
