import pytest

from proxima_plan.devices import device_kinds, device_rates, read_devices, this_machine


def test_every_device_has_numbers_of_its_class_and_a_source():
    for kind in device_kinds().values():
        assert 10 < kind.memory < 400 and 50 < kind.bf16 < 3000 and 0.2 < kind.bandwidth < 10, kind
        assert kind.inside >= kind.across > 0 and kind.node >= 1 and len(kind.source) > 10
        assert kind.memory <= float(kind.name.rpartition("-")[2].removesuffix("G")), "the driver reports less"
    assert {"H800-80G", "H20-96G", "H100-80G", "H200-141G", "A100-80G", "B200-180G", "GB200-186G", "L40S-48G"} <= {
        *device_kinds()
    }


def test_reading_how_many():
    (devices,) = read_devices(" 128×h800-80g ")
    assert (devices.kind.name, devices.count, str(devices)) == ("H800-80G", 128, "128xH800-80G")
    assert read_devices("L4-24G")[0].count == 1


def test_numbers_are_doubled_or_listed():
    def counts(text):
        return [devices.count for devices in read_devices(text)]

    assert counts("8-1024xH800-80G") == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert counts("24,8-20×h20-96g") == [8, 16, 24] and counts("24-24xH20-96G") == [24]


@pytest.mark.slow
def test_this_machine_is_measured_and_ranks_share_its_cores(monkeypatch):
    monkeypatch.setattr("proxima_plan.devices.COPIED", 2**16)
    monkeypatch.setattr("proxima_plan.devices.gemm_rate", lambda dtype, device: 8e12)
    alone, two = (this_machine("bfloat16", "cpu", count) for count in (1, 2))
    assert alone.kind.bf16 == 2 * two.kind.bf16 == 8 and alone.kind.memory == 2 * two.kind.memory > 1
    assert alone.kind.bandwidth > 0 and alone.kind.fused and not this_machine("float32", "cpu", 1).kind.fused
    assert alone.kind.rates.step < device_rates().step and alone.kind.rates.rows > device_rates().rows


def test_links():
    """Eight adapters of 50 GB/s feed a gather across nodes, one an exchange, less what stays in a node."""
    kind = device_kinds()["H100-80G"]
    assert kind.link(8) == kind.exchange(8) == 450e9
    assert kind.link(16) == 400e9 and kind.link(16, stride=8) == 50e9
    assert kind.exchange(16) == pytest.approx(50e9 * 15 / 8)
