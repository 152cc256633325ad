"""Decode steps that are recorded and repeated, as CUDA graphs are; `recorded_calls` stands in for these."""

import asyncio
import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxima.data import NotFiniteError
from proxima.engine.local.fast_decoder import GraphedSteps, rounded_up
from proxima.engine.protocol import WeightUpdate
from tests.engine.helpers import agree, engine, requests, run
from tests.engine.recorded_calls import recorded
from tests.model.rows import loaded


def graphed(engine, record=recorded):
    """The engine, with what it has recorded."""
    graphs = GraphedSteps(engine.scheduler.slots, torch.device("cpu"), record)
    engine.scheduler.decoder.graphs = graphs
    return graphs


def published(engine, seed):
    module = loaded("qwen2", seed).model
    asyncio.run(engine.publish(WeightUpdate(version=engine.scheduler.version + 1, module=module)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_completions_are_those_of_single_kernels(kind):
    """While rows end and enter, and the cache and the table of rotary embeddings grow: 5 rows pad to 8, 21 to 24."""
    local, plain = (engine(kind, slots=24) for _ in range(2))
    graphs, numbers = graphed(local), []
    for first, sizes, tokens in ((0, (3, 7), 10), (10, (5, 1), 130), (20, (7, 4), 20), (30, (7, 4), 20)):
        if first == 30:  # another table in its place
            decoder = local.scheduler.decoder
            before, decoder.rotary = decoder.rotary, decoder.rotary.clone()
            before.zero_()
        asked = requests(*sizes, first=first, max_tokens=tokens)
        agree(run(local, asked), run(plain, asked))
        numbers.append(len(graphs._graphs))
    assert graphs.works and numbers[0] > 0 and numbers[1] >= 3 and 1 < numbers[3] <= numbers[2]


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
def test_new_weights_are_read_where_the_old_ones_were(interrupt):
    local, plain = (engine("qwen2", interrupt=interrupt) for _ in range(2))
    graphs, asked = graphed(local), requests(3, 3, max_tokens=15)
    held = None
    for seed in (1, 0):
        given, expected = run(local, asked), run(plain, asked)
        assert [c.tokens.tolist() for c in given] == [c.tokens.tolist() for c in expected]
        held = held or dict(graphs._graphs)
        published(local, seed), published(plain, seed)
    assert held == graphs._graphs and graphs.works


def failing(launch):
    raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")


def failing_without_a_word(launch):
    raise RuntimeError


def empty(launch):
    """What torch records if the model is not on the current device: nothing, though the result is there."""
    out = launch()
    return lambda: None, out


def not_finite(launch):
    replay, out = recorded(launch)
    return lambda: (replay(), out[0].fill_(torch.nan)), out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (failing, "operation not permitted when stream is capturing\n"),
        (failing_without_a_word, ": RuntimeError\n"),
        (empty, "a result that is "),
        (not_finite, "of its norm apart"),
    ],
)
def test_what_can_not_be_recorded_is_said_once_and_done_without(record, reason, capsys):
    local, asked = engine(), requests(3, 3, max_tokens=10)
    graphs = graphed(local, record)
    given = run(local, asked)
    assert given == run(engine(), asked)
    said = capsys.readouterr().err
    assert said.startswith(
        "engine: decoding continues without CUDA graphs (engine.cuda_graphs=false: from the start): "
    )
    assert reason in said and said.count("\n") == 1 and not graphs.works


def test_weights_that_are_nan_are_the_models_fault():
    local = engine()
    graphs = graphed(local)
    with torch.no_grad():
        local.scheduler.decoder.layers[0].post_norm.fill_(torch.nan)
    with pytest.raises(NotFiniteError):
        run(local, requests(1, 1, max_tokens=5))
    assert graphs.works


@pytest.fixture
def cuda(monkeypatch):
    """`cuda(graph=…, …)` puts these in the place of what torch has."""

    def replaced(**names):
        for name, value in {"device": nullcontext, "current_stream": lambda: "before", **names}.items():
            monkeypatch.setattr(torch.cuda, name, value)

    return replaced


@pytest.mark.slow
def test_graphs_share_the_memory_of_one_that_lives(cuda):
    """A pool ends with its last graph, and torch refuses one that has ended."""
    pools, out = [], torch.ones(8)

    class Graph:
        def pool(self):
            return pools[0] or "first"

        def replay(self):
            out.fill_(1)

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        pools.append(pool)
        assert capture_error_mode == "thread_local"
        yield

    cuda(CUDAGraph=Graph, graph=capture)
    graphs = GraphedSteps(8, torch.device("cpu"))
    args = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    for reach, places in ((64, [out]), (128, [out]), (128, [torch.zeros(1)]), (192, [torch.zeros(1)])):
        graphs.run(lambda tokens, position, reach: out, *args, reach, places)
    gc.collect()
    assert pools == [None, "first", None, None] and len(graphs._graphs) == 1 and graphs.works


def test_a_recording_that_fails_leaves_the_stream_that_was(cuda):
    """torch 2.13 leaves its own, if what ends a recording raises."""
    streams = ["before"]

    @contextmanager
    def capture(*how, **more):
        streams.append("of the recording")
        yield
        raise RuntimeError("capture was invalidated")

    cuda(CUDAGraph=object, graph=capture, current_stream=lambda: streams[-1], set_stream=streams.append)
    local = engine()
    graphs = graphed(local, None)
    run(local, requests(1, 1, max_tokens=5))
    assert streams == ["before", "of the recording", "before"] and not graphs.works


@pytest.mark.slow
@pytest.mark.parametrize("record", [recorded, failing])
def test_a_cache_that_grows_is_freed(record):
    local = engine()
    graphed(local, record)
    run(local, requests(1, 1, max_tokens=10))
    before = [weakref.ref(layer) for layer in local.scheduler.cache.layers]
    run(local, requests(1, 2, max_tokens=70, first=5))
    gc.collect()
    assert [layer for layer in before if layer() is not None] == []


@pytest.mark.slow
@given(st.integers(1, 1 << 20), st.sampled_from([8, 64]))
def test_sizes_are_few_and_not_much_larger(count, step):
    size = rounded_up(count, step)
    assert count <= size < count + step or size < 1.25 * count
    assert size % step == 0 and rounded_up(size, step) == size
    assert count <= GraphedSteps.reach_of(count, 1 << 30) and GraphedSteps.reach_of(count, count) == count


def test_a_long_run_records_some_dozens():
    assert len({rounded_up(count, 64) for count in range(1, 32_769)}) == 8 + 4 * 6
    assert len({rounded_up(count, 8) for count in range(1, 513)}) == 8 + 4 * 3
