import math
from dataclasses import replace

import pytest

from proxima_plan.devices import read_devices
from proxima_plan.engine_settings import EngineSettings
from proxima_plan.layout import DeviceLayout
from proxima_plan.stage_times import BANDWIDTH, COMPUTE, FIXED, LONGEST, NETWORK, Sequences

from .plans import LOAD, changed, planned


def test_a_decode_step_by_hand():
    """Qwen2.5-7B on one H100, 64 completions of 1,000 tokens: weights without the embeddings, and their keys, once."""
    times = planned("qwen2.5-7b", "8xH100-80G", engines=8, each=1).times
    weights, keys = 7_615_616_512 - 152_064 * 3584, 64 * 1000 * 2 * 28 * 512
    seconds, binds = times.decode_step(64, 1000)
    rates = times.device.rates
    assert seconds == pytest.approx(2 * (weights + keys) / (3.35e12 * rates.decode) + 28 * rates.layer)
    assert binds == BANDWIDTH
    assert times.decode_step(1, 10)[0] < seconds < times.decode_step(64, 8000)[0]


def test_products_that_reading_does_not_hide():
    """Of a CPU, whose cores read and multiply in turn: each completion of a step costs its products as well."""
    times = planned("qwen2.5-7b", "8xH100-80G", engines=8, each=1).times
    in_turn = replace(times, device=replace(times.device, rates=replace(times.device.rates, rows=1.0)))
    for running in (1, 64):
        more = in_turn.decode_step(running, 1000)[0] - times.decode_step(running, 1000)[0]
        assert more == pytest.approx(times.prefill(running))


@pytest.mark.parametrize(
    "nodes, size, seconds", [(1, 8, 13e-6), (2, 8, 25e-6), (4, 8, 35e-6), (2, 2**20, 71e-6), (4, 2**20, 82e-6)]
)
def test_an_all_reduce_takes_what_nccl_tests_measured(nodes, size, seconds):
    """On H100 with eight adapters a node; over nodes the network's speed counts as well."""
    times = planned(devices=f"{8 * nodes}xH100-80G").times
    sent = 2 * size / times._link(8 * nodes) if nodes > 1 else 0.0
    assert times.device.rates.wait(nodes, size) + sent == pytest.approx(seconds, rel=0.15)


def test_devices_without_a_key_head_of_their_own_read_that_of_others():
    """Four key heads: eight devices read as much of the keys each as four do."""
    read = {}
    for size in (4, 8):
        times = planned(engines=32 // size, each=size).times
        few, many = (times.decode_step(256, context)[0] for context in (20_000, 40_000))
        read[size] = many - few
    assert (
        read[4]
        == pytest.approx(read[8])
        == pytest.approx(2 * 256 * 20_000 * 2 * 48 * 512 / 4 / (3.35e12 * times.device.rates.decode))
    )


def test_experts_are_read_as_far_as_tokens_use_them():
    times = planned(engines=32, each=1).times
    single, many = times.decode_step(1, 1)[0], times.decode_step(256, 1)[0]
    fixed = times.model.layers * times.device.rates.layer
    share = (single - fixed) / (many - fixed)
    active = (3_353_032_704 - 151_936 * 2048) / (30_532_122_624 - 151_936 * 2048)
    assert share == pytest.approx(active, rel=0.05)


def test_generation_ends_with_the_longest():
    times = planned("qwen2.5-7b", "8xH100-80G", engines=8, each=1).times
    short = times.generate([100] * 64, 10)
    tail = times.generate([100] * 63 + [2000], 10)
    assert tail.seconds > 5 * short.seconds and tail.binds == LONGEST
    assert short.parts[LONGEST] == 0 and short.binds in (BANDWIDTH, FIXED)
    assert tail.seconds - short.seconds == pytest.approx(1900 * times.decode_step(1, 1060)[0], rel=0.02)
    queue = times.generate([100] * 64, 10, slots=16)
    assert queue.seconds == pytest.approx(4 * (times.generate([100] * 16, 10).seconds), rel=0.01)


def test_a_host_that_launches_each_kernel_is_slower_than_they_are():
    graphs, eager = (
        planned("qwen2.5-7b", "8xA100-80G", changed(engine=EngineSettings(eager=on)), 8, each=1).times
        for on in (False, True)
    )
    assert graphs.decode_step(1, 300)[0] == pytest.approx(0.013, rel=0.1), "measured on A800"
    assert eager.decode_step(1, 300) == (28 * eager.device.rates.eager, FIXED)
    assert eager.decode_step(1024, 4000) == graphs.decode_step(1024, 4000), "which takes longer than to launch them"


def test_products_are_bound_by_their_inputs_where_the_peak_is_high():
    """An H20 has .15 of the products of an H100, and more bandwidth: narrow matrices cost it less of its peak."""
    h100, h20 = (read_devices(name)[0].kind for name in ("H100-80G", "H20-96G"))
    wide, narrow = 10**6, 256
    assert h100.product(wide) * 989e12 == pytest.approx(1 / 0.8, rel=0.01)
    assert h100.product(narrow) > 3 * h100.product(wide)
    assert h20.product(wide) * 148e12 == pytest.approx(1 / 0.87, rel=0.01)
    assert h20.product(narrow) < 1.4 * h20.product(wide)


def test_an_update_is_shared_and_no_sequence_is_cut():
    few, many = planned(devices="32xH100-80G").times, planned(devices="128xH100-80G").times
    lengths = Sequences.of([1000] * 512)
    assert few.update(lengths).parts[COMPUTE] == pytest.approx(4 * many.update(lengths).parts[COMPUTE])
    long = Sequences.of([30_000] + [1000] * 511)
    alone = many.update(long).parts[COMPUTE]
    assert alone == pytest.approx(many.update(Sequences.of([30_000])).parts[COMPUTE]), "one rank has the long one"
    split = planned(devices="128xH100-80G", context_parallel=4).times
    assert split.update(long).parts[COMPUTE] == pytest.approx(alone / 4)
    assert split.update(long).sent["context"] > 0 and split.update(Sequences.of([])).seconds == 0


def test_a_forward_pass_is_a_third_or_a_quarter_of_an_update():
    plain = planned(load=changed(checkpointing=False)).times
    again = planned().times
    lengths = Sequences.of([1000] * 512)
    assert plain.update(lengths).parts[COMPUTE] == pytest.approx(3 * plain.forward(lengths).parts[COMPUTE])
    assert again.update(lengths).parts[COMPUTE] == pytest.approx(4 * again.forward(lengths).parts[COMPUTE])


def test_what_dimensions_send():
    lengths = Sequences.of([4000] * 128)
    none = planned().times.update(lengths)
    tensor = planned(tensor_parallel=8).times.update(lengths)
    expert = planned(expert_parallel=8).times.update(lengths)
    # two all-reduces a layer in the forward pass, the repeat and the backward pass, of bfloat16
    tokens = 128 * 4000 / 4
    assert tensor.sent["tensor"] == pytest.approx(3 * 48 * 2 * tokens * 2048 * 2 * 2 * 7 / 8)
    assert expert.sent["expert"] == pytest.approx(3 * 48 * 2 * (128 * 4000 / 32) * 8 * 2048 * 2 * 7 / 8)
    assert expert.sent["gather experts"] < none.sent["gather experts"] / 7
    assert expert.sent["gather dense"] == none.sent["gather dense"]
    assert none.parts[NETWORK] >= 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_copies_sum_their_gradients(ranks):
    """Twice the gradients in float32, but for the rank's own part."""
    times = planned("qwen3-4b", f"{ranks}xH100-80G", engines=ranks, each=1, kind="replicate").times
    sent = times.update(Sequences.of([1000] * 8)).sent
    assert sent.get("sum dense", 0) == pytest.approx(2 * 4 * 4_022_468_096 * (ranks - 1) / ranks)


def test_weights_reach_engines_but_those_in_the_process():
    times = planned().times
    assert times.publish().seconds == pytest.approx(2 * 30_532_122_624 / (times.device.rates.publish * 1e9))
    here = replace(times, layout=DeviceLayout(in_process=True)).publish()
    assert here.seconds == pytest.approx(6 * 30_532_122_624 / (3.35e12 * times.device.rates.decode))
    assert LOAD.lag == 0


def published(transfer="auto", adapters_only=False, adapter=None, devices="32xH100-80G", **layout):
    engine = EngineSettings(transfer=transfer, adapters_only=adapters_only)
    times = planned(devices=devices, load=replace(LOAD, engine=engine), **layout).times
    return times, replace(times, adapter=adapter).publish()


def test_a_group_copies_to_the_host_and_broadcasts_over_the_slower_link():
    size, times, stage = 2 * 30_532_122_624, *published("group")
    rates = times.device.rates
    waits = math.ceil(size / 2**28) * rates.wait(5)  # rank 0 and 32 devices
    assert stage.parts[BANDWIDTH] == pytest.approx(size / (rates.host * 1e9))
    across = times.device.across * rates.network
    assert stage.parts[NETWORK] == pytest.approx(size / (min(rates.host, across) * 1e9) + waits)
    assert stage.seconds < published("folder")[1].seconds / 5


def test_a_group_over_a_slow_network_takes_as_long_as_the_network():
    size, times, stage = 2 * 30_532_122_624, *published("group", devices="32xL40S-48G")
    across = times.device.across * 1e9 * times.device.rates.network
    assert stage.parts[NETWORK] == pytest.approx(size / across, rel=0.01)


def test_ipc_copies_for_each_server_on_the_shared_device():
    size, times, stage = 2 * 30_532_122_624, *published("ipc", engines=1, each=1)
    memory = times.device.bandwidth * 1e12 * times.device.rates.decode
    assert stage.parts == {BANDWIDTH: pytest.approx(2 * size / (times.device.rates.host * 1e9) + 2 * size / memory)}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_auto_is_a_group_for_servers_on_other_machines(kind):
    assert EngineSettings(kind=kind, remote=True).way(adapters=False) == "group"
    assert EngineSettings(kind=kind).way(adapters=False) == "folder"


def test_adapters_alone_are_a_small_folder():
    _, whole = published("auto", adapters_only=True)  # there are none
    times, stage = published("auto", adapters_only=True, adapter=20_000_000)
    assert whole == published("folder")[1] == published("auto")[1]
    assert stage.parts == {NETWORK: pytest.approx(2 * 20_000_000 / (times.device.rates.publish * 1e9))}
