"""The families of docs/models.md: trainer and engine against Hugging Face's forward of one sequence, and the table."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from proxima.data.flow import Prompt
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, LocalEngine, check_decoder, collect
from proxima.engine.protocol import Request, Sampling
from proxima.model.policy import Policy
from tests.model.families import BROAD, DENSE, FAMILIES, REFUSED, make
from tests.model.rows import forked, gradients_of, ids, opened, plain_log_prob, rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SHAPES = ((7, (5, 1, 9)), (1, (12,)), (3, (2, 3)))
PATHS = {"packed": "packed", "padded": "one row a sequence"}
DECODERS = {"FastDecoder": "fast", "GeneralDecoder": "general", "RecomputeDecoder": "the whole sequence each token"}


def each_family(test: str, *setting: str) -> list[Any]:
    """Every family, beside a setting of a test; some as campaigns."""
    mark = pytest.mark.campaign(f"tests/model/test_families.py::{test}")
    return [pytest.param(family, *setting, marks=[mark] if family in BROAD else []) for family in FAMILIES]


def table_row(family: str) -> str:
    policy = Policy(make(family))
    engine = LocalEngine(make(family), Local(slots=8))
    decoder = DECODERS[type(engine.scheduler.decoder).__name__]
    shared = "yes" if policy.share_prompt else "no"
    return f"| {family} | `{FAMILIES[family][0].__name__}` | {PATHS[policy.attention]} | {shared} | {decoder} |"


def requests(count: int) -> list[Request]:
    prompts = [Prompt(uid=i, messages=(), tokens=ids(length, 1000 + i)) for i, length in enumerate((7, 1, 14))]
    return [Request(prompt=p, sample=s, sampling=Sampling(max_tokens=count), seed=5) for p in prompts for s in range(2)]


SHARED = {"paths": forked(), "both": opened(forked()), "prompts": opened(rows(*SHAPES))}
ALONE = [(family, shared) for family in ("Llama", "Mamba") for shared in ("paths", "prompts")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shared"), [*each_family("test_the_trainer_trains_as_plain_forwards", "both"), *ALONE]
)
def test_the_trainer_trains_as_plain_forwards(family, shared):
    """Log-probs and gradients of a packed batch, which has once what its sequences begin with, against one sequence at
    a time."""
    items, policy, alone = [*rows(*SHAPES), *SHARED[shared]], Policy(make(family)), make(family).model
    batch = policy.pack(items)
    assert len(batch.tokens) < 0.6 * sum(map(len, items)) or policy.attention == "padded"
    expected = torch.cat([plain_log_prob(alone, row) for row in items])[batch.sampled]
    given = policy(batch).log_prob[batch.sampled]
    assert (given - expected).abs().max() < 3e-5  # nats
    signs = torch.tensor([1.0, -2.0]).repeat(len(expected))[: len(expected)]
    (expected * signs).sum().backward()
    (given * signs).sum().backward()
    ours, theirs = gradients_of(policy.model), gradients_of(alone)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < 1e-4 * gradient.abs().max() + 1e-5, name
    mine, other = (torch.cat([x.flatten() for x in gradients.values()]) for gradients in (ours, theirs))
    assert (mine - other).norm() <= 1e-5 * other.norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", each_family("test_the_engine_agrees_with_the_model"))
def test_the_engine_agrees_with_the_model(family):
    """float32: each token's log-prob against the model's own forward of the whole sequence; windows reach over 4."""
    asked = requests(13)
    given = asyncio.run(collect(LocalEngine(make(family), Local(slots=8, dtype="float32")), asked))
    pairs = list(zip(asked, given, strict=True))
    trajectories = [Trajectory.of(r.prompt, c, group=i, advantage=0.0) for i, (r, c) in enumerate(pairs)]
    with torch.no_grad():
        expected = torch.cat([plain_log_prob(make(family).model, row) for row in trajectories])
    behavior = torch.tensor([x for c in given for x in c.sampled_log_prob])
    assert max(len(c.tokens) for c in given) == 13
    assert (behavior - expected).abs().max() < 3e-5  # nats


IN_FLOAT32 = [(family, "float32") for family in ("Llama", "Mistral", "Qwen3-MoE", "Mamba")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*each_family("test_a_completion_has_the_same_bits_alone_and_in_a_crowd", "bfloat16"), *IN_FLOAT32],
)
def test_a_completion_has_the_same_bits_alone_and_in_a_crowd(family, dtype):
    asked = requests(4)
    spec = Local(slots=8, dtype=dtype)
    crowd = asyncio.run(collect(LocalEngine(make(family), spec), asked))
    engine = LocalEngine(make(family), spec)
    assert engine.capabilities.deterministic
    for i in (1, 5):
        (alone,) = asyncio.run(collect(engine, [asked[i]]))
        assert alone.tokens.tolist() == crowd[i].tokens.tolist()
        assert alone.sampled_log_prob.tolist() == crowd[i].sampled_log_prob.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_sliding_window_reaches_over_the_end_of_the_prompt(family):
    """On every path: the first test has the packed one that shares prompts."""
    trajectories = [*rows(*SHAPES), *rows((14, (6, 6)))]
    policies = [Policy(make(family), attention="packed", share_prompt=False), Policy(make(family), attention="padded")]
    policies.append(Policy(make(family), attention="packed", share_prompt=False))
    policies[2].model.config.sliding_window = None
    for module in policies[2].model.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = None
    with torch.no_grad():
        expected = torch.cat([plain_log_prob(make(family).model, row) for row in trajectories])
        apart, padded, without = (policy(policy.pack(trajectories)).log_prob for policy in policies)
    assert max((apart - expected).abs().max(), (padded - expected).abs().max()) < 3e-5
    assert (without - expected).abs().max() > 0.01, "the window must matter"


def test_which_decoders_are_not_the_fast_one():
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    windowed = hf.Qwen2ForCausalLM(hf.Qwen2Config(**DENSE, **windows))
    with pytest.raises(ValueError, match="engine.decoder='fast': sliding window has no fast path; use auto or general"):
        check_decoder(windowed, Local(decoder="fast"))


@pytest.mark.parametrize("family", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(family):
    kind, _, reason = REFUSED[family]
    expected = f"{kind.__name__} is not supported: {reason}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        Policy(make(family))
    with pytest.raises(ValueError, match=re.escape(expected)):
        LocalEngine(make(family), Local(slots=8))
    assert f"| {family} | `{kind.__name__}` | {reason} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_has_the_table():
    wanted = [table_row(family) for family in FAMILIES]
    page_rows = re.findall(r"^\| .* \| `\w+` \| .* \| (?:yes|no) \| .* \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert page_rows == wanted, "docs/models.md must have these rows:\n" + "\n".join(wanted)


@pytest.mark.parametrize(
    ("family", "path", "why"),
    [
        ("LFM2", "packed", r"off by \d\.?\d* nats"),
        ("Mamba", "packed", r"off by \d\.?\d* nats"),
        (
            "DeepSeek-V3",
            "packed",
            ".* does not support keys and values of different sizes, as DeepseekV3Attention has.*",
        ),
    ],
)
def test_attention_that_would_mix_sequences_is_refused(family, path, why):
    remedy = "set model.attention=auto, or padded"
    with pytest.raises(
        ValueError, match=f"model.attention='{path}' does not keep the sequences of a .* apart \\({why}\\); {remedy}"
    ):
        Policy(make(family), attention=path)
