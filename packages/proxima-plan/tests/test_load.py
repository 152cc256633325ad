from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from unittest import mock

import pytest

from proxima.config.batch_arithmetic import batch_of
from proxima.config.resolution import resolve
from proxima_plan.model_size import known_models
from proxima_plan.step_load import Load, load_of, load_of_examples

from .plans import small_mixture


@pytest.mark.parametrize("mean", [500, 3000, 3990])
def test_lengths_have_the_mean_and_the_longest(mean):
    load = Load(sequences=4096, group=16, prompt=100, mean=mean, longest=4000)
    lengths = load.lengths(4096)
    assert fmean(lengths) == pytest.approx(mean, rel=0.01)
    assert max(lengths) == load.largest(4096) <= 4000
    assert load.largest(16) <= load.largest(4096)
    first = fmean(lengths[:256])
    assert first == pytest.approx(mean, rel=0.1), "they are mixed"


def test_an_engine_with_few_has_the_longest_of_the_step():
    load = Load(sequences=8192, group=16, prompt=100, mean=1900, longest=28672)
    assert max(load.lengths(64)) == load.largest(8192) == 28672, "one of a thousand never ends"
    assert replace(load, endless=0.0).largest(8192) < 28672
    assert load.largest(100) == round(load.quantile(0.995)) < 28672


def test_of_a_recipe():
    config = resolve("dapo_32b", ["train.epochs_per_step=2"], root=None).config
    load = load_of(config, batch_of(config, 2048), known_models()["qwen2.5-32b"], 5000.0, 0.7)
    assert (load.sequences, load.trained, load.updates, load.passes) == (1536 * 16, 8192, 32, 2)
    assert (load.mean, load.longest, load.prompt, load.lag, load.asked) == (5000, 20480, 2048, 0, 1536 * 16)
    assert load_of(config, batch_of(config, 2048), known_models()["qwen2.5-32b"], None, 0.7).mean == pytest.approx(
        20480 / 3
    )
    ahead = ["runtime.max_lag=2", "runtime.max_concurrent_rollouts=600", "algorithm.dynamic_sampling=null"]
    config = resolve("dapo_32b", ahead, root=None).config
    load = load_of(config, batch_of(config, 2048), known_models()["qwen2.5-32b"], None, 0.7)
    assert (load.lag, load.asked, load.forwards) == (2, 600 * 16, 0)


@pytest.mark.parametrize(("chain", "forwards"), [("null", 1), ("{}", 7), ("{versions: 3}", 3), ("{versions: 0}", 0)])
def test_a_chain_costs_a_pass_for_each_version_between(chain, forwards):
    words = ["algorithm=chained", f"algorithm.chain={chain}", "algorithm.next_from=trainer", "runtime.max_lag=8"]
    words += ["runtime.max_concurrent_rollouts=4096", "algorithm.dynamic_sampling=null"]
    config = resolve("gsm8k_grpo_sdp", words, root=None).config
    load = load_of(config, batch_of(config, 2048), known_models()["qwen2.5-32b"], None, 0.7)
    decoupled = resolve("gsm8k_grpo_sdp", ["algorithm=decoupled", *words[3:]], root=None).config
    without = load_of(decoupled, batch_of(decoupled, 2048), known_models()["qwen2.5-32b"], None, 0.7)
    assert load.forwards - without.forwards == forwards


def test_a_teacher_is_held_and_costs_passes_by_its_size(tmp_path):
    """Of 1,912 weights beside a policy of 956: a forward pass of it counts as two."""
    made = small_mixture(tmp_path)
    config = resolve("dapo_32b", [f"algorithm.distillation={{path: {made}}}"], root=None).config
    policy = replace(known_models()["qwen2.5-32b"], parameters=956)
    load = load_of(config, batch_of(config, 2048), policy, None, 0.7)
    assert (load.forwards, load.frozen) == (2, 1912)


def test_the_mean_square_is_that_of_whole_sequences():
    """Lengths of 1,100, nearly all alike; or half of 600 and half of 2,100: (600² + 2100²) / 2700."""
    load = Load(sequences=8, group=1, prompt=100, mean=1000, longest=4000, spread=1e-9, endless=0.0)
    assert load.mean_square == pytest.approx(1100, rel=1e-3)
    lengths = iter([500.0, 2000.0] * 32)
    with mock.patch.object(Load, "quantile", lambda load, share: next(lengths)):
        assert load.mean_square == pytest.approx((600**2 + 2100**2) / 2700)


def test_the_load_of_examples():
    step = SimpleNamespace(examples=32, mean=300.0, longest=9000, budget=4096)
    config = SimpleNamespace(model=SimpleNamespace(gradient_checkpointing=True), train=SimpleNamespace(optimizer=None))
    load = load_of_examples(config, step)
    assert (load.sequences, load.mean, load.longest, load.micro_tokens, load.generates) == (32, 300, 9000, 9000, False)
    assert load_of_examples(config, SimpleNamespace(**vars(step) | {"budget": 10_000})).micro_tokens == 10_000


def test_completions_of_a_mix_are_as_long_as_those_of_its_longest_source():
    sources = ["{name: a, task: arithmetic, sampling: {max_tokens: 90}}", "{name: b, task: arithmetic}"]
    words = [f"task={{kind: mix, tasks: [{', '.join(sources)}]}}", "sampling.max_tokens=30"]
    config = resolve("dapo_32b", words, root=None).config
    load = load_of(config, batch_of(config, 2048), known_models()["qwen2.5-32b"], None, 0.7)
    assert (load.longest, load.prompt, load.mean) == (90, 2048, 30)
