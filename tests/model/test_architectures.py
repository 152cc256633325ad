"""Architectures beside the tiny kinds: sliding windows, and one without any attention."""

import asyncio

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from proxima.data import Prompt
from proxima.engine.general_decoder import GeneralDecoder, RecomputeDecoder
from proxima.engine.local import Local, LocalEngine, collect, make_decoder
from proxima.engine.protocol import Request, Sampling
from proxima.model import LoadedModel, Policy
from tests.model.rows import reference, rows
from tests.tiny import VOCABULARY, tiny_tokenizer

WINDOW = 4
SHAPES = ((7, (5, 0, 9)), (1, (12,)), (3, (2, 3)), (14, (6, 6)))
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
COMMON |= {"initializer_range": 0.25}
DECODER = COMMON | {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make(kind: str) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind == "mistral":
            model = MistralForCausalLM(MistralConfig(**DECODER, sliding_window=WINDOW))
        elif kind == "qwen2":  # the second layer has the window, the first sees all
            model = Qwen2ForCausalLM(
                Qwen2Config(**DECODER, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
            )
        else:
            model = MambaForCausalLM(MambaConfig(**COMMON, state_size=4, expand=2, conv_kernel=4, time_step_rank=2))
    return LoadedModel(model=model.eval(), tokenizer=tiny_tokenizer(), path=kind)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_sliding_window_reaches_over_the_end_of_the_prompt(kind, share):
    trajectories = rows(*SHAPES)
    with torch.no_grad():
        expected = reference(make(kind).model, trajectories)
        runner = Policy(make(kind), attention="packed", share_prompt=share)
        torch.testing.assert_close(runner(runner.pack(trajectories)).log_prob, expected, rtol=0, atol=3e-5)
        padded = Policy(make(kind), attention="padded")
        torch.testing.assert_close(padded(padded.pack(trajectories)).log_prob, expected, rtol=0, atol=3e-5)
        whole = make(kind)
        whole.model.config.sliding_window = None
        for layer in whole.model.model.layers:
            layer.self_attn.sliding_window = None
        runner = Policy(whole, attention="packed", share_prompt=share)
        assert (runner(runner.pack(trajectories)).log_prob - expected).abs().max() > 0.01, "the window must matter"


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_the_mask_path_refuses_windows(kind):
    runner = Policy(make(kind), attention="mask")
    with pytest.raises(ValueError, match="model.attention=mask does not know sliding windows"):
        runner(runner.pack(rows(*SHAPES)))


def generated(loaded: LoadedModel, *, decoder: str = "auto", count: int = 24):
    engine = LocalEngine(loaded, Local(slots=8, dtype="float32", decoder=decoder))
    prompts = [
        Prompt(uid=i, messages=(), tokens=row.prompt_tokens)
        for i, row in enumerate(rows((7, (1,)), (1, (1,)), (14, (1,))))
    ]
    requests = [
        Request(prompt=p, sample=s, sampling=Sampling(max_tokens=count), seed=5) for p in prompts for s in range(4)
    ]
    return engine, requests, asyncio.run(collect(engine, requests))


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "mamba"])
def test_the_engine_agrees_with_the_plain_forward(kind):
    from proxima.data import Trajectory

    loaded = make(kind)
    engine, requests, completions = generated(loaded)
    assert type(engine.scheduler.decoder) is (RecomputeDecoder if kind == "mamba" else GeneralDecoder)
    assert max(len(c.tokens) for c in completions) > 3 * WINDOW
    trajectories = [
        Trajectory.of(r.prompt, c, group=i, advantage=0.0)
        for i, (r, c) in enumerate(zip(requests, completions, strict=True))
    ]
    with torch.no_grad():
        expected = reference(make(kind).model, trajectories) if kind != "mamba" else plain(make(kind), trajectories)
    behavior = torch.tensor([x for c in completions for x in c.sampled_log_prob])
    torch.testing.assert_close(behavior, expected, rtol=0, atol=3e-5)


def plain(loaded: LoadedModel, trajectories) -> torch.Tensor:
    from tests.model.rows import plain_log_prob

    return torch.cat([plain_log_prob(loaded.model, row) for row in trajectories])


def test_a_window_has_no_fast_path():
    with pytest.raises(ValueError, match="engine.decoder='fast': sliding window has no fast path; use auto or general"):
        make_decoder(make("qwen2").model, torch.float32, "fast")
    with pytest.raises(ValueError, match="engine.decoder='fast': family mistral has no fast path"):
        make_decoder(make("mistral").model, torch.float32, "fast")
    with pytest.raises(ValueError, match="engine.decoder='fast': family mamba has no fast path"):
        make_decoder(make("mamba").model, torch.float32, "fast")


def test_a_model_without_attention_is_padded():
    trajectories = rows(*SHAPES, temperature=(1.0, 0.5))
    runner = Policy(make("mamba"))
    assert (runner.attention, runner.share_prompt) == ("padded", False)
    out = runner(runner.pack(trajectories))
    expected = plain(make("mamba"), trajectories)
    torch.testing.assert_close(out.log_prob, expected, rtol=0, atol=3e-5)
    out.log_prob.sum().backward()
    other = make("mamba")
    plain(other, trajectories).sum().backward()
    for (name, a), b in zip(runner.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-3, atol=1e-4 * float(b.grad.abs().max()) + 1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
