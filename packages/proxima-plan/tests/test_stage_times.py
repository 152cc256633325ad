import math
from dataclasses import replace

import pytest

from proxima_plan.balance import slowest
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
    assert alone == pytest.approx(many.update(Sequences.of([30_000])).parts[COMPUTE], rel=0.06), "one rank has it"
    split = planned(devices="128xH100-80G", context_parallel=4).times
    assert split.update(long).parts[COMPUTE] == pytest.approx(alone / 4, rel=0.12), "and waits in other micro-batches"
    assert split.update(long).sent["context"] > 0 and split.update(Sequences.of([])).seconds == 0


def test_a_backward_pass_computes_two_products_for_each_and_attention_five():
    """Of which a forward pass computes one, and two: the scores are computed again, not kept."""
    plain = planned(load=changed(checkpointing=False)).times
    again = planned().times
    for lengths, plainly, repeated in (([1] * 3200, 3, 4), ([3_000_000] * 32, 3.5, 4.5)):
        data = Sequences.of(lengths)
        forward = plain.forward(data).parts[COMPUTE]
        assert plain.update(data).parts[COMPUTE] == pytest.approx(plainly * forward, rel=0.01)
        assert again.update(data).parts[COMPUTE] == pytest.approx(repeated * forward, rel=0.01)


def test_paths_of_attention():
    """A mask does not spare the pairs that it hides; the head's logits are moved by any path."""
    long = Sequences.of([3_000_000] * 32)
    times = planned(load=changed(attention="flash2")).times
    rates = times.device.rates
    flash2 = times.update(long).parts
    for path, share in (("flash3", rates.flash3), ("sdpa", rates.sdpa), ("masked", rates.masked / 2)):
        other = planned(load=changed(attention=path)).times.update(long).parts
        ratio = other[COMPUTE] / flash2[COMPUTE]
        assert ratio == pytest.approx(rates.flash2 / share, rel=0.01), path
        assert other[BANDWIDTH] == flash2[BANDWIDTH]
    assert times.update(long).how == f"attention by flash attention 2, at {rates.flash2:g} of the peak"
    compiled = planned(load=changed(compiled=True)).times.update(long).parts
    assert compiled[COMPUTE] == flash2[COMPUTE] and compiled[BANDWIDTH] < 0.8 * flash2[BANDWIDTH]


def test_the_slowest_share_is_waited_for():
    lengths = tuple(float(100 + 37 * i % 1900) for i in range(64))
    tokens, squares, passes = slowest(lengths, 8, 4096, 1e-4)
    assert 1 < tokens < 1.3 and 0.95 < squares < 1.6 and passes >= math.ceil(sum(lengths) / 8 / 4096)
    assert slowest((1000.0,) * 64, 8, 4096, 1e-4) == (1.0, 1.0, 2)
    assert slowest(lengths, 1, 4096, 1e-4) == (1.0, 1.0, math.ceil(sum(lengths) / 4096))
    assert slowest((500.0,), 8, 4096, 0.0) == (8.0, 8.0, 1), "the others wait"


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
    here = replace(times, layout=DeviceLayout(in_process=True)).publish()
    assert here.seconds == pytest.approx(6 * 30_532_122_624 / (3.35e12 * times.device.rates.decode))
    assert LOAD.lag == 0


def published(transfer="auto", adapters_only=False, adapter=None, devices="32xH100-80G", **layout):
    engine = EngineSettings(transfer=transfer, adapters_only=adapters_only)
    times = planned(devices=devices, load=replace(LOAD, engine=engine), **layout).times
    return times, replace(times, adapter=adapter).publish()


SIZE, TENSORS = 2 * 30_532_122_624, 48 * (2 + 6 + 1 + 3 * 128) + 3  # of Qwen3-30B-A3B, in bfloat16


def test_a_group_gathers_while_it_broadcasts_over_the_slower_link():
    beside = {"devices": "64xH100-80G", "beside": 32}
    times, stage = published("group", **beside)
    rates = times.device.rates
    waits = math.ceil(SIZE / 2**28) * rates.wait(5)  # rank 0 and 32 devices
    assert stage.parts[NETWORK] == pytest.approx(SIZE / (times.device.across * rates.network * 1e9) + waits)
    assert stage.sent == {"gather": pytest.approx(SIZE * 31 / 32)}
    assert times.model.tensors == TENSORS
    assert stage.seconds < published("folder", **beside)[1].seconds / 5
    assert "meanwhile broadcast at 35 GB/s in 1.8 s" in stage.how


def test_a_group_over_a_slow_network_takes_as_long_as_the_network():
    times, stage = published("group", devices="64xL40S-48G", beside=32)
    across = times.device.across * 1e9 * times.device.rates.network
    assert stage.parts[NETWORK] == pytest.approx(SIZE / across, rel=0.01)


def test_ipc_gathers_and_each_worker_copies_its_part():
    times, stage = published("ipc")  # two devices a server
    rates = times.device.rates
    memory = times.device.bandwidth * 1e12 * rates.decode
    assert stage.parts[BANDWIDTH] == pytest.approx(1.5 * SIZE / memory)
    assert stage.parts[NETWORK] == pytest.approx(SIZE * 31 / 32 / (400e9 * rates.network))
    proof = stage.parts[FIXED] - TENSORS * rates.load
    assert 0 < proof < 0.5


def test_the_first_weights_are_sent_twice_and_proven_three_times():
    times, stage = published("ipc")
    first = times.first_sync()
    proof = stage.parts[FIXED] - TENSORS * times.device.rates.load
    assert first.parts[NETWORK] == pytest.approx(2 * stage.parts[NETWORK])
    assert 2 * stage.seconds + proof < first.seconds < 2 * stage.seconds + 5 * proof


@pytest.mark.parametrize(("devices", "layout", "kind"), [
    ("8xH100-80G", {"engines": 2, "each": 4, "expert_parallel": 8, "context_parallel": 2}, "ipc"),
    ("128xH800-80G", {"engines": 32, "each": 4, "expert_parallel": 8, "context_parallel": 2}, "ipc"),
    ("128xH800-80G", {"engines": 8, "beside": 64, "each": 8, "expert_parallel": 8}, "group"),
])  # fmt: skip
def test_30b_is_published_in_four_seconds(devices, layout, kind):
    _, stage = published("auto", devices=devices, **layout)
    assert stage.seconds < 4
    assert ("broadcast" in stage.how) == (kind == "group")


@pytest.mark.parametrize(("kind", "shared"), [("vllm", "ipc"), ("sglang", "folder")])
def test_auto_is_a_fact_of_the_placement(kind, shared):
    here = EngineSettings(kind=kind)
    assert here.way(adapters=False, colocated=True, cpu=False) == shared
    assert here.way(adapters=False, colocated=False, cpu=False) == "group"
    assert here.way(adapters=False, colocated=True, cpu=True) == "folder"
    remote = EngineSettings(kind=kind, remote=True)
    assert {remote.way(adapters=False, colocated=False, cpu=cpu) for cpu in (True, False)} == {"group"}


def test_adapters_alone_are_a_small_folder():
    _, whole = published("auto", adapters_only=True)  # there are none
    times, stage = published("auto", adapters_only=True, adapter=20_000_000)
    assert whole == published("auto")[1] != published("folder")[1]
    assert stage.parts[NETWORK] == pytest.approx(2 * 20_000_000 / (times.device.rates.publish * 1e9))
