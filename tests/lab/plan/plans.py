"""Plans of known models, for the tests."""

from dataclasses import replace

from proxima.config.model_size import KNOWN
from proxima.config.sections.model_section import ModelConfig
from proxima.lab.plan import DeviceLayout, StepLoad, StepPlan, plan_step, read_devices
from proxima.model.parallel.sharding import Sharding

LOAD = StepLoad(sequences=2048, group=32, prompt=150, mean=3050, longest=3946, updates=4)


def planned(model="qwen3-30b-a3b", devices="32xH100-80G", load=LOAD, engines=16, beside=0, each=2, **split) -> StepPlan:
    """A plan of a model on devices, `beside` of them for engines alone."""
    asked = read_devices(devices)
    sharding = Sharding(param_dtype="bfloat16", **split)
    layout = DeviceLayout(asked.count - beside, sharding, engines, each, colocated=not beside)
    spec = ModelConfig(path=model, gradient_checkpointing=load.checkpointing)
    return plan_step(KNOWN[model], spec, layout, load, asked)


def changed(load=LOAD, **fields) -> StepLoad:
    return replace(load, **fields)
