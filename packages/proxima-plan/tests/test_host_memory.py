from dataclasses import replace

from proxima_plan.engine_settings import EngineSettings
from proxima_plan.host_memory import PROCESS, TOKEN, host_memory

from .plans import LOAD, planned


def test_a_node_of_eight_whose_servers_sleep():
    plan = planned(devices="8xH100-80G", engines=2, each=4)
    host = plan.host_memory
    weights = 2 * 30_532_122_624 // 4
    assert host["sleeping servers"] == 8 * weights
    assert host["processes"] == 16 * PROCESS
    assert host["the step's completions"] == round(2048 * 3200 * TOKEN)
    assert "offloaded states" not in host
    awake = replace(plan.layout, awake=True)
    memory = replace(plan.memory, host=0)
    assert "sleeping servers" not in host_memory(plan.recipe.model, awake, memory, LOAD, "H100-80G")


def test_offloaded_states_are_those_of_a_nodes_ranks():
    for devices, engines, ranks in (("8xH100-80G", 2, 8), ("16xH100-80G", 4, 8)):
        whole = planned(devices=devices, engines=engines, each=4)
        plan = planned(devices=devices, engines=engines, each=4, offload=True)
        states = sum(whole.memory.trainer[kind] for kind in ("weights", "gradients", "optimizer"))
        assert plan.host_memory["offloaded states"] == ranks * states


def test_weights_take_no_host_memory_on_their_way_but_a_folder():
    hosts = {
        way: planned(load=replace(LOAD, engine=EngineSettings(transfer=way)), beside=8).host_memory
        for way in ("group", "ipc", "folder")
    }
    assert hosts["group"] == hosts["ipc"]
    assert hosts["folder"] == hosts["ipc"] | {"files of new weights": 2 * 30_532_122_624}
