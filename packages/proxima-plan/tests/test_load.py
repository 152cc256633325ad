from dataclasses import replace
from statistics import fmean

import pytest

from proxima.config import resolve
from proxima.config.estimate import batch_of
from proxima_plan.model_size import known_models
from proxima_plan.step_load import Load, load_of


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
