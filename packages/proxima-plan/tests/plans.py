"""Plans of known models, for the tests."""

from dataclasses import replace

from proxima.config.sections.model_section import ModelConfig
from proxima.model.parallel.sharding import Sharding
from proxima_plan.devices import read_devices
from proxima_plan.forecast import PlannedRecipe, StepPlan
from proxima_plan.layout import DeviceLayout
from proxima_plan.model_size import known_models
from proxima_plan.step_load import Load

LOAD = Load(sequences=2048, group=32, prompt=150, mean=3050, longest=3946, updates=4)


def planned(model="qwen3-30b-a3b", devices="32xH100-80G", load=LOAD, engines=16, beside=0, each=2, **split) -> StepPlan:
    """A plan of a model on devices, `beside` of them for engines alone."""
    (asked,) = read_devices(devices)
    sharding = Sharding(param_dtype="bfloat16", **split)
    layout = DeviceLayout(asked.count - beside, sharding, engines, each, colocated=not beside)
    spec = ModelConfig(path=model, gradient_checkpointing=load.checkpointing)
    return PlannedRecipe(known_models()[model], spec, load, asked, None).plan(layout)


def changed(load=LOAD, **fields) -> Load:
    return replace(load, **fields)
